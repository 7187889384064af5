"""A checkpoint is served as it is or not at all: what is missing, strange or broken in it is named in one line."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from kvgraft.config import EngineConfig
from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.core import Engine
from kvgraft.engine.model.loading import adopt_model, load_model
from kvgraft.errors import ConfigError, KVGraftError, ModelError
from kvgraft.models import bundled_model_path
from kvgraft.testing.tiny_models import tiny_model


def save(directory, change=lambda weights: None, **overrides):
    """A checkpoint whose weights `change` has edited."""
    tiny_model("llama", num_hidden_layers=4, intermediate_size=128, **overrides).save_pretrained(directory)
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, {"format": "pt"})
    return str(directory)


def edit_config(directory, **values):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return str(directory)


def refusal(call):
    with pytest.raises(KVGraftError) as caught:
        call()
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert len(text) < 700
    return caught.value


def test_whole_checkpoint_is_served(tmp_path):
    (output,) = LLM(save(tmp_path), num_slots=100).generate([5, 6, 7], SamplingParams(3))
    assert output.token_ids


@pytest.mark.parametrize(
    "key",
    ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"],
)
def test_missing_tensor_is_named(tmp_path, key):
    error = refusal(lambda: load_model(save(tmp_path, lambda weights: weights.pop(key))))
    assert isinstance(error, ModelError)
    assert key in str(error)
    assert "missing" in str(error)


def test_more_layers_than_weights_are_refused(tmp_path):
    save(tmp_path)
    error = refusal(lambda: load_model(edit_config(tmp_path, num_hidden_layers=7, layer_types=None)))
    assert isinstance(error, ModelError)
    assert "model.layers.4" in str(error)


def test_fewer_layers_than_weights_are_refused(tmp_path):
    save(tmp_path)
    error = refusal(lambda: load_model(edit_config(tmp_path, num_hidden_layers=3, layer_types=None)))
    assert "model.layers.3" in str(error)
    assert "unexpected" in str(error)


def test_unexpected_tensor_is_named(tmp_path):
    error = refusal(lambda: load_model(save(tmp_path, lambda weights: weights.update(adapter=torch.zeros(2)))))
    assert "adapter" in str(error)


def test_tensor_of_another_shape_is_named_with_both(tmp_path):
    def change(weights):
        weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 64)

    error = refusal(lambda: load_model(save(tmp_path, change)))
    assert isinstance(error, ModelError)
    assert "model.layers.0.mlp.up_proj.weight" in str(error)
    assert "(3, 64)" in str(error)
    assert "(128, 64)" in str(error)


def test_tied_embeddings_and_known_buffers_may_be_missing_or_there(tmp_path):
    def change(weights):
        assert "lm_head.weight" not in weights
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    load_model(save(tmp_path, change, tie_word_embeddings=True))


def test_truncated_weights_are_refused(tmp_path):
    save(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5_000])
    assert isinstance(refusal(lambda: load_model(str(tmp_path))), ModelError)


@pytest.mark.parametrize("text", ["{", "[]", "5", "", '{"model_type": 5}', "\x00", '"x"', "{}"])
def test_config_that_is_none_is_refused(tmp_path, text):
    save(tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert isinstance(refusal(lambda: load_model(str(tmp_path))), ModelError)


def test_unknown_model_type_is_named(tmp_path):
    save(tmp_path)
    error = refusal(lambda: load_model(edit_config(tmp_path, model_type="galaxy9")))
    assert isinstance(error, ModelError)
    assert "galaxy9" in str(error)


@pytest.mark.parametrize("model_type", ["vit", "t5", "clip"])
def test_architecture_without_a_causal_language_model_is_named(tmp_path, model_type):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    error = refusal(lambda: load_model(str(tmp_path)))
    assert isinstance(error, ModelError)
    assert model_type in str(error)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"version": "1.0", "model": {}}', b"\xff\xfe"])
def test_corrupt_tokenizer_is_not_taken_for_none(tmp_path, content):
    save(tmp_path)
    AutoTokenizer.from_pretrained(bundled_model_path()).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    error = refusal(lambda: load_model(str(tmp_path)))
    assert isinstance(error, ModelError)
    assert "tokenizer" in str(error)


def test_directory_without_a_tokenizer_serves_token_ids(tmp_path):
    assert load_model(save(tmp_path)).tokenizer is None


@pytest.mark.parametrize(
    "device", ["meta", "xpu", "mps", "cuda:99", "cuda:99999999999999", "hpu", "quantum", "cpu:-1", "vulkan:0", ""]
)
def test_device_that_cannot_be_used_is_refused(tmp_path, device):
    error = refusal(lambda: load_model(save(tmp_path), device=device))
    assert isinstance(error, ConfigError)
    assert repr(device) in str(error)


@pytest.mark.parametrize("settings", [{"num_slots": 10**12}, {"kv_bytes": 10**18}, {"num_slots": 10**30}])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
def test_more_slots_than_memory_are_refused(family, settings):
    loaded = adopt_model(family, tiny_model(family), None)
    error = refusal(lambda: Engine(loaded, EngineConfig(**settings)))
    assert isinstance(error, ConfigError)
    assert next(iter(settings)) in str(error)


LARGE = [
    "host_bytes",
    "max_model_len",
    "max_rows",
    "max_running",
    "max_waiting",
    "first_k",
    "max_generation",
    "min_run",
]


@pytest.mark.parametrize("name", [*LARGE, "donor_tokens", "stream_slowdown"])
@pytest.mark.parametrize("value", [10**12, 10**30])
def test_absurd_setting_is_refused_or_harmless(name, value):
    def answer():
        llm = LLM(adopt_model("llama", tiny_model("llama"), None), EngineConfig(num_slots=200), **{name: value})
        return llm.generate([5, 6, 7], SamplingParams(3))[0].report.num_tokens

    try:
        assert answer() == 3
    except ConfigError:
        assert isinstance(refusal(answer), ConfigError)


@pytest.mark.parametrize(
    ("size", "value"), [("num_hidden_layers", 10**9), ("max_position_embeddings", -1), ("hidden_size", 0)]
)
def test_sizes_that_no_model_has_are_refused_before_anything_is_built(tmp_path, size, value, monkeypatch):
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("it is built"))
    error = refusal(lambda: load_model(edit_config(tmp_path, **{size: value}) if save(tmp_path) else ""))
    assert f"{size} {value}" in str(error)


@pytest.mark.parametrize(
    ("package", "settings"), [("xxhash", {"store": "file:PLACE"}), ("onnxruntime", {"embedder": "minilm"})]
)
def test_missing_packages_are_named_before_a_model_is_looked_for(tmp_path, package, settings, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    settings = {name: value.replace("PLACE", str(tmp_path / "store")) for name, value in settings.items()}
    with pytest.raises(ImportError, match=package):
        LLM("/no/such/model", **settings)
