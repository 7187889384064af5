"""How few tokens a text can have, against tokenizers of every kind; and threads on which short texts wait for no long one."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvgraft.models import bundled_model_path
from kvgraft.tokenising import LONG_TEXT, TextBound, TextLanes

PATIENCE_S = 60.0
TEXTS = [
    "",
    "a",
    "def area(w, h):\n    return w * h\n" * 50,
    " " * 3_000,
    "\n" * 999 + "x",
    "日本🎉ď" * 400,
    "\x00\u200b" * 500,
]


def word_level(**settings):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "abc": 1}, unk_token="[UNK]"))
    for name, value in settings.items():
        setattr(tokenizer, name, value)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_level(*added, before=()):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.add_special_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def graft_tiny():
    return AutoTokenizer.from_pretrained(str(bundled_model_path()))


TOKENIZERS = {
    "graft-tiny": graft_tiny,
    "bytes": byte_level,
    "takes blanks": lambda: byte_level(AddedToken("<end>", rstrip=True)),
    "leaves blanks out": lambda: byte_level(before=[pre_tokenizers.WhitespaceSplit()]),
    "joins blanks": lambda: word_level(normalizer=normalizers.Replace(r" +", "")),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_text_that_fits_is_told_not_to(name):
    tokenizer = TOKENIZERS[name]()
    bound = TextBound.of(tokenizer)
    for text in [*TEXTS, "<end>" + " " * 5_000]:
        assert bound.may_fit(text, len(tokenizer(text, add_special_tokens=False)["input_ids"]))


def test_texts_that_cannot_fit_are_known_by_their_length():
    bound = TextBound.of(graft_tiny())
    assert bound == TextBound(41, counts_blanks=True)
    assert bound.may_fit("x" * 410, 10)
    assert not bound.may_fit("x" * 411, 10)


def test_blanks_are_left_out_where_a_special_token_takes_any_number_of_them():
    bound = TextBound.of(byte_level(AddedToken("<end>", rstrip=True)))
    assert bound == TextBound(5, counts_blanks=False)
    assert bound.may_fit("x" * 50 + " " * 9_999, 10)
    assert not bound.may_fit("x " * 51, 10)


@pytest.mark.parametrize("tokenizer", [None, object(), word_level()])
def test_without_a_bound_every_text_may_fit(tokenizer):
    """The word-level tokenizer makes one unknown token of any text that it does not know."""
    assert TextBound.of(tokenizer).may_fit("x" * 10**6, 1)


def test_short_texts_wait_for_no_long_one():
    async def run():
        lanes, may_end = TextLanes(), threading.Event()
        try:
            long = [asyncio.create_task(lanes.run(LONG_TEXT + 1, may_end.wait)) for _ in range(8)]
            async with asyncio.timeout(PATIENCE_S):
                short = [await lanes.run(LONG_TEXT, lambda: threading.current_thread().name) for _ in range(8)]
            assert not any(task.done() for task in long)
            may_end.set()
            await asyncio.gather(*long)
            return short
        finally:
            may_end.set()

    assert all(name.startswith("kvgraft-texts") for name in asyncio.run(run()))


def test_work_that_has_not_begun_ends_with_its_task():
    async def run():
        lanes, may_end, done = TextLanes(), threading.Event(), []
        try:
            first = asyncio.create_task(lanes.run(LONG_TEXT + 1, may_end.wait))
            second = asyncio.create_task(lanes.run(LONG_TEXT + 1, lambda: done.append("second")))
            third = asyncio.create_task(lanes.run(LONG_TEXT + 1, lambda: done.append("third")))
            await asyncio.sleep(0)
            second.cancel()
            await asyncio.wait([second])
            may_end.set()
            await asyncio.gather(first, third)
            return done
        finally:
            may_end.set()

    assert asyncio.run(run()) == ["third"]
