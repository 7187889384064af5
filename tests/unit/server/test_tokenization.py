from __future__ import annotations

import pytest


def test_tokenize_returns_ids(server):
    reply = server.post("/tokenize", {"prompt": "ab", "add_special_tokens": False})
    assert reply.json == {"count": 2, "max_model_len": 2_000, "tokens": [97, 98]}
    assert server.engine.calls[0].add_special_tokens is False


def test_tokenize_tells_texts_of_tokens_if_asked(server):
    reply = server.post("/tokenize", {"prompt": "ab", "return_token_strs": True})
    assert reply.json["token_strs"] == ["a", "b"]


def test_tokenize_takes_one_prompt(server):
    assert server.post("/tokenize", {"prompt": ["a", "b"]}).status == 400


def test_detokenize_gives_back_what_was_tokenized(server):
    tokens = server.post("/tokenize", {"prompt": "Grüße"}).json["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json == {"prompt": "Grüße"}


@pytest.mark.parametrize("tokens", [None, "ab", [], [256], [-1], [1.5], [[1]], [True]])
def test_detokenize_names_what_is_wrong(server, tokens):
    reply = server.post("/detokenize", {"tokens": tokens})
    assert (reply.status, reply.error["param"]) == (400, "tokens")


def test_detokenize_needs_a_tokenizer(server):
    server.engine.loaded.tokenizer = None
    assert "no tokenizer" in server.post("/detokenize", {"tokens": [1]}).error["message"]
