"""The semantic hook through `kvgraft serve`: the behaviours of its contract (SGLang pull request #20806), numbered as there.

What the contract says of a cache object is asked of a server: a miss is a response without cached tokens,
`set_semantic_provider` is the setting `semantic_provider`, and a lookup with `req` is a request that opted in
(`{"kvgraft": {"reuse": "substitute"}}`).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.e2e.test_server import PATIENCE_S, Process
from tests.standins.scripted_provider import FOLDER, Script

STANDINS = Path(__file__).parents[1] / "standins"
MIN_GAIN = 16
pytestmark = pytest.mark.slow


def environment(folder):
    path = os.pathsep.join(filter(None, [str(STANDINS), os.environ.get("PYTHONPATH", "")]))
    return {FOLDER: str(folder), "PYTHONPATH": path}


def start(folder, *flags):
    provider = ("--semantic-provider", "scripted_provider:Scripted", "--semantic-deadline-ms", "60000")
    return Process(*provider, "--min-semantic-gain", str(MIN_GAIN), *flags, env=environment(folder))


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return Script(tmp_path_factory.mktemp("script"))


@pytest.fixture(scope="module")
def server(script):
    process = start(script.folder)
    yield process
    process.close()


@pytest.fixture
def tokens(request):
    rng = random.Random(request.node.name)
    return lambda count: [rng.randrange(300, 2000) for _ in range(count)]


@pytest.fixture
def stored(server, script, tokens):
    """A text of 200 tokens that the server has, and that the provider names from now on."""
    text = tokens(200)
    ask(server, text, "off")
    script.answer(text)
    script.stored(text)  # all that was told of before, too
    yield text
    script.answer(None)


def ask(server, prompt, reuse="substitute", **body):
    """Post a completion; returns its report."""
    data = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "kvgraft": {"reuse": reuse}} | body
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(data).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        answer = json.load(response)
    return answer["kvgraft"] | {"text": answer["choices"][0]["text"]}


def test_01_02_the_named_provider_is_initialised_once(server, script, stored, tokens):
    ask(server, tokens(60))
    calls = [json.loads(line) for line in (script.folder / "calls.jsonl").read_text().splitlines()]
    assert [call["call"] for call in calls].count("init") == 1
    assert calls[0] == {"call": "init", "has_config": True}
    assert calls[-1]["call"] == "miss"


def test_03_04_06_without_one_the_server_says_so(tmp_path, tokens):
    process = Process(env=environment(tmp_path))
    try:
        with pytest.raises(urllib.error.HTTPError) as refusal:
            ask(process, tokens(60))
        assert refusal.value.code == 400
        assert "needs a semantic_provider" in refusal.value.read().decode()
        assert ask(process, tokens(60), "graft")["reused_tokens"] == 0
    finally:
        assert process.close() == 0
    assert not (tmp_path / "calls.jsonl").exists()


def test_05_29_a_replacement_has_its_own_start_and_the_old_one_its_end(tmp_path, tokens):
    first, second = Script(tmp_path), None
    for _ in range(2):
        process = start(tmp_path)
        try:
            ask(process, tokens(60))
        finally:
            assert process.close() == 0
        second = [call["call"] for call in first.calls()]
        assert (second[0], second.count("init"), second.count("miss"), second[-1]) == ("init", 1, 1, "shutdown")


def test_07_08_09_exact_lookups_are_as_without_one(server, stored, tokens):
    assert ask(server, tokens(50), "exact")["exact_tokens"] == 0
    assert ask(server, stored, "exact")["exact_tokens"] == 199
    assert ask(server, stored[:60], "exact")["exact_tokens"] == 59


def test_10_an_exact_hit_asks_nobody(server, script, stored):
    assert ask(server, stored)["exact_tokens"] == 199
    assert not script.calls("miss")


@pytest.mark.parametrize("reuse", ["off", "exact", "graft"])
def test_11_who_did_not_opt_in_asks_nobody(server, script, stored, tokens, reuse):
    assert ask(server, tokens(60), reuse)["substituted_tokens"] == 0
    assert not script.calls("miss")


def test_12_13_a_miss_asks_once_with_the_original_ids(server, script, stored, tokens):
    prompt = tokens(61)
    ask(server, prompt)
    (call,) = script.calls("miss")
    assert call["token_ids"] == prompt
    assert call["rid"]


def test_14_no_proposal_is_a_miss(server, script, stored, tokens):
    script.answer(None)
    assert ask(server, tokens(60))["reused_tokens"] == 0


def test_15_stored_alternate_tokens_are_a_hit(server, script, stored, tokens):
    prompt = tokens(150)
    report = ask(server, prompt)
    assert (report["substituted_tokens"], report["reused_tokens"]) == (149, 149)
    assert len(script.calls("miss")) == 1
    as_if = ask(server, stored[:149] + prompt[149:], "off")
    assert report["text"] == as_if["text"]


def test_16_alternate_tokens_that_are_not_stored_are_a_miss(server, script, stored, tokens):
    script.answer(tokens(100))
    assert ask(server, tokens(60))["reused_tokens"] == 0


@pytest.mark.parametrize(("salt", "found"), [("a", 59), ("b", 0), ("", 0)])
def test_17_donors_are_looked_up_in_the_namespace_of_the_query(server, script, tokens, salt, found):
    text = tokens(200)
    ask(server, text, "off", cache_salt="a")
    script.answer(text)
    assert ask(server, tokens(60), cache_salt=salt)["substituted_tokens"] == found
    script.answer(None)


def test_18_exceptions_are_counted_misses(server, script, stored, tokens):
    script.answer(stored, fails=True)
    prompt = tokens(60)
    report = ask(server, prompt)
    assert report["reused_tokens"] == 0
    assert report["text"] == ask(server, prompt, "off")["text"]
    assert any("semantic provider failed" in line for line in server.log)


@pytest.mark.parametrize("name", ["doc-7", ""])
def test_19_20_the_source_and_what_is_said_of_it_are_in_the_report(server, script, stored, tokens, name):
    script.answer(stored, source_id=name, metadata={"similarity": 0.83})
    assert ask(server, tokens(60))["substitution"] == {"source_id": name, "metadata": {"similarity": 0.83}}


def test_21_22_23_exact_requests_stay_exact(server, script, stored, tokens):
    prompt = tokens(150)
    assert ask(server, prompt)["substituted_tokens"] == 149
    cold = ask(server, prompt, "off", cache_salt="cold")["text"]
    script.calls()
    for reuse in ("exact", "graft"):
        report = ask(server, prompt, reuse)
        assert report["substituted_tokens"] == report["shifted_tokens"] == 0
        assert report["text"] == cold
    assert not script.calls("miss")


def test_24_27_a_finished_request_is_announced_once_as_it_is_stored(server, script, tokens):
    prompt = tokens(70)
    ask(server, prompt, "exact", max_tokens=1)
    assert [call["token_ids"] for call in script.stored(prompt)].count(prompt) == 1


def test_25_what_is_not_stored_is_not_announced(server, script, stored, tokens):
    ask(server, tokens(150))  # substituted
    ask(server, tokens(20) + stored[20:150] + tokens(5), "graft")  # grafted
    ask(server, tokens(MIN_GAIN - 1), "off", max_tokens=1)  # shorter than what could ever gain anything
    marker = tokens(40)
    ask(server, marker, "off", max_tokens=1)
    assert [call["token_ids"] for call in script.stored(marker)] == [marker]


def test_28_every_miss_asks_again(server, script, stored, tokens):
    script.answer(None)
    for _ in range(2):
        ask(server, tokens(60))
    assert len(script.calls("miss")) == 2


@pytest.mark.parametrize("shared", [1, 50])
def test_a_stored_first_token_or_system_prompt_does_not_silence_it(server, stored, tokens, shared):
    report = ask(server, stored[:shared] + tokens(100))
    assert (report["exact_tokens"], report["substituted_tokens"]) == (shared, 99)


def test_a_contradiction_is_grafted_but_for_what_differs(server, stored, tokens):
    prompt = stored[:100] + tokens(1) + stored[101:] + tokens(3)
    report = ask(server, prompt)
    assert (report["exact_tokens"], report["substituted_tokens"]) == (100, 0)
    assert report["shifted_tokens"] > 50
    assert all(span["target_start"] > 100 for span in report["spans"])


def test_health_checks_never_reach_it(server, script, stored):
    for path in ("/health", "/metrics", "/v1/models"):
        server.get(path)
    assert not script.calls()


def test_insert_that_exactness_forbids_is_refused_by_name(server, script, stored, tokens):
    script.answer(stored, skip_insert=False)
    prompt = tokens(150)
    assert ask(server, prompt)["substituted_tokens"] == 149
    assert ask(server, prompt, "exact")["exact_tokens"] == 0
    assert any("skip_insert=False, which is refused" in line for line in server.log)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("absent:Class", "cannot be loaded"), ("json:JSONDecoder", "is no kvgraft.substitution"), ("x", "module:Class")],
)
def test_a_wrong_name_is_one_line_at_start(tmp_path, name, problem):
    command = [sys.executable, "-m", "kvgraft", "serve", "--port", "0", "--semantic-provider", name]
    ended = subprocess.run(command, env=os.environ | environment(tmp_path), capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert problem in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
