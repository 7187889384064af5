"""Tokens of requests: those that `kvgraft serve` makes of them, or none."""

from __future__ import annotations

import pytest

from kvgraft.engine.model.loading import load_model
from kvgraft.engine.requests.request_builder import RequestBuilder
from kvgraft.errors import ConfigError
from kvgraft.http.chat_template import render_chat
from kvgraft.models import BUNDLED_MODEL
from kvgraft.router.prompts import CHAT_PATH, COMPLETION_PATH, PromptReader, UnreadPromptError, load_tokenizer

CONVERSATION = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What"}, {"type": "text", "text": "is this?"}]},
]
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BUNDLED_MODEL)


@pytest.fixture
def reader(tokenizer):
    return PromptReader(tokenizer)


def unread(reader, path, body):
    with pytest.raises(UnreadPromptError) as raised:
        reader.tokens(path, body)
    return raised.value.reason


@pytest.mark.parametrize("template", [None, CHATML])
def test_chats_are_rendered_as_the_server_does(tokenizer, template, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    tokens = PromptReader(tokenizer).tokens(CHAT_PATH, {"messages": CONVERSATION})
    rendered = render_chat(
        tokenizer, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What\nis this?"}], []
    )
    expected = tokenizer(rendered.text, add_special_tokens=rendered.add_special_tokens)["input_ids"]
    assert tokens.tolist() == expected
    assert tokenizer.decode(tokens).endswith("Assistant:" if template is None else "<|assistant|>")


def test_completions_are_tokenised_as_the_engine_does(reader):
    loaded = load_model(BUNDLED_MODEL)
    builder = RequestBuilder.__new__(RequestBuilder)
    builder._loaded = loaded
    tokens = reader.tokens(COMPLETION_PATH, {"prompt": "def answer():\n    return 42"})
    assert tokens.tolist() == builder.tokenize("def answer():\n    return 42").tolist()


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3], [4]]])
def test_token_ids_are_taken_as_they_are(prompt):
    assert PromptReader(None).tokens(COMPLETION_PATH, {"prompt": prompt}).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (COMPLETION_PATH, {}, "invalid"),
        (COMPLETION_PATH, {"prompt": []}, "invalid"),
        (COMPLETION_PATH, {"prompt": [1, "a"]}, "invalid"),
        (COMPLETION_PATH, {"prompt": [1 << 40]}, "invalid"),
        (COMPLETION_PATH, {"prompt": [True]}, "invalid"),
        (CHAT_PATH, {"messages": "hello"}, "unsupported"),
        (
            CHAT_PATH,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "unsupported",
        ),
        (CHAT_PATH, {"messages": [{"role": "nobody", "content": ""}]}, "unsupported"),
        ("/tokenize", {"prompt": "hello"}, "path"),
    ],
)
def test_what_cannot_be_read_has_a_reason(reader, path, body, reason):
    assert unread(reader, path, body) == reason


def test_text_without_a_tokenizer_is_not_read():
    assert unread(PromptReader(None), COMPLETION_PATH, {"prompt": "text"}) == "no_tokenizer"
    assert unread(PromptReader(None), CHAT_PATH, {"messages": CONVERSATION}) == "no_tokenizer"


@pytest.mark.parametrize("asked", [True, False])
def test_special_tokens_are_added_as_the_client_asks(asked):
    tokenizer = Counting()
    PromptReader(tokenizer).tokens(COMPLETION_PATH, {"prompt": "aa", "add_special_tokens": asked})
    assert tokenizer.added is asked
    PromptReader(tokenizer).tokens(CHAT_PATH, {"messages": CONVERSATION, "add_special_tokens": asked})
    assert tokenizer.added is asked


def test_what_the_engine_cuts_off_is_not_scored(reader):
    body = {"prompt": [*range(1, 40)], "truncate_prompt_tokens": 3}
    assert reader.tokens(COMPLETION_PATH, body).tolist() == [37, 38, 39]
    assert len(reader.tokens(COMPLETION_PATH, body | {"truncate_prompt_tokens": -1})) == 39


def test_a_model_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot load the tokenizer of model .*give --model the directory or hub id"):
        load_tokenizer(str(tmp_path))


class Counting:
    """A tokenizer of letters that counts what it was given, and says how long prompts of its model may be."""

    model_max_length = 100
    chat_template = None

    def __init__(self):
        self.seen = 0

    def get_vocab(self):
        return {"a": 0, "bcde": 1}

    def __call__(self, text, add_special_tokens=True):
        self.seen, self.added = self.seen + len(text), add_special_tokens
        return {"input_ids": [0] * len(text)}


def test_what_no_engine_takes_is_not_tokenised():
    """Its length alone says so; a model may take a few times what its tokenizer says."""
    tokenizer = Counting()
    reader = PromptReader(tokenizer)
    tokenizer.seen = 0
    assert unread(reader, COMPLETION_PATH, {"prompt": "a" * 1_601}) == "too_long"
    assert unread(reader, CHAT_PATH, {"messages": [{"role": "user", "content": "a" * 10**6}]}) == "too_long"
    assert tokenizer.seen == 0
    assert len(reader.tokens(COMPLETION_PATH, {"prompt": "a" * 1_600})) == 1_600
    assert unread(reader, COMPLETION_PATH, {"prompt": [1] * 5_000}) == "too_long"


def test_a_tokenizer_that_says_no_length_has_none():
    tokenizer = Counting()
    tokenizer.model_max_length = int(1e30)
    assert len(PromptReader(tokenizer).tokens(COMPLETION_PATH, {"prompt": "a" * 10**5})) == 10**5
