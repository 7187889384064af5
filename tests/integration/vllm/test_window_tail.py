"""The window before the end of an exact prefix lies in blocks that vLLM shares; grafts leave it alone."""

from __future__ import annotations

import pytest

from engines import engine, text

HEAD, PREFIX, SPAN = text(1, 90), text(2, 256), text(3, 64)
QUESTION, OTHER = text(4, 40), text(5, 50)


@pytest.fixture(scope="module")
def served(model_folder):
    with engine(model_folder, "gemma3", options={"selection": "none"}) as one:
        yield one


def test_a_short_graft_after_an_exact_prefix_leaves_its_window_as_it_is(served):
    served.donate(HEAD + PREFIX + SPAN + QUESTION)
    cold = served.cold(PREFIX + OTHER)
    served.ask(PREFIX + text(6, 30), "off")
    grafted = served.ask(PREFIX + SPAN + text(7, 45))
    assert grafted.report["exact_tokens"] == len(PREFIX)
    assert grafted.shifted == len(SPAN)
    after = served.ask(PREFIX + OTHER, "off")
    assert after.num_cached == len(PREFIX)
    after.assert_like(cold)
