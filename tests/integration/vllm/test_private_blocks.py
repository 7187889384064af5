"""No block that holds a reused token becomes a prefix of another request, wherever in its block the first of them stands."""

from __future__ import annotations

import pytest

from engines import engine, text
from kvgraft.donors import GUARANTEED_RUN

DOCUMENT, SHARED = text(5, 400), text(6, 256)


@pytest.fixture(scope="module", params=[(32, "sync"), (128, "async")], ids=str)
def served(request, model_folder):
    block_size, load = request.param
    options = {"selection": "none", "load": load, "min_saved_tokens": 0, "min_run": 16}
    with engine(model_folder, "llama", options=options, block_size=block_size, max_num_batched_tokens=256) as one:
        one.block_size = block_size
        yield one


@pytest.fixture(autouse=True)
def leaves_nothing(served):
    served.forget_donors()
    yield
    served.check()


@pytest.mark.parametrize("behind_prefix", [False, True], ids=["alone", "behind-a-prefix"])
@pytest.mark.parametrize(("offset", "end", "answer"), [(0, 0, 8), (1, 1, 8), (1, -1, 140), (-21, -1, 8), (-1, 0, 8)])
def test_what_a_graft_left_is_never_an_exact_prefix(served, behind_prefix, offset, end, answer):
    """The same prompt with reuse off, and with the grafted answer behind it, answers as in a cold engine.

    `test_block_hashes.py` goes through all offsets. Here: the first reused token stands `offset` tokens into its block (or in
    front of its end), and the prompt ends `end` tokens behind the end of a block.
    """
    size = served.block_size
    head = (SHARED[:size] if behind_prefix else []) + text(7, offset % size)
    blocks = -(-(len(head) + GUARANTEED_RUN + 1 - end) // size)
    prompt = head + DOCUMENT[: blocks * size + end - 1 - len(head)] + text(8, 1)
    served.donate(text(9, 37) + DOCUMENT)
    if behind_prefix:
        served.ask(SHARED[:size] + text(10, 9), "exact", max_tokens=1)
    grafted = served.ask(prompt, max_tokens=answer)
    assert grafted.shifted == len(prompt) - 1 - len(head)
    follow_up = prompt + list(grafted.tokens)
    after = served.ask(prompt, "off"), served.ask(follow_up, "exact")
    assert after[0].num_cached == len(head) // size * size, "what stands in front of the graft is exact and shared"
    for answered, asked in zip(after, (prompt, follow_up), strict=True):
        assert answered.num_cached <= len(head) // size * size or asked is follow_up
        assert answered.report["exact_tokens"] == answered.num_cached
        assert answered.report["shifted_tokens"] == 0
        answered.assert_like(served.cold(asked))
