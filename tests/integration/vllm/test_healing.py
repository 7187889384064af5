"""A prompt that grafts nothing makes its text exact: what it registers replaces the donors that attended to grafts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from http_server import http_server

from engines import engine, parameters, text

HEAD, OTHER_HEAD, THIRD_HEAD, QUESTION = text(1, 50), text(2, 130), text(3, 70), text(4, 45)
DOCUMENT, NOVEL = text(5, 500), text(6, 300)


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def served(request, model_folder):
    with engine(model_folder, request.param, options={"selection": "none"}) as one:
        yield one


@pytest.fixture(autouse=True)
def leaves_nothing(request):
    served = request.getfixturevalue("served") if "served" in request.fixturenames else None
    if served is not None:
        served.forget_donors()
    yield
    if served is not None:
        step_until_idle(served)
        served.check()


def step_until_idle(served):
    while served.llm.llm_engine.has_unfinished_requests():
        served.llm.llm_engine.step()
    served.llm.llm_engine.step()


def generations(served):
    """Of the donors that have all of the novel text, or nothing else."""
    novel = tuple(NOVEL)
    donors = [(donor, tuple(donor.token_ids.tolist())) for donor in served.scheduler.registry.catalogue]
    return sorted(donor.generation for donor, tokens in donors if novel[10:-10] in windows(tokens, len(novel) - 20))


def windows(tokens, length):
    return {tokens[start : start + length] for start in range(len(tokens) - length + 1)}


def read_behind_a_graft(served):
    served.donate(HEAD + DOCUMENT)
    assert served.ask(OTHER_HEAD + DOCUMENT + NOVEL).shifted == len(DOCUMENT)
    served.llm.reset_prefix_cache()
    assert generations(served) == [1]


def reused_generations(answer):
    return {span["generation"] for span in answer.report["spans"]}


def test_a_replay_replaces_what_was_computed_behind_a_graft(served):
    read_behind_a_graft(served)
    assert reused_generations(served.ask(THIRD_HEAD + NOVEL + QUESTION, max_tokens=1)) == {1}
    served.llm.reset_prefix_cache()
    assert served.ask(NOVEL, "exact", max_tokens=1).shifted == 0
    assert generations(served) == [0]
    assert served.scheduler.registry.num_replaced >= 1
    served.llm.reset_prefix_cache()
    answer = served.ask(text(7, 60) + NOVEL + text(8, 40))
    assert answer.shifted == len(NOVEL)
    assert reused_generations(answer) == {0}


def test_a_session_that_is_replayed_from_its_beginning_on_goes_on_exactly(served):
    """What stood before the text is computed with it, so that the next turn begins with an exact prefix."""
    served.donate(HEAD + DOCUMENT)
    first = OTHER_HEAD + DOCUMENT + NOVEL
    assert served.ask(first).shifted == len(DOCUMENT)
    going_on = served.ask(first + QUESTION, max_tokens=1).report
    assert going_on["continued_tokens"] > len(DOCUMENT) // 2
    assert served.ask(first, "exact", max_tokens=1).shifted == 0
    second = first + text(9, 45)
    healed = served.ask(second)
    assert (healed.report["continued_tokens"], healed.shifted) == (0, 0)
    assert healed.report["exact_tokens"] >= len(first) - 64
    healed.assert_like(served.cold(second))


def test_what_was_replayed_is_what_a_full_prefill_gives(served):
    read_behind_a_graft(served)
    served.ask(NOVEL, "exact", max_tokens=1)
    prompt = NOVEL + QUESTION
    found = served.ask(prompt)
    assert found.num_cached > 0
    assert found.shifted == 0
    found.assert_like(served.cold(prompt))


def test_a_request_that_grafts_the_old_donor_keeps_it(served):
    """Its graft is asked for in the step in which the replay ends, or while it waits for its pieces."""
    read_behind_a_graft(served)
    prompt = THIRD_HEAD + NOVEL + QUESTION
    known = {donor.donor_id for donor in served.scheduler.registry.catalogue}
    alone = served.ask(prompt)
    for donor in list(served.scheduler.registry.catalogue):
        if donor.donor_id not in known:
            served.scheduler.registry.forget(donor.donor_id)
    served.llm.reset_prefix_cache()
    together = served.ask_many([NOVEL, prompt], ["exact", None])
    assert together[1].shifted == len(NOVEL)
    if reused_generations(together[1]) == reused_generations(alone):
        together[1].assert_like(alone)
    assert 0 in generations(served)


def test_a_replay_that_is_given_up_leaves_things_as_they_were(served):
    read_behind_a_graft(served)
    llm = served.llm.llm_engine
    llm.add_request("replay", {"prompt_token_ids": list(NOVEL)}, parameters("exact", 1))
    llm.abort_request([each.request_id for each in list(served.vllm_scheduler.requests.values())], internal=True)
    step_until_idle(served)
    assert generations(served) == [1]


def test_off_would_leave_no_donor(served):
    read_behind_a_graft(served)
    served.ask(NOVEL, "off", max_tokens=1)
    assert generations(served) == [1]


def test_kvgraft_heal_does_it_over_http(tmp_path):
    openai = pytest.importorskip("openai")
    pytest.importorskip("aiohttp")
    events, replay = free_port(), free_port()
    flags = [
        "--kv-events-config",
        '{"enable_kv_cache_events": true, "publisher": "zmq", '
        f'"endpoint": "tcp://*:{events}", "replay_endpoint": "tcp://*:{replay}"}}',
    ]
    log = tmp_path / "server.log"
    with (
        http_server(log, flags=flags, selection="none", min_saved_tokens=16, announce_donors=True) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):

        def ask(prompt, mode="graft", **more):
            body = {"kv_transfer_params": {"kvgraft": mode}, **more}
            answer = client.completions.create(
                model="tiny", prompt=prompt, max_tokens=1, temperature=0, extra_body=body
            )
            return answer.kv_transfer_params["kvgraft"]

        ask(HEAD + DOCUMENT, "exact")
        assert ask(OTHER_HEAD + DOCUMENT + NOVEL)["shifted_tokens"] == len(DOCUMENT)
        ask(HEAD + DOCUMENT, "exact", cache_salt="tenant")
        ask(OTHER_HEAD + DOCUMENT + NOVEL, cache_salt="tenant")
        session = OTHER_HEAD + DOCUMENT + NOVEL + QUESTION
        assert ask(session)["continued_tokens"] >= len(DOCUMENT)
        before = ask(THIRD_HEAD + NOVEL[:250])
        assert {span["generation"] for span in before["spans"]} == {1}
        command = [sys.executable, "-m", "kvgraft", "heal", "--once", "--idle-s", "0.5", "--url", url]
        command += ["--events", f"tcp://127.0.0.1:{events},replay=tcp://127.0.0.1:{replay}"]
        healed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=os.environ)
        assert healed.returncode == 0, healed.stderr
        assert "interrupted=0 refused=0 failed=0 open=0 private=1" in healed.stderr, healed.stderr
        assert "healed_in_place=0" not in healed.stderr.splitlines()[-1], healed.stderr
        going_on = ask(session + text(9, 40))
        assert (going_on["continued_tokens"], going_on["shifted_tokens"]) == (0, 0), healed.stderr
        assert going_on["exact_tokens"] >= len(session) - 32, healed.stderr
        after = ask(THIRD_HEAD + QUESTION + NOVEL[:250])
        assert {span["generation"] for span in after["spans"]} == {0}, healed.stderr
        again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=os.environ)
        assert "healed_texts=0" in again.stderr, "what is exact is not computed again"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
