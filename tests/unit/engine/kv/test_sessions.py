"""Sessions of the engine: what a turn finds again, what yields to whom, what is never taken for exact."""

from __future__ import annotations

import numpy as np
import pytest
from tests.engine_runs import SMALL

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.errors import ConfigError, CorruptCacheError, SessionInUseError, UnknownSessionError
from kvgraft.prefix import RadixCache, RadixKey, registry
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

FOUR = SamplingParams(4, ignore_eos=True)


def engine(family="llama", **settings):
    return LLM(adopt_model(family, tiny_model(family), None), **(SMALL | {"num_slots": 400} | settings))


@pytest.fixture
def words(rng):
    return lambda count: rng.integers(3, VOCABULARY, count)


@pytest.fixture
def paged(monkeypatch):
    """Name of a back end of pages of 16 tokens."""
    monkeypatch.setattr(registry, "_FACTORIES", {"paged": lambda _: RadixCache(16)})
    return "paged"


def test_a_turn_sends_what_is_new_and_computes_what_is_new(words):
    llm, first, second = engine(), words(50), words(7)
    session = llm.open_session()
    said = llm.generate(first, FOUR, "exact", session_id=session, append=True)[0]
    turn = llm.generate(second, FOUR, "exact", session_id=session, append=True)[0]
    whole = np.concatenate([first, said.token_ids, second])
    assert turn.prompt_token_ids.tolist() == whole.tolist()
    # The last token of an answer was drawn and never computed.
    assert (turn.report.exact_tokens, turn.report.computed_tokens) == (53, 8)
    assert turn.token_ids == engine().generate(whole, FOUR, "off")[0].token_ids


def test_a_turn_may_send_all_of_it(words):
    llm, first = engine(), words(50)
    llm.open_session("s")
    said = llm.generate(first, FOUR, "exact", session_id="s")[0]
    whole = np.concatenate([first, said.token_ids, words(5)])
    assert llm.generate(whole, FOUR, "exact", session_id="s")[0].report.exact_tokens == 53


def test_what_fills_no_page_is_kept_too(words, paged):
    """53 tokens are three pages of 16 and five more."""
    llm = engine(radix_cache_backend=paged)
    llm.open_session("s")
    first, second = words(50), words(5)
    said = llm.generate(first, FOUR, "exact", session_id="s", append=True)[0]
    assert llm.space.kept.num_tail_slots == 5
    turn = llm.generate(second, FOUR, "exact", session_id="s", append=True)[0]
    assert turn.report.exact_tokens == 53
    whole = np.concatenate([first, said.token_ids, second])
    assert turn.token_ids == engine().generate(whole, FOUR, "off")[0].token_ids
    stranger = llm.generate(whole, FOUR, "exact")[0]
    assert stranger.report.exact_tokens == 48
    llm.check()
    llm.close_session("s")
    assert llm.space.kept.num_tail_slots == 0
    llm.check()


def test_an_edited_turn_reuses_what_it_repeats_of_the_tail(words, paged):
    llm, first = engine(radix_cache_backend=paged), words(50)
    llm.open_session("s")
    said = llm.generate(first, FOUR, "exact", session_id="s")[0]
    edited = np.concatenate([first, said.token_ids[:1], [3, 4, 5]])
    edited[51] = (said.token_ids[1] + 1) % VOCABULARY
    turn = llm.generate(edited, FOUR, "exact", session_id="s")[0]
    assert turn.report.exact_tokens == 51
    assert turn.token_ids == engine().generate(edited, FOUR, "off")[0].token_ids
    edited[2] += 1
    assert llm.generate(edited, FOUR, "exact", session_id="s")[0].report.exact_tokens == 0
    llm.check()


def test_sessions_outlive_other_prefixes(words):
    llm = engine(host_bytes=0)
    for session in ("kept", "other"):
        llm.open_session(session)
    held, loose = words(100), words(100)
    llm.generate(held, FOUR, "exact", session_id="kept")
    llm.generate(loose, FOUR, "exact")
    llm.generate(words(260), FOUR, "exact")
    assert llm.generate(loose, FOUR, "exact")[0].report.exact_tokens == 0
    assert llm.generate(held, FOUR, "exact")[0].report.exact_tokens == 99
    llm.close_session("kept")
    llm.generate([words(200), words(250)], FOUR, "exact")
    assert llm.generate(held, FOUR, "exact")[0].report.exact_tokens == 0


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_sessions_yield_to_a_request_that_needs_the_room(family, words):
    """And their next turn is computed again, to the same answer."""
    llm = engine(family)
    llm.open_session("s")
    first, second = words(150), words(9)
    said = llm.generate(first, FOUR, "exact", session_id="s", append=True)[0]
    assert llm.space.kept.num_slots == 153
    llm.generate(words(390), FOUR, "exact")
    assert llm.space.kept.num_slots == 0
    llm.check()
    turn = llm.generate(second, FOUR, "exact", session_id="s", append=True)[0]
    whole = np.concatenate([first, said.token_ids, second])
    assert turn.prompt_token_ids.tolist() == whole.tolist()
    assert turn.token_ids == engine(family).generate(whole, FOUR, "off")[0].token_ids


def test_sessions_are_kept_up_to_their_share(words):
    llm = engine()
    for number in range(4):
        llm.open_session(str(number))
        llm.generate(words(80), FOUR, "exact", session_id=str(number))
    assert llm.space.kept.num_slots == 2 * 83
    assert [name.session_id for name in llm.space.kept.names] == ["2", "3"]
    llm.open_session("long")
    llm.generate(words(300), FOUR, "exact", session_id="long")
    assert "long" not in [name.session_id for name in llm.space.kept.names]
    llm.check()


def test_what_sessions_share_counts_once(words):
    llm, system = engine(), words(120)
    for number in range(5):
        llm.open_session(str(number))
        llm.generate(np.concatenate([system, words(6)]), FOUR, "exact", session_id=str(number))
    assert llm.space.kept.num_slots == 120 + 5 * 9
    llm.check()


def test_nothing_behind_a_graft_is_exact(words):
    """A session keeps what stands in front of its first graft; its next turn reports the rest for what it is."""
    llm, document, question = engine(selection="none", correction="none"), words(100), words(6)
    llm.generate(document, FOUR, "exact")
    llm.open_session("s")
    prompt = np.concatenate([words(20), document, words(5)])
    first = llm.generate(prompt, FOUR, "graft", session_id="s", append=True)[0]
    assert first.report.shifted_tokens == 100
    start = first.report.spans[0].target_start
    turn = llm.generate(question, FOUR, "exact", session_id="s", append=True)[0]
    whole = np.concatenate([prompt, first.token_ids, question])
    assert turn.report.exact_tokens == start == 20
    assert turn.report.shifted_tokens == 0
    assert turn.token_ids == engine().generate(whole, FOUR, "off")[0].token_ids
    llm.check()


def test_a_grafted_session_goes_on_and_says_so(words):
    llm, document = engine(selection="none", correction="none"), words(100)
    llm.generate(document, FOUR, "exact")
    llm.open_session("s")
    llm.generate(np.concatenate([words(20), document, words(5)]), FOUR, "graft", session_id="s", append=True)
    report = llm.generate(words(6), FOUR, "graft", session_id="s", append=True)[0].report
    assert report.exact_tokens == 20
    assert (report.continued_tokens, report.shifted_tokens) == (100 + 5 + 3, 0)
    assert all(span.target_start >= 20 for span in report.spans)


def test_one_turn_at_a_time(words):
    llm = engine()
    llm.open_session("s")
    stream = llm.stream(words(20), FOUR, session_id="s", append=True)
    next(stream)
    with pytest.raises(SessionInUseError, match="has a turn that is not done"):
        llm.generate(words(3), FOUR, session_id="s", append=True)
    assert len([*stream]) == 3
    assert len(llm.generate(words(3), FOUR, session_id="s", append=True)[0].prompt_token_ids) == 27


def test_a_cancelled_turn_leaves_the_session_as_it_was(words):
    llm, first = engine(), words(30)
    llm.open_session("s")
    said = llm.generate(first, FOUR, "exact", session_id="s", append=True)[0]
    stream = llm.stream(words(20), FOUR, "exact", session_id="s", append=True)
    next(stream)
    stream.close()
    llm.check()
    turn = llm.generate(words(1), FOUR, "exact", session_id="s", append=True)[0]
    assert turn.prompt_token_ids[:34].tolist() == [*first.tolist(), *said.token_ids]
    assert turn.report.num_tokens == 35
    assert turn.report.exact_tokens >= 33


def test_a_turn_that_fails_leaves_the_session_as_it_was(words, monkeypatch):
    llm = engine()
    llm.open_session("s")
    llm.generate(words(30), FOUR, "exact", session_id="s", append=True)
    with monkeypatch.context() as patched:
        patched.setattr(llm.adapter, "forward", lambda _: 1 / 0)
        with pytest.raises(Exception, match="division"):
            llm.generate(words(5), FOUR, session_id="s", append=True)
    llm.check()
    assert llm.generate(words(1), FOUR, "exact", session_id="s", append=True)[0].report.exact_tokens == 33


def test_too_long_a_turn_is_refused_and_changes_nothing(words):
    llm = engine()
    llm.open_session("s")
    llm.generate(words(300), FOUR, session_id="s", append=True)
    with pytest.raises(ConfigError, match="the prompt has 424 tokens"):
        llm.generate(words(120), FOUR, session_id="s", append=True)
    assert llm.generate(words(2), FOUR, session_id="s", append=True)[0].report.num_tokens == 306


def test_output_is_cut_to_what_fits_behind_the_session(words):
    llm = engine(max_model_len=60)
    llm.open_session("s")
    llm.generate(words(40), FOUR, session_id="s", append=True)
    output = llm.generate(words(10), SamplingParams(30, ignore_eos=True), session_id="s", append=True)[0]
    assert len(output.token_ids) == 6


def test_preempted_turns_end_as_if_nothing_had_happened(words):
    """Streams that outgrow the pool take each other's slots; sessions hold what was said all the same."""
    llm = engine(num_slots=200, host_bytes=0, stream_slowdown=1e6)  # no prompt waits for its turn
    prompts = [words(60), words(60)]
    long = SamplingParams(70, ignore_eos=True)
    streams = []
    for number, prompt in enumerate(prompts):
        llm.open_session(str(number))
        streams.append(llm.stream(prompt, long, "exact", session_id=str(number), append=True))
        next(streams[-1])
    said = {number: list(stream) for number, stream in enumerate(streams)}
    assert max(parts[-1].output.num_preemptions for parts in said.values()) > 0
    llm.check()
    for number, prompt in enumerate(prompts):
        output = said[number][-1].output
        assert output.token_ids == engine().generate(prompt, long, "off")[0].token_ids
        turn = llm.generate([7], FOUR, "exact", session_id=str(number), append=True)[0]
        assert turn.prompt_token_ids.tolist() == [*prompt.tolist(), *output.token_ids, 7]


def test_salts_do_not_see_each_other(words):
    llm = engine()
    llm.open_session("s", cache_salt="mine")
    for call in (
        lambda: llm.generate(words(3), FOUR, session_id="s", append=True),
        lambda: llm.close_session("s"),
        lambda: llm.close_session("s", cache_salt="other"),
    ):
        with pytest.raises(UnknownSessionError, match="no session 's' of yours"):
            call()
    llm.open_session("s", cache_salt="other")
    llm.generate(words(30), FOUR, session_id="s", append=True, cache_salt="mine")
    assert llm.generate(words(3), FOUR, session_id="s", append=True, cache_salt="other")[0].report.num_tokens == 3


def test_a_reset_closes_all_sessions(words):
    llm = engine()
    llm.open_session("s")
    first = words(30)
    llm.generate(first, FOUR, session_id="s", append=True)
    llm.reset()
    assert llm.usage().free == 400
    with pytest.raises(UnknownSessionError):
        llm.generate(first, FOUR, session_id="s", append=True)
    llm.open_session("s")
    assert llm.generate(first, FOUR, "exact", session_id="s", append=True)[0].report.exact_tokens == 0


def test_a_turn_of_before_a_reset_is_kept_for_nobody(words):
    """Its K/V may be of other weights, and the session of that name is another one by now."""
    llm, first = engine(), words(30)
    llm.open_session("s")
    stream = llm.stream(first, FOUR, "exact", session_id="s", append=True)
    next(stream)
    llm.reset()
    llm.open_session("s")
    assert len([*stream]) == 3
    assert len(llm.space.kept) == 0
    turn = llm.generate(first, FOUR, "exact", session_id="s", append=True)[0]
    assert (turn.report.num_tokens, turn.report.exact_tokens) == (30, 0)
    llm.check()


def test_idle_sessions_expire(words):
    llm = engine(session_ttl_s=10)
    now = 0.0
    llm.engine.sessions.clock = lambda: now
    llm.open_session("short", ttl_s=1)
    llm.open_session("long")
    llm.generate(words(30), FOUR, session_id="short", append=True)
    now = 2.0
    llm.generate(words(5), FOUR)
    assert len(llm.engine.sessions) == 1
    assert len(llm.space.kept) == 0
    with pytest.raises(UnknownSessionError):
        llm.close_session("short")
    now = 9.0
    llm.generate(words(3), FOUR, session_id="long", append=True)
    now = 18.0
    llm.close_session("long")


def test_a_long_turn_does_not_expire(words):
    llm = engine(session_ttl_s=1)
    now = 0.0
    llm.engine.sessions.clock = lambda: now
    llm.open_session("s")
    stream = llm.stream(words(30), FOUR, session_id="s", append=True)
    next(stream)
    now = 50.0
    assert len([*stream]) == 3
    now = 50.5
    assert llm.generate(words(1), FOUR, session_id="s", append=True)[0].report.num_tokens == 35


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"append": True}, "give a session_id"),
        ({"session_id": 3}, "session_id is a text"),
        ({"session_id": "nobody"}, "no session 'nobody' of yours"),
    ],
)
def test_wrong_arguments_get_one_line(arguments, message):
    with pytest.raises(ConfigError, match=message):
        engine().generate([3, 4, 5], FOUR, **arguments)


@pytest.mark.parametrize("ttl_s", [0, -1, 601, "5", True, float("nan")])
def test_a_ttl_lies_within_the_setting(ttl_s):
    with pytest.raises(ConfigError, match="ttl_s must be above 0 and at most 600"):
        engine().open_session(ttl_s=ttl_s)


def test_engines_may_keep_none():
    with pytest.raises(ConfigError, match="keeps no sessions; raise max_sessions"):
        engine(max_sessions=0).open_session()


def test_text_that_is_appended_gets_no_special_tokens(model_of_text):
    llm = model_of_text
    llm.open_session("s")
    first = llm.generate("def main():", FOUR, session_id="s", append=True)[0]
    assert first.prompt_token_ids.tolist() == llm.tokenize("def main():").tolist()
    turn = llm.generate("\n    pass", FOUR, session_id="s", append=True)[0]
    later = llm.engine.builder.tokenize("\n    pass", add_special_tokens=False)
    assert turn.prompt_token_ids.tolist() == [*first.prompt_token_ids, *first.token_ids, *later]


@pytest.fixture(scope="module")
def model_of_text():
    return LLM("graft-tiny", num_slots=400)


def test_lost_books_are_noticed(words):
    llm = engine()
    llm.open_session("s")
    llm.generate(words(30), FOUR, session_id="s", append=True)
    llm.check()
    llm.space.kept.num_slots += 1
    with pytest.raises(CorruptCacheError, match="kept for sessions"):
        llm.check()
    llm.space.kept.num_slots -= 1
    del llm.engine.sessions._open[next(iter(llm.engine.sessions._open))]
    with pytest.raises(CorruptCacheError, match="not open"):
        llm.check()


def test_a_session_opened_anew_gets_nothing_of_the_old_ones_turn(words):
    llm = engine()
    llm.open_session("s")
    stream = llm.stream(words(30), FOUR, session_id="s", append=True)
    next(stream)
    llm.close_session("s")
    llm.open_session("s")
    assert len([*stream]) == 3
    assert len(llm.space.kept) == 0
    assert llm.generate(words(3), FOUR, session_id="s", append=True)[0].report.num_tokens == 3
    llm.check()


def test_kv_of_before_a_reset_are_never_kept(words):
    engine_ = engine()._engine
    request = engine_.builder.build(words(30), RequestOptions(FOUR))
    kv = engine_.manager.begin(request)
    engine_.reset()
    engine_.manager.finish(kv, request.token_ids, keep_as="s")
    assert len(engine_.space.kept) == 0
    engine_.check()


def test_tails_stay_in_their_namespace(words, paged):
    """A prompt that is longer than a model's first angles is in another one, with the same beginning."""
    space, tokens = engine(radix_cache_backend=paged).space, words(5)
    slots = space.allocate(5)
    space.keep("s", RadixKey(tokens, "short"), slots)
    assert space.tail_behind("s", RadixKey(tokens, "short"), space.match(RadixKey(tokens, "short"))).tolist() == [
        *slots
    ]
    assert not len(space.tail_behind("s", RadixKey(tokens, "long"), space.match(RadixKey(tokens, "long"))))
