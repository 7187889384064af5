"""The quick reader of GGUF files has what gguf's own has, of every type of array."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the extra kvgraft[gguf] is not installed")

import gguf

from kvgraft.engine.model.gguf_reader import QuickGGUFReader

ARRAYS = {
    "texts": ["", "a", "日本語", "line\nbreak", "x" * 300],
    "whole": [-3, 0, 7],
    "shares": [0.5, -1.25],
    "truths": [True, False, True],
    "one": ["alone"],
}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_string("general.name", "a name")
    writer.add_uint32("llama.block_count", 2)
    for key, values in ARRAYS.items():
        writer.add_array(key, values)
    writer.add_float32("after", 1.5)
    writer.add_tensor("first", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.add_tensor("second", np.ones(32, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def values(reader):
    """All of the metadata as transformers parses it."""
    from transformers.integrations.ggml import _gguf_parse_value

    return {
        key: [_gguf_parse_value(field.parts[index], field.types) for index in field.data]
        for key, field in reader.fields.items()
    }


def test_fields_equal_those_of_gguf(path):
    quick, own = QuickGGUFReader(path), gguf.GGUFReader(path)
    found = values(quick)
    assert found == values(own)
    assert {key: found[key] for key in ARRAYS} == ARRAYS
    assert [(f.name, f.offset, f.types, f.data) for f in quick.fields.values()] == [
        (f.name, f.offset, f.types, f.data) for f in own.fields.values()
    ]


def test_tensors_equal_those_of_gguf(path):
    quick, own = QuickGGUFReader(path), gguf.GGUFReader(path)
    assert [tensor.name for tensor in quick.tensors] == ["first", "second"]
    for tensor, expected in zip(quick.tensors, own.tensors, strict=True):
        assert tensor.data_offset == expected.data_offset
        assert np.array_equal(tensor.data, expected.data)


def test_elements_of_arrays_cost_no_look_at_the_file_each(path, monkeypatch):
    looks, get = [], gguf.GGUFReader._get
    monkeypatch.setattr(gguf.GGUFReader, "_get", lambda self, *args, **kw: looks.append(args) or get(self, *args, **kw))
    gguf.GGUFReader(path)
    own = len(looks)
    QuickGGUFReader(path)
    assert own - (len(looks) - own) >= sum(map(len, ARRAYS.values()))
