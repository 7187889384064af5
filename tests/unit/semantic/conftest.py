"""Small things that a tokenizer can be loaded from."""

from __future__ import annotations

import pytest


@pytest.fixture
def tiny_tokenizer_dir(tmp_path):
    """A directory that transformers loads a tokenizer of three words from."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, "[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path / "model")
    return tmp_path / "model"
