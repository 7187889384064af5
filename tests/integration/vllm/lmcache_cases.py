"""LMCache beside grafts, for real: its server on loopback, its connector and ours in one vLLM. Run by `test_lmcache.py`."""

from __future__ import annotations

import os
import sys
import time

import pytest
from lmcache_server import FOLDER, LMCacheServer

from engines import beside, engine, text

pytestmark = pytest.mark.engine

CHUNK = 128
HEAD, OTHER_HEAD, QUESTION, OTHER_QUESTION = text(1, 50), text(2, 130), text(3, 40), text(4, 45)
DOCUMENT = text(5, 500)
PROMPT = OTHER_HEAD + DOCUMENT + OTHER_QUESTION


@pytest.fixture(scope="module")
def served(model_folder, tmp_path_factory):
    sys.path.append(str(FOLDER))
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    with LMCacheServer(CHUNK, tmp_path_factory.mktemp("lmcache") / "log") as server:
        theirs = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": server.port,
                "lmcache.mp.save_decode_cache": True,
                "lmcache.mp.heartbeat_interval": 3600.0,  # and time for an answer: after a late one LMCache keeps nothing
            },
        }

        with engine(
            model_folder, "llama", options={"selection": "none"}, connector=lambda mine: beside(theirs, mine)
        ) as one:
            yield one


@pytest.fixture(autouse=True)
def begins_with_nothing(served):
    reset(served, reset_connector=True)
    yield
    settle(served)
    served.check()
    assert not served.vllm_scheduler.connector._withheld


def settle(served):
    """LMCache keeps the blocks of a request that ended until it has saved them, which vLLM hears of in a further step."""
    pool = served.vllm_scheduler.kv_cache_manager.block_pool
    deadline = time.monotonic() + 120
    while pool.get_num_free_blocks() != pool.num_gpu_blocks - 1:
        assert time.monotonic() < deadline
        served.llm.llm_engine.step()


def reset(served, **options):
    settle(served)
    assert served.llm.reset_prefix_cache(**options)


def again(served, prompt, mode="off", **asked):
    """Ask with nothing in vLLM's own prefix cache: what is cached, LMCache has."""
    reset(served)
    return served.ask(prompt, mode, **asked)


def whole_chunks(num_tokens):
    return num_tokens // CHUNK * CHUNK


@pytest.mark.parametrize("mode", ["exact", "off"])
def test_an_exact_prefix_is_served_by_lmcache(served, mode):
    first = served.ask(PROMPT, mode)
    assert first.num_cached == 0
    second = again(served, PROMPT, mode)
    assert second.num_cached == second.report["exact_tokens"] == whole_chunks(len(PROMPT))
    second.assert_like(first)
    longer = again(served, PROMPT + text(6, 30), mode)
    assert longer.num_cached == whole_chunks(len(PROMPT))
    moved = again(served, text(7, 64) + PROMPT, mode)
    assert moved.num_cached == 0, "LMCache has prefixes"


@pytest.mark.parametrize("mode", ["exact", "off"])
def test_what_a_graft_computed_is_never_in_lmcache(served, mode):
    served.ask(HEAD + DOCUMENT + QUESTION, "exact", max_tokens=1)
    reset(served)
    grafted = served.ask(PROMPT, max_tokens=150)
    assert grafted.shifted == len(DOCUMENT)
    conversation = PROMPT + list(grafted.tokens)
    after = again(served, conversation, mode)
    assert after.num_cached == 0
    assert again(served, conversation, mode).num_cached == whole_chunks(len(conversation)), "now it was computed"
    reset(served, reset_connector=True)
    after.assert_like(served.ask(conversation, "off"))


def test_grafts_go_on_beside_lmcache(served):
    """In one batch: one prompt that LMCache has, one that is grafted, one that is new."""
    stored, new = text(60, 300), text(61, 333)
    first = served.ask(stored, "off")
    served.ask(HEAD + DOCUMENT + QUESTION, "exact", max_tokens=1)
    reset(served)
    answers = served.ask_many([stored, PROMPT, new], ["off", None, "exact"])
    assert [answer.shifted for answer in answers] == [0, len(DOCUMENT), 0]
    assert [answers[0].num_cached, answers[2].num_cached] == [256, 0]
    answers[0].assert_like(first)
    assert again(served, new).num_cached == 256
    assert again(served, PROMPT).num_cached == 0


def test_what_lmcache_gave_is_text_for_grafts(served):
    """A restarted server knows a document from LMCache alone; from then on it is reused at any offset."""
    whole = DOCUMENT[:384]
    served.ask(whole + QUESTION, "off")
    given = again(served, whole + OTHER_QUESTION, "exact")
    assert given.num_cached == 384
    reset(served)
    assert served.ask(OTHER_HEAD + whole + OTHER_QUESTION).shifted >= 384


def test_a_reset_reaches_lmcache(served):
    served.ask(PROMPT, "off")
    reset(served, reset_connector=True)
    assert served.ask(PROMPT, "off").num_cached == 0
    assert again(served, PROMPT).num_cached == whole_chunks(len(PROMPT))
