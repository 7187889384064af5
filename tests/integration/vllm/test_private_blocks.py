"""No block that holds a reused token becomes a prefix of another request, wherever in its block the first of them stands."""

from __future__ import annotations

import time

import pytest
from kv_listener import Listener
from vllm.config import KVEventsConfig

from engines import engine, text
from kvgraft.donors import GUARANTEED_RUN

DOCUMENT, SHARED = text(5, 400), text(6, 256)


@pytest.fixture(scope="module", params=[(32, "sync"), (128, "async")], ids=str)
def served(request, model_folder):
    block_size, load = request.param
    options = {"selection": "none", "load": load, "min_saved_tokens": 0, "min_run": 16}
    listener = Listener()
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://*:{listener.port}")
    sizes = {"block_size": block_size, "max_num_batched_tokens": 256}
    with listener, engine(model_folder, "llama", options=options, kv_events_config=events, **sizes) as one:
        one.block_size, one.listener = block_size, listener
        while not listener.events:  # until it is connected, nobody hears what is told
            one.ask(text(99, 2 * block_size), "off", max_tokens=1)
            one.llm.reset_prefix_cache()
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


def test_events_tell_of_exact_blocks_alone(served):
    """A router that hashes what it hears never expects K/V that a graft made, or that stand behind one."""
    size, head = served.block_size, text(20, 150)
    prompt = head + DOCUMENT + text(21, 70)
    served.donate(text(22, 37) + DOCUMENT)
    grafted = served.ask(prompt, max_tokens=140)
    assert grafted.shifted == len(DOCUMENT)
    exact = text(23, 5 * size)
    served.ask(exact, "off", max_tokens=1)
    told_of = wait_for(served.listener, (None, tuple(exact)))
    ends = [len(tokens) for _, tokens in told_of if list(tokens) == prompt[: len(tokens)]]
    assert sorted(ends) == list(range(size, len(head) + 1, size)), "what stands in front of the graft, and no more"
    stored = {h for event in served.listener.events if event["type"] == "BlockStored" for h in event["block_hashes"]}
    removed = {h for event in served.listener.events if event["type"] == "BlockRemoved" for h in event["block_hashes"]}
    assert removed <= stored
    served.ask(prompt, "off", max_tokens=1)
    wait_for(served.listener, (None, tuple(prompt[: len(prompt) // size * size])))


def wait_for(listener, path):
    deadline = time.monotonic() + 120
    while path not in listener.stored_paths():
        assert time.monotonic() < deadline, "nobody told of it"
        time.sleep(0.05)
    return listener.stored_paths()
