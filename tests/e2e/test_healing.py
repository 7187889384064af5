"""Background healing: what grafted requests have left turns exact, in pieces that may be cut anywhere, and harms nobody."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.engine_runs import GEMMA3, SMALL
from tests.support.families import families
from tests.support.kept_kv import assert_donors_are_exact, assert_prefix_is_exact

from kvgraft.config import EngineConfig
from kvgraft.donors import DonorQuery
from kvgraft.engine import LLM, AsyncLLM, SamplingParams
from kvgraft.engine.core import Engine
from kvgraft.engine.idle import healing
from kvgraft.engine.idle.heal_queue import MOST_CANDIDATES, HealQueue
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.requests.document_names import DocumentLabel
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.errors import CapacityError, ConfigError
from kvgraft.memory.store import register_store
from kvgraft.testing.memory_store import MemoryStore
from kvgraft.testing.registries import isolated_registries
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

ANSWER = SamplingParams(6, ignore_eos=True)
LAYERS = {"gemma3_text": GEMMA3}
FAMILIES = pytest.mark.parametrize("family", ["llama", "gemma3_text", "llama4_text"])
PAGES = pytest.mark.parametrize("page_size", [1, 16])
PATIENCE_S = 120.0

pytestmark = pytest.mark.usefixtures("looks_are_free")


def loaded(family="llama"):
    return adopt_model(family, tiny_model(family, **LAYERS.get(family, {})), None)


def make_llm(family="llama", **settings):
    return LLM(loaded(family), **(SMALL | {"num_slots": 3_000, "selection": "query_seam"} | settings))


def make_engine(family="llama", **settings):
    return Engine(loaded(family), EngineConfig(**(SMALL | {"num_slots": 3_000, "selection": "query_seam"} | settings)))


@pytest.fixture
def words(rng):
    return lambda count: rng.integers(3, VOCABULARY, count)


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of 40 rows: a text takes many of them."""
    monkeypatch.setattr(healing, "MOST_ROWS", 40)


def grafted(llm, words, *, head=30, novel=205, **arguments):
    """Have a prompt answered whose middle is a donor's and whose rest is read behind it; returns prompt and output."""
    document = words(100)
    llm.generate(np.concatenate([words(7), document]), ANSWER, **arguments)
    prompt = np.concatenate([words(head), document, words(novel)])
    output = llm.generate(prompt, ANSWER, **arguments)[0]
    assert output.report.spans
    assert approximate(llm)
    return prompt, output


def approximate(llm):
    return [donor for donor in llm.space.donors if donor.generation]


def healer_of(llm):
    return llm.engine.healer


def total(matches):
    return sum(match.length for match in matches)


def text_of(prompt, output):
    return np.concatenate([prompt, output.token_ids[:-1]])


def namespace_of(llm, prompt, salt=""):
    return llm._engine.builder.build(prompt, RequestOptions(cache_salt=salt)).namespace


@FAMILIES
@PAGES
class TestHealed:
    def test_the_same_prompt_is_an_exact_hit_with_the_k_v_of_a_full_prefill(self, family, page_size, words):
        llm = make_llm(family, page_size=page_size)
        prompt, output = grafted(llm, words)
        assert llm.heal() > 200
        llm.check()
        again = llm.generate(prompt, ANSWER)[0]
        assert not again.report.spans
        assert again.report.exact_tokens == (len(prompt) - 1) // page_size * page_size
        assert again.token_ids == llm.generate(prompt, ANSWER, "off")[0].token_ids
        text = text_of(prompt, output)
        stored = assert_prefix_is_exact(llm.adapter, llm.space, namespace_of(llm, prompt), text)
        assert stored == len(text) // page_size * page_size

    def test_prompts_that_reuse_its_text_get_generation_0(self, family, page_size, words):
        llm = make_llm(family, page_size=page_size)
        prompt, output = grafted(llm, words)
        behind_it = np.concatenate([words(40), prompt[140:320], words(9)])
        llm.heal()
        assert not approximate(llm)
        report = llm.generate(behind_it, ANSWER)[0].report
        assert {span.generation for span in report.spans} == {0}
        assert sum(span.length for span in report.spans) >= 160  # a window model's piece may end in a crumb
        assert assert_donors_are_exact(llm.adapter, llm.space, [text_of(prompt, output)])

    def test_it_may_be_cut_anywhere_and_loses_nothing(self, family, page_size, words, small_pieces):
        llm = make_llm(family, page_size=page_size)
        prompt, output = grafted(llm, words)
        pieces = 0
        while llm.engine.heal_step():
            pieces += 1
            llm.check()
            assert llm.usage().request == 0
            llm.generate(words(50), ANSWER, "exact")
        assert pieces > 5
        assert healer_of(llm).num_tokens <= len(text_of(prompt, output))
        assert healer_of(llm).num_requests == 1
        assert not approximate(llm)
        text = text_of(prompt, output)
        novel = llm.space.donors.find(DonorQuery(namespace_of(llm, prompt), text[150:]))
        assert len(novel) == 1, "one donor, in however many pieces it was computed"
        assert assert_donors_are_exact(llm.adapter, llm.space, [text])

    def test_a_tiny_pool_that_is_used_meanwhile(self, family, page_size, words, small_pieces):
        llm = make_llm(
            family, page_size=page_size, num_slots=450, host_bytes=1_000_000, hybrid_kvcache_ratio=0.8, max_running=2
        )
        prompts = [grafted(llm, words, novel=160)[0] for _ in range(3)]
        for number in range(30):
            llm.engine.heal_step()
            llm.check()
            if number % 3 == 0:
                llm.generate(np.concatenate([words(20), prompts[number % 2][140:260]]), ANSWER)
                llm.check()
        llm.heal()
        llm.check()
        assert not healer_of(llm).has_work
        assert llm.num_errors == 0


@FAMILIES
def test_the_donors_of_other_requests_with_the_text_go_too(family, words):
    llm = make_llm(family, max_generation=3)
    prompt, _ = grafted(llm, words)
    further = np.concatenate([words(20), prompt[140:300], words(90)])
    llm.generate(further, ANSWER)
    assert {donor.generation for donor in llm.space.donors} == {0, 1, 2}
    assert healer_of(llm).num_candidates == 2
    llm.heal()
    assert {donor.generation for donor in llm.space.donors} == {0}
    assert healer_of(llm).num_requests == 2


def test_what_waits_to_be_healed_keeps_nothing_of_how_its_answer_was_drawn(words):
    llm = make_llm()
    engine = llm.engine
    llm.generate(words(300), ANSWER)
    donor = next(iter(llm.space.donors))
    prompt = np.concatenate([words(30), donor.token_ids[:200].astype(np.int64), words(20)])
    sampling = SamplingParams(4, allowed_token_ids=tuple(range(VOCABULARY)), ignore_eos=True)
    engine.add(engine.builder.build(prompt, RequestOptions(sampling, documents=[DocumentLabel("x", 0, 9)])))
    seen = []
    while engine.has_work:
        engine.step()
        seen += [candidate.request for candidate in engine.healer._queue]
    assert seen
    for request in seen:
        assert (request.sampling, request.structure) == (SamplingParams(), None)
        assert [part.document_id for part in request.documents] == ["x"]


def test_answers_stay_as_they_were_sent_and_hot_donors_stay_hot(words):
    llm = make_llm()
    grafted(llm, words)
    hot = approximate(llm)[0]
    for _ in range(3):
        llm.generate(np.concatenate([words(40), hot.token_ids[:100].astype(np.int64), words(9)]), ANSWER)
    saved = llm.space.donors.saved_tokens(hot.donor_id)
    assert saved >= 300
    llm.heal()
    assert llm.space.donors.get(hot.donor_id) is None
    (exact,) = [donor for donor in llm.space.donors if np.array_equal(donor.token_ids, hot.token_ids)]
    assert (exact.generation, exact.start_position) == (0, hot.start_position)
    assert llm.space.donors.saved_tokens(exact.donor_id) >= saved


def test_documents_are_not_kept_once_more_for_every_prompt_that_was_healed(words):
    """Donors hold what prompts added, as before; a document that all of them reused lies in memory once."""
    llm = make_llm(num_slots=4_000)  # what others go on from stays beside what is healed until room is needed
    for _ in range(4):
        grafted(llm, words)
    before = llm.space.donors.num_tokens
    assert llm.heal() > 0
    assert llm.space.donors.num_tokens == before
    assert not approximate(llm)


def full_of(llm, words):
    """Fill the pool with prefixes of one-off prompts."""
    while llm.space.allocator.free_size > 100:
        llm.generate(words(90), SamplingParams(1), "exact")


def test_text_that_nobody_has_reused_evicts_nobody(words):
    llm = make_llm(num_slots=700, host_bytes=0)
    grafted(llm, words)
    full_of(llm, words)
    stored, healer = llm.space.prefix.total_size, healer_of(llm)
    assert llm.heal() == 0
    assert (healer.num_candidates, healer.has_work) == (1, False)
    assert llm.space.prefix.total_size == stored


def test_text_that_rests_heals_when_it_turns_hot(words):
    llm = make_llm(num_slots=700, host_bytes=0)
    grafted(llm, words)
    full_of(llm, words)
    assert llm.heal() == 0
    hot = max(approximate(llm), key=lambda donor: donor.num_tokens)
    llm.generate(np.concatenate([words(20), hot.token_ids[:64].astype(np.int64), words(9)]), SamplingParams(1))
    assert llm.heal() > 0
    assert llm.space.donors.get(hot.donor_id) is None


def test_text_that_rests_heals_when_there_is_room(words):
    llm = make_llm(num_slots=1_000, host_bytes=0)
    grafted(llm, words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(llm.space.allocator), "free_size", 0)
        assert llm.heal() == 0
    llm.generate(words(9), SamplingParams(1), "off")
    assert llm.heal() > 0


def test_text_that_rests_heals_once_a_probe_gives_its_room_back(words):
    llm = make_llm(num_slots=500)
    grafted(llm, words)
    with llm.probe(words(380), 2, "off"):
        assert llm.heal() == 0
    assert llm.heal() > 0


def test_the_hottest_text_is_healed_first(words, small_pieces):
    llm = make_llm()
    first, _ = grafted(llm, words)
    second, _ = grafted(llm, words)
    grafted(llm, words)
    for _ in range(3):
        llm.generate(np.concatenate([words(40), second[140:240], words(9)]), ANSWER, "graft")
    while healer_of(llm).num_requests == 0:
        assert llm.engine.heal_step()
    exact = llm.generate(second, ANSWER, "exact")[0].report.exact_tokens
    assert exact == len(second) - 1
    assert llm.generate(first, ANSWER, "exact")[0].report.exact_tokens < 140


def test_a_text_that_others_have_exactly_by_now_needs_no_healing(words):
    llm = make_llm()
    prompt, output = grafted(llm, words)
    llm.generate(prompt, ANSWER, "off")
    llm.heal()
    assert healer_of(llm).num_tokens <= len(output.token_ids)
    assert not approximate(llm)


def test_turns_of_a_conversation_heal_as_one_text(words):
    llm = make_llm()
    prompt, output = grafted(llm, words)
    llm.generate(np.concatenate([prompt, output.token_ids, words(80)]), ANSWER)
    assert healer_of(llm).num_candidates == 1
    llm.heal()
    assert healer_of(llm).num_requests == 1
    assert not approximate(llm)


def test_the_front_that_the_next_turn_needs_is_healed_first(words, small_pieces):
    llm = make_llm()
    prompt, output = grafted(llm, words)
    turn = np.concatenate([text_of(prompt, output), words(60)])
    continued = llm.generate(turn, ANSWER)[0]
    assert continued.report.continued_tokens
    grafted(llm, words)  # later, and asked once
    while llm.engine.healer.num_candidates == 2:
        assert llm.engine.heal_step()
    after = llm.generate(np.concatenate([text_of(turn, continued), words(20)]), ANSWER)[0].report
    assert (after.continued_tokens, after.exact_tokens) == (0, len(turn) + len(continued.token_ids) - 1)
    llm.check()


class TestNothingIsLeftBehind:
    def test_off_does_nothing(self, words):
        llm = make_llm(heal="off")
        grafted(llm, words)
        assert healer_of(llm).num_candidates == 0
        assert llm.heal() == 0
        assert approximate(llm)

    def test_no_time_means_no_piece(self, words):
        llm = make_llm()
        grafted(llm, words)
        assert llm.heal(0) == 0
        assert healer_of(llm).num_candidates == 1
        with pytest.raises(ConfigError, match="max_seconds must be at least 0"):
            llm.heal(-1)

    @FAMILIES
    @pytest.mark.parametrize("layer", [0, 1])
    def test_an_abandoned_piece_leaves_nothing_and_begins_again(self, family, layer, words, small_pieces):
        llm = make_llm(family)
        prompt, output = grafted(llm, words)
        text = text_of(prompt, output)
        llm.engine.heal_step()
        frontier, asked = healer_of(llm).num_tokens, []
        free = llm.space.allocator.free_size

        def is_wanted():
            asked.append(None)
            return len(asked) > layer

        assert not llm.engine.heal_step(is_wanted)
        assert len(asked) == layer + 1  # it ends at the layer at which it is asked, not at its end
        assert (healer_of(llm).num_tokens, healer_of(llm).num_abandoned) == (frontier, 1)
        assert llm.space.allocator.free_size == free
        assert healer_of(llm).has_work
        llm.check()
        llm.heal()
        assert healer_of(llm).num_requests == 1
        assert assert_prefix_is_exact(llm.adapter, llm.space, namespace_of(llm, prompt), text) == len(text)
        assert_donors_are_exact(llm.adapter, llm.space, [text])
        llm.check()

    @FAMILIES
    def test_a_reset_between_pieces_forgets_all_of_it(self, family, words, small_pieces):
        llm = make_llm(family)
        grafted(llm, words)
        llm.engine.heal_step()
        llm.engine.heal_step()
        with torch.no_grad():
            llm.loaded.model.get_input_embeddings().weight.mul_(1.5)
        llm.reset()
        llm.check()
        assert llm.heal() == 0
        assert healer_of(llm).dropped["reset"] == 1
        assert llm.usage().free == 3_000
        assert len(llm.space.donors) == 0

    def test_a_request_of_before_a_reset_is_no_candidate(self, words):
        llm = make_llm()
        document = words(100)
        llm.generate(document, ANSWER)
        stream = llm.stream(np.concatenate([words(30), document, words(60)]), ANSWER)
        next(stream)
        llm.reset()
        list(stream)
        assert healer_of(llm).num_candidates == 0

    def test_a_salt_is_kept(self, words):
        llm = make_llm()
        prompt, _ = grafted(llm, words, cache_salt="x")
        llm.heal()
        assert llm.generate(prompt, ANSWER, "exact", cache_salt="x")[0].report.exact_tokens == len(prompt) - 1
        other = llm.generate(prompt, ANSWER, cache_salt="y")[0].report
        assert not other.exact_tokens
        assert not other.spans

    def test_exact_cancelled_and_failed_requests_are_no_candidates(self, words, monkeypatch):
        llm = make_llm()
        document = words(100)
        llm.generate(document, ANSWER)
        llm.generate(np.concatenate([document, words(50)]), ANSWER)
        stream = llm.stream(np.concatenate([words(30), document, words(60)]), ANSWER)
        next(stream)
        stream.close()
        assert healer_of(llm).num_candidates == 0

    def test_a_text_that_never_fits_is_dropped(self, words, monkeypatch):
        llm = make_llm()
        grafted(llm, words)

        def full(*_, **__):
            raise CapacityError("no slots")

        monkeypatch.setattr(llm.engine.manager, "begin", full)
        assert llm.heal() == 0
        assert healer_of(llm).dropped["no_room"] == 1
        assert not healer_of(llm).has_work

    @pytest.mark.parametrize("where", ["forward", "begin", "heal", "retire"])
    def test_a_failure_drops_the_text_and_harms_nobody(self, words, monkeypatch, caplog, where):
        llm = make_llm()
        prompt, _ = grafted(llm, words)

        def broken(*_, **__):
            raise RuntimeError("broken")

        owner = {"forward": llm.adapter, "begin": llm.engine.manager, "heal": llm.engine.manager}
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "kvgraft"):
            patch.setattr(owner.get(where, llm.engine.manager._request_donors), where, broken)
            llm.heal()
        assert healer_of(llm).dropped["error"] == 1
        assert not healer_of(llm).has_work
        assert "healing of" in caplog.text
        assert llm.usage().request == 0
        llm.check()
        assert llm.generate(prompt, ANSWER, "off")[0].token_ids == llm.generate(prompt, ANSWER, "exact")[0].token_ids

    def test_it_ends_where_what_it_heals_is_evicted_at_once(self, words, small_pieces):
        llm = make_llm(num_slots=500)
        grafted(llm, words)
        llm.space.donors.record_hit(approximate(llm)[0].donor_id, 1)  # worth what others lose
        steps = 0
        while llm.engine.heal_step():
            steps += 1
            llm.space.release_forgotten(llm.space.prefix.evict(10_000))
            assert steps < 200
        assert healer_of(llm).dropped["evicted"] == 1
        llm.check()

    def test_there_are_so_many_candidates_and_the_coldest_go(self, words):
        llm = make_llm()
        prompt, _ = grafted(llm, words)
        request = llm.engine.builder.build(prompt)
        healer = healer_of(llm)
        for _ in range(MOST_CANDIDATES + 5):
            healer.add(request, namespace_of(llm, prompt), words(40), [])
        assert healer.num_candidates == MOST_CANDIDATES
        assert healer.dropped["too_many"] == 6
        healed = next(iter(healer._queue))
        assert len(healed.token_ids) > 300, "the only one with a donor that lives"


@pytest.mark.parametrize("beside", [False, True])
def test_a_piece_that_its_user_interrupts_holds_nothing(words, monkeypatch, beside):
    """Ctrl-C while a notebook heals, or while it generates beside what heals."""
    llm = make_llm(heal="always" if beside else "idle")
    prompt, output = grafted(llm, words)

    def interrupted(batch):
        if any(not rows.num_logits for rows in batch):  # a piece draws nothing
            raise KeyboardInterrupt
        return forward(batch)

    forward = llm.adapter.forward
    with monkeypatch.context() as patched:
        patched.setattr(llm.adapter, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(words(20), SamplingParams(50, ignore_eos=True), "off") if beside else llm.heal()
    llm.check()
    assert llm.usage().request == 0
    assert llm.heal() > 0
    text = text_of(prompt, output)
    assert assert_prefix_is_exact(llm.adapter, llm.space, namespace_of(llm, prompt), text) == len(text)
    llm.check()


class TestBesideOthers:
    def test_it_takes_no_slots_that_an_open_stream_may_come_to_need(self, words):
        llm = make_llm(num_slots=700)
        grafted(llm, words)
        llm.space.donors.record_hit(approximate(llm)[0].donor_id, 1)  # worth what others lose
        stream = llm.stream(words(200), SamplingParams(400, ignore_eos=True))
        next(stream)
        assert llm.heal() == 0
        assert healer_of(llm).num_candidates == 1
        assert len(list(stream)) == 399
        assert llm.heal() > 0
        llm.check()

    @families(["llama", "gemma3_text"], quick=["llama"])
    def test_always_changes_no_stream_s_tokens(self, family, words, monkeypatch):
        engine = make_engine(family, heal="always")
        monkeypatch.setattr(healing, "MOST_ROWS", 40)
        document = words(100)
        prompts = [np.concatenate([words(7), document]), np.concatenate([words(30), document, words(205)])]
        for prompt in prompts:
            run(engine, prompt)
        assert engine.healer.num_candidates == 1
        longer, prompt = SamplingParams(60, ignore_eos=True), words(80)
        found = run(engine, prompt, longer)
        assert engine.healer.num_tokens > 0
        engine.check()
        monkeypatch.undo()
        assert found == run(make_engine(family, heal="off"), prompt, longer)
        while engine.heal_step():
            engine.check()
        assert engine.healer.num_requests == 1

    def test_idle_leaves_the_steps_of_streams_alone(self, words):
        engine = make_engine(heal="idle")
        document = words(100)
        run(engine, np.concatenate([words(7), document]))
        run(engine, np.concatenate([words(30), document, words(205)]))
        run(engine, words(80), SamplingParams(60, ignore_eos=True))
        assert engine.healer.num_candidates == 1
        assert engine.healer.num_tokens == 0


def run(engine, prompt, sampling=ANSWER):
    """Token ids of the answer; every invariant is checked behind every step."""
    engine.add(engine.builder.build(prompt, RequestOptions(sampling)))
    output = None
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            output = event.part.output or output
        engine.check()
    return output.token_ids


def test_an_idle_server_heals_by_itself_and_tells_of_it(words):
    async def main():
        llm = AsyncLLM(loaded(), num_slots=3_000, selection="query_seam")
        try:
            document = words(100)
            for prompt in (np.concatenate([words(7), document]), np.concatenate([words(30), document, words(205)])):
                async for _ in llm.stream(await llm.prepare(prompt, ANSWER)):
                    pass
            async with asyncio.timeout(PATIENCE_S):
                while not llm.snapshot().num_healed_requests:
                    await asyncio.sleep(0.01)
            await llm.check()
            snapshot = llm.snapshot()
            assert snapshot.num_heal_candidates == 0
            assert snapshot.num_healed_tokens > 200
            assert not any(snapshot.heals_dropped.values())
            parts = [part async for part in llm.stream(await llm.prepare(prompt, ANSWER))]
            assert parts[-1].output.report.exact_tokens == len(prompt) - 1
        finally:
            await llm.close()

    asyncio.run(main())


def test_a_request_that_arrives_waits_for_a_layer_of_what_is_healed_and_not_for_a_piece(words, monkeypatch):
    """A piece that is under way waits at its second layer until a request has come: it must end there."""
    written, is_under_way, may_go_on = [], threading.Event(), threading.Event()

    async def main():
        llm = AsyncLLM(loaded(), num_slots=3_000, selection="query_seam")
        try:
            document = words(100)
            prompt = np.concatenate([words(30), document, words(205)])
            async for _ in llm.stream(await llm.prepare(np.concatenate([words(7), document]), ANSWER)):
                pass
            heal_step = llm._engine.heal_step

            def watched(is_wanted=None):
                def asks():
                    written.append(None)
                    if len(written) == 2:
                        is_under_way.set()
                        assert may_go_on.wait(PATIENCE_S)
                    return is_wanted()

                return heal_step(asks if len(written) < 2 else is_wanted)

            monkeypatch.setattr(llm._engine, "heal_step", watched)
            async for _ in llm.stream(await llm.prepare(prompt, ANSWER)):
                pass
            assert await asyncio.to_thread(is_under_way.wait, PATIENCE_S)
            inspected = asyncio.ensure_future(llm.inspect())  # a question does not end a piece, a request does
            stream = llm.stream(await llm.prepare(words(50), ANSWER))
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            may_go_on.set()
            await first
            await inspected
            assert len(written) == 2
            assert llm._engine.healer.num_abandoned >= 1
            async for _ in stream:
                pass
            async with asyncio.timeout(PATIENCE_S):
                while not llm.snapshot().num_healed_requests:
                    await asyncio.sleep(0.01)
            await llm.check()
        finally:
            may_go_on.set()
            await llm.close()

    asyncio.run(main())


def test_nothing_is_healed_while_a_request_is_being_made(words, monkeypatch):
    async def main():
        llm = AsyncLLM(loaded(), num_slots=3_000, selection="query_seam")
        try:
            healed, may_build, build = [], threading.Event(), llm._engine.builder.build
            heal_step = llm._engine.heal_step
            monkeypatch.setattr(
                llm._engine, "heal_step", lambda is_wanted: healed.append(is_wanted()) or heal_step(is_wanted)
            )
            document = words(100)
            for prompt in (np.concatenate([words(7), document]), np.concatenate([words(30), document, words(205)])):
                request = await llm.prepare(prompt, ANSWER)
                if len(prompt) > 200:
                    monkeypatch.setattr(
                        llm._engine.builder, "build", lambda *a: may_build.wait(PATIENCE_S) and build(*a)
                    )
                    making = asyncio.ensure_future(llm.prepare(words(50), ANSWER))
                    await asyncio.sleep(0)
                async for _ in llm.stream(request):
                    pass
            assert llm.snapshot().num_heal_candidates == 1
            await llm.check()  # the engine's thread has gone round meanwhile
            assert not healed
            may_build.set()
            await making
            async with asyncio.timeout(PATIENCE_S):
                while not llm.snapshot().num_healed_requests:
                    await asyncio.sleep(0.01)
            assert not any(healed)
        finally:
            await llm.close()

    asyncio.run(main())


def test_requests_and_the_end_come_through_while_it_heals(words, monkeypatch):
    """Whatever it has to heal, the loop obeys: a text of which nothing is ever done would otherwise hold it for good."""
    monkeypatch.setattr(healing, "MOST_ROWS", 1)
    monkeypatch.setattr(healing, "_MOST_WORK", 1e9)

    async def main():
        llm = AsyncLLM(loaded(), num_slots=3_000, selection="query_seam")
        document = words(100)
        for prompt in (np.concatenate([words(7), document]), np.concatenate([words(30), document, words(205)])):
            async for _ in llm.stream(await llm.prepare(prompt, ANSWER)):
                pass
        healer = llm._engine.healer
        monkeypatch.setattr(healer, "_forget", lambda candidate: setattr(healer, "_chosen", None))
        before = healer.num_tokens
        async with asyncio.timeout(PATIENCE_S):
            while healer.num_tokens < before + 20:
                await asyncio.sleep(0.01)
            for _ in range(3):
                parts = [part async for part in llm.stream(await llm.prepare(words(50), ANSWER))]
                assert len(parts) == 6
            await llm.close()

    asyncio.run(main())


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_stores_get_what_is_exact_in_the_end_and_no_pieces(family, words, small_pieces):
    memory = MemoryStore()
    with isolated_registries():
        register_store("shared", lambda where, options: memory)
        llm = make_llm(family, store="shared:")
        try:
            prompt, output = grafted(llm, words)
            llm.sync_stores(PATIENCE_S)
            before = set(memory.objects)
            llm.engine.heal_step()
            llm.engine.heal_step()
            llm.sync_stores(PATIENCE_S)
            assert set(memory.objects) == before
            llm.heal()
            llm.sync_stores(PATIENCE_S)
            assert len(set(memory.objects) - before) == 1
            llm.check()
        finally:
            llm.close()
        other = make_llm(family, store="shared:")
        try:
            other.sync_stores(PATIENCE_S)
            query = DonorQuery(namespace_of(other, prompt), text_of(prompt, output))
            find = other.space.donors.find
            assert total(find(replace(query, max_generation=0))) == total(find(query)) > 300
        finally:
            other.close()


@pytest.fixture
def counted_looks(monkeypatch):
    """The healer gives up with an error after so many looks for the hottest text as no queue needs."""
    asked, best = [], HealQueue.best

    def counted(queue, is_due):
        asked.append(queue)
        assert len(asked) < 1_000, "the healer looks for ever"
        return best(queue, is_due)

    monkeypatch.setattr(HealQueue, "best", counted)
    return asked


class TestPrefixesOnTheHost:
    """What a text's exact beginning is cannot depend on whether somebody has looked."""

    def test_healing_ends_where_texts_take_each_others_room(self, counted_looks):
        rng = np.random.default_rng(247)
        page_size = int(rng.choice([1, 16]))
        llm = make_llm(num_slots=300, prefix_host_bytes=1 << 20, selection="none", page_size=page_size)
        documents = [rng.integers(3, VOCABULARY, int(rng.integers(20, 100))) for _ in range(3)]
        for _ in range(int(rng.integers(2, 12))):
            head = rng.integers(3, VOCABULARY, int(rng.integers(1, 40)))
            middle = [documents[number] for number in rng.integers(0, 3, int(rng.integers(1, 3)))]
            question = rng.integers(3, VOCABULARY, int(rng.integers(1, 60)))
            llm.generate(np.concatenate([head, *middle, question])[:270], SamplingParams(4, ignore_eos=True))
            counted_looks.clear()
            if rng.random() < 0.5:
                llm.heal()
                llm.check()

    def test_a_look_moves_nothing(self, words):
        llm = make_llm(num_slots=300, prefix_host_bytes=1 << 20)
        texts = [words(120) for _ in range(3)]
        for text in texts:
            llm.generate(text, ANSWER, "exact")
        before = (llm.usage(), llm.space.prefix_host_tokens, llm.space.prefix.num_nodes)
        seen = [llm.engine.manager.look(llm.engine.builder.build(text)) for text in [*texts, texts[0]]]
        assert (llm.usage(), llm.space.prefix_host_tokens, llm.space.prefix.num_nodes) == before
        assert [found.total for found in seen] == [120] * 4
        assert seen[0].host_hit_len
        assert llm.space.num_loaded_tokens == 0

    def test_a_piece_is_no_longer_where_the_host_does_not_give_what_was_seen(self, words, monkeypatch, small_pieces):
        llm = make_llm(num_slots=1_000, prefix_host_bytes=1 << 20)
        prompt, output = grafted(llm, words)
        healer, manager = healer_of(llm), llm.engine.manager
        assert llm.engine.heal_step()
        llm.generate(words(990), ANSWER, "exact")  # takes the room
        assert manager.look(next(iter(healer._queue)).request).host_hit_len
        monkeypatch.setattr(healing.IdleHealer, "_is_hot", lambda healer, candidate: True)
        monkeypatch.setattr(llm.space._tier, "load", lambda host_slots: None)
        before = healer.num_tokens
        assert llm.engine.heal_step()
        assert healer.num_tokens - before <= 40
        monkeypatch.undo()
        llm.heal()
        llm.check()
        assert_prefix_is_exact(llm.adapter, llm.space, namespace_of(llm, prompt), text_of(prompt, output))
