"""What log-probabilities call tokens: no token is left out, none stands for another, and their bytes are the text."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvgraft.engine.sampling.sampling import TokenLogprobs
from kvgraft.models import bundled_model_path
from kvgraft.server.logprobs import TokenIdTexts, TokenTexts, chat_logprobs, completion_logprobs

TEXT = "日本🎉ď a\ufffd"


@pytest.fixture(scope="module")
def byte_level():
    return AutoTokenizer.from_pretrained(bundled_model_path())


@pytest.fixture(scope="module")
def byte_fallback():
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "\u2581"]
    backend = Tokenizer(models.BPE({p: n for n, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_bytes_of_tokens_are_the_text_when_joined(request, kind):
    tokenizer = request.getfixturevalue(kind)
    token_ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    told = chat_logprobs(TokenTexts(tokenizer), [TokenLogprobs(token, -1.0, ()) for token in token_ids])["content"]
    assert b"".join(bytes(token["bytes"]) for token in told).decode() == TEXT
    assert told[0]["token"] == r"bytes:\xe6"
    assert told[0]["bytes"] == [0xE6]
    assert not any(token["token"] == "\ufffd" and token["bytes"] != list("\ufffd".encode()) for token in told)


def test_parts_of_characters_do_not_collapse(byte_level):
    parts = byte_level("日本🎉ď", add_special_tokens=False)["input_ids"]
    top = tuple((token, -1.0 - n) for n, token in enumerate(dict.fromkeys(parts)))
    told = completion_logprobs(TokenTexts(byte_level), parts[:1], [TokenLogprobs(parts[0], -1.0, top)], [0])
    assert len(told["top_logprobs"][0]) == len(top)
    assert told["top_logprobs"][0][r"bytes:\xe6"] == -1.0
    assert told["tokens"] == [r"bytes:\xe6"]


def test_the_token_itself_is_told_though_others_are_likelier(byte_level):
    token = TokenLogprobs(500, -7.0, ((400, -0.5), (401, -1.0)))
    texts = TokenTexts(byte_level)
    told = completion_logprobs(texts, [500], [token], [0])
    assert told["top_logprobs"] == [{texts.name(400): -0.5, texts.name(401): -1.0, texts.name(500): -7.0}]
    none_asked = completion_logprobs(texts, [500], [TokenLogprobs(500, -7.0, ())], [0])
    assert none_asked["top_logprobs"] == [{texts.name(500): -7.0}]


def test_of_tokens_with_one_text_the_drawn_one_has_the_name_and_the_others_their_number(byte_level):
    class OneText(TokenTexts):
        def __getitem__(self, token_id):
            return "x"

    token = TokenLogprobs(3, -2.0, ((1, -0.5), (2, -1.0), (3, -2.0)))
    told = completion_logprobs(OneText(None), [3], [token], [0])["top_logprobs"]
    assert told == [{"token_id:1": -0.5, "token_id:2": -1.0, "x": -2.0}]


def test_clients_that_want_ids_get_them_with_the_bytes(byte_level):
    first = byte_level("日", add_special_tokens=False)["input_ids"][0]
    [told] = chat_logprobs(TokenIdTexts(byte_level), [TokenLogprobs(first, -1.0, ())])["content"]
    assert (told["token"], told["bytes"]) == (f"token_id:{first}", [0xE6])
