"""Shared by the end-to-end tests."""

from __future__ import annotations

import pytest

from kvgraft.testing.tiny_models import tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A tiny model with the bundled model's tokenizer."""
    from transformers import AutoTokenizer

    from kvgraft.models import bundled_model_path

    path = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)
