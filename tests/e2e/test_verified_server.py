"""`reuse="verified"` over HTTP: the answers of `off`, whatever is drafted, streamed, cut off or done at once."""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.request
from contextlib import aclosing

import openai
import pytest
from tests.engine_runs import run_together

from kvgraft.bench.server_process import ServerProcess
from kvgraft.cli import main
from kvgraft.engine import LLM, AsyncLLM, SamplingParams
from kvgraft.errors import ConfigError, OverloadedError

pytestmark = pytest.mark.slow
PATIENCE_S = 600
NUM_SLOTS = 6_000
MAX_ROWS = 32
"""Prompts are computed in pieces of that size; each brings a draft."""
GREEDY = {"temperature": 0}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 5}


def document(number):
    """Text that no other document has."""
    rng = random.Random(number)
    names = ["area", "volume", "weight", "price", "speed", "depth", "count", "limit"]
    lines = []
    for _ in range(8):
        first, second = rng.sample(names, 2)
        lines.append(f"def {first}_{rng.randrange(100)}({second}):\n    return {second} * {rng.randrange(1000)}\n")
    return "\n".join(lines)


DOCUMENTS = [document(number) for number in range(5)]


def prompt(number):
    """Some of the documents in some order behind a head of its own."""
    rng = random.Random(1_000 + number)
    chosen = rng.sample(DOCUMENTS, rng.choice([1, 2, 3]))
    ends = ["import ", "class Box:\n    ", "def main():\n    ", "for "]
    return f"# {rng.randrange(10**6)}\n" + "\n".join(chosen) + "\n" + rng.choice(ends)


def options(**kvgraft):
    """What goes into a body beside OpenAI's fields; the exact K/V of a full prefill help no other mode."""
    return {"ignore_eos": True, "kvgraft": kvgraft} | ({"cache_salt": "off"} if kvgraft["reuse"] == "off" else {})


def ask(client, text, reuse="verified", max_tokens=16, **fields):
    return client.completions.create(
        model="graft-tiny", prompt=text, max_tokens=max_tokens, extra_body=options(reuse=reuse), **fields
    )


def stream(client, text, max_tokens=16, **fields):
    """Events of a stream with provisional tokens."""
    events = client.completions.create(
        model="graft-tiny",
        prompt=text,
        max_tokens=max_tokens,
        stream=True,
        extra_body=options(reuse="verified", provisional=True),
        **fields,
    )
    return [event.model_dump() for event in events]


class Shown:
    """What a client of one choice sees that does as the events say."""

    def __init__(self, events, index=0):
        self.text = ""
        self.seen = []
        self.tokens = []
        self.num_provisional = self.num_retracted = 0
        self.reason = self.report = None
        for event in events:
            for choice in event["choices"]:
                if choice["index"] == index:
                    self._take(event, choice)

    def _take(self, event, choice):
        told = choice.get("kvgraft") or event.get("kvgraft") or {}
        if "retract" in told:
            assert event["object"] == "kvgraft.retract"
            assert 0 < told["retract"]["characters"] <= len(self.text)
            self.text = self.text[: len(self.text) - told["retract"]["characters"]]
            self.num_retracted += told["retract"]["tokens"]
        self.num_provisional += "provisional" in told
        self.text += choice["text"]
        self.seen.append(self.text)
        if choice["logprobs"] is not None:
            assert "provisional" not in told
            self.tokens += choice["logprobs"]["tokens"]
        if choice["finish_reason"] is not None:
            self.reason, self.report = choice["finish_reason"], told


@pytest.fixture(scope="module")
def server():
    with ServerProcess(["--num-slots", str(NUM_SLOTS), "--max-rows", str(MAX_ROWS)]) as process:
        yield process


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        for text in DOCUMENTS:
            ask(client, text, "graft", 1)
        yield client


def read(server, path):
    with urllib.request.urlopen(server.url + path, timeout=PATIENCE_S) as response:
        return response.read().decode()


def healthy(server):
    """Wait until nothing runs and is healed; every invariant holds then and no slot is lost."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        health = json.loads(read(server, "/health"))
        assert health["invariant"] == "ok"
        if not any(health["requests"].values()) and not health["slots"]["request"]:
            return
        time.sleep(0.05)
    raise AssertionError(f"still busy: {health}")


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_answers_are_those_of_a_full_prefill_token_for_token(server, client, sampling):
    drafted = retracted = 0
    for number in range(10):
        text = prompt(number if sampling is GREEDY else 100 + number)
        verified = ask(client, text, logprobs=0, **sampling)
        off = ask(client, text, "off", logprobs=0, **sampling)
        assert verified.choices[0].text == off.choices[0].text
        assert verified.choices[0].logprobs.tokens == off.choices[0].logprobs.tokens
        assert verified.choices[0].finish_reason == off.choices[0].finish_reason
        assert verified.usage.completion_tokens == off.usage.completion_tokens
        report = verified.model_extra["kvgraft"]
        assert (report["shifted_tokens"], report["spans"]) == (0, [])
        if report["healing"] is not None:
            drafted += report["healing"]["drafted_tokens"]
            retracted += report["healing"]["retracted_tokens"]
    assert drafted > retracted
    assert retracted or sampling is GREEDY
    healthy(server)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_stream_with_provisional_tokens_ends_as_the_plain_answer(server, client, sampling):
    num_provisional = num_retracted = 0
    for number in range(6):
        text = prompt(200 + number if sampling is GREEDY else 300 + number)
        shown = Shown(stream(client, text, logprobs=0, **sampling))
        off = ask(client, text, "off", logprobs=0, **sampling)
        assert shown.text == off.choices[0].text
        assert shown.tokens == off.choices[0].logprobs.tokens
        assert shown.reason == off.choices[0].finish_reason
        healing = shown.report["healing"]
        assert shown.num_retracted <= (healing["retracted_tokens"] if healing else 0)
        if shown.num_provisional:
            assert 0 < healing["first_provisional_ms"] <= healing["first_verified_ms"]
        num_provisional += shown.num_provisional
        num_retracted += shown.num_retracted
    assert num_provisional > num_retracted
    assert num_retracted or sampling is GREEDY
    healthy(server)


def test_verified_tokens_alone_make_a_plain_stream(client):
    text = prompt(400)
    events = [event.model_dump() for event in ask(client, text, stream=True, **GREEDY)]
    off = ask(client, text, "off", **GREEDY)
    assert "".join(event["choices"][0]["text"] for event in events) == off.choices[0].text
    assert {event["object"] for event in events} == {"text_completion"}
    assert not any(event.get("kvgraft") for event in events[:-1])


def test_stop_texts_end_drafts_where_they_end_the_answer(client):
    for number in range(4):
        text = prompt(500 + number)
        whole = ask(client, text, "off", 24, **GREEDY).choices[0].text
        stop = whole[len(whole) // 2 :][:4]
        off = ask(client, text, "off", 24, stop=stop, **GREEDY).choices[0]
        shown = Shown(stream(client, text, 24, stop=stop, **GREEDY))
        assert (shown.text, shown.reason) == (off.text, "stop")
        assert not any(stop in seen for seen in shown.seen)


def test_each_choice_has_a_stream_of_its_own(server, client):
    texts = [prompt(600), prompt(601)]
    events = stream(client, texts, n=2, stream_options={"include_usage": True}, **SEEDED)
    off = ask(client, texts, "off", n=2, **SEEDED)
    for choice in off.choices:
        assert Shown(events, choice.index).text == choice.text
    assert events[-1]["usage"]["completion_tokens"] == off.usage.completion_tokens
    healthy(server)


def test_chat_streams_can_be_taken_back_too(client):
    messages = [{"role": "user", "content": "\n".join(DOCUMENTS[1:3]) + "\nWhich one?"}]
    fields = {"model": "graft-tiny", "messages": messages, "max_tokens": 16, **GREEDY}
    off = client.chat.completions.create(**fields, extra_body=options(reuse="off"))
    text = ""
    for event in client.chat.completions.create(
        **fields, stream=True, extra_body=options(reuse="verified", provisional=True)
    ):
        told = (event.model_extra or {}).get("kvgraft") or {}
        if "retract" in told:
            text = text[: len(text) - told["retract"]["characters"]]
        text += event.choices[0].delta.content or ""
    assert text == off.choices[0].message.content


def test_a_prompt_of_which_nothing_is_known_is_answered_as_with_exact(client):
    text = "".join(f"value_{random.Random(number).randrange(10**9)} = {number}\n" for number in range(20))
    shown = Shown(stream(client, text, **GREEDY))
    assert shown.text == ask(client, text, "off", **GREEDY).choices[0].text
    assert (shown.num_provisional, shown.report["healing"]) == (0, None)
    assert ask(client, text, **GREEDY).usage.prompt_tokens_details.cached_tokens > 0


def test_what_is_verified_is_an_exact_prefix_for_the_next_one(client):
    text = prompt(700)
    first = ask(client, text, **GREEDY)
    again = ask(client, text, **GREEDY)
    assert again.choices[0].text == first.choices[0].text
    assert first.model_extra["kvgraft"]["healing"] is not None
    assert again.model_extra["kvgraft"]["exact_tokens"] == first.usage.prompt_tokens - 1


def test_turns_of_a_session_are_verified(client):
    answers = []
    for reuse, name in (("verified", "checked"), ("off", "plain")):
        client.post("/sessions", body={"id": name}, cast_to=object)
        for text in (prompt(800), "\n" + DOCUMENTS[0] + "import "):
            extra = {"session_id": name, "ignore_eos": True, "kvgraft": {"reuse": reuse}}
            answer = client.completions.create(
                model="graft-tiny", prompt=text, max_tokens=8, extra_body=extra, **GREEDY
            )
            answers.append(answer.choices[0].text)
    assert answers[:2] == answers[2:]


def test_clients_that_leave_at_any_stage_leave_nothing_behind(server, client):
    async def leave(number, num_events):
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as mine:
            answer = await mine.completions.create(
                model="graft-tiny",
                prompt=prompt(900 + number),
                max_tokens=30,
                stream=True,
                extra_body=options(reuse="verified", provisional=number % 2 == 0),
                **GREEDY,
            )
            async with aclosing(answer):
                async for _ in answer:
                    num_events -= 1
                    if num_events < 0:
                        return

    async def all_of_them():
        await asyncio.gather(*(leave(number, number // 2) for number in range(24)))

    asyncio.run(all_of_them())
    healthy(server)


def test_metrics_count_drafts(server, client):
    def counts():
        lines = [line.rsplit(" ", 1) for line in read(server, "/metrics").splitlines() if line.startswith("kvgraft:")]
        found = {name.partition("{")[0]: float(value) for name, value in lines}
        names = ("verified_requests_total", "drafted_tokens_total", "retracted_tokens_total")
        return [found[f"kvgraft:{name}"] for name in (*names, "time_to_first_provisional_token_seconds_count")]

    before = counts()
    healing = ask(client, prompt(1_000), **GREEDY).model_extra["kvgraft"]["healing"]
    told = [1, healing["drafted_tokens"], healing["retracted_tokens"], healing["drafted_tokens"] > 0]
    assert [after - one for after, one in zip(counts(), before, strict=True)] == told


def test_requests_in_a_pool_that_cannot_hold_them_get_their_answers():
    """Preempted amid drafts or not, alone or beside others: the answer is the same."""

    async def main():
        llm = AsyncLLM("graft-tiny", num_slots=600, max_rows=MAX_ROWS)
        num_asked = 0

        async def prepare(text, reuse, **fields):
            return await llm.prepare(text, SamplingParams(60, ignore_eos=True), reuse, **fields)

        async def answer(text, reuse, **fields):
            return [part async for part in llm.stream(await prepare(text, reuse, **fields))]

        for text in DOCUMENTS:
            await answer(text, "graft")
        while not llm.snapshot().num_preemptions:  # how many meet in the engine depends on when it hears of them
            assert num_asked < 60
            numbers = range(num_asked, num_asked + 6)
            num_asked += 6
            texts = [f"# {number * 7_919}\n{DOCUMENTS[number % 5]}\nimport " for number in numbers]
            expected = [await answer(text, "off", cache_salt="off") for text in texts]
            found = await run_together(
                llm, [await prepare(text, "verified", provisional=number % 2 == 0) for number, text in enumerate(texts)]
            )
            for parts, plain in zip(found, expected, strict=True):
                assert [part.token_id for part in parts if not part.is_provisional] == [part.token_id for part in plain]
                assert "".join(part.text for part in parts if not part.is_provisional) == plain[-1].output.text
            assert any(part.is_provisional for parts in found for part in parts)
        await llm.check()
        await llm.close()

    asyncio.run(main())


def test_streams_that_are_closed_at_any_part_leave_the_cache_whole():
    llm = LLM("graft-tiny", num_slots=NUM_SLOTS, max_rows=MAX_ROWS)
    llm.generate(DOCUMENTS, SamplingParams(1))
    sampling = SamplingParams(8, ignore_eos=True)
    for num_parts in range(10):
        parts = llm.stream(prompt(1_200 + num_parts), sampling, "verified", provisional=True)
        for _ in zip(range(num_parts), parts, strict=False):
            llm.check()
        parts.close()
        llm.check()
        assert llm.usage().request == 0
    text = prompt(1_200)
    verified = llm.generate(text, sampling, "verified")[0]
    assert verified.report.healing is not None
    assert verified.token_ids == llm.generate(text, sampling, "off", cache_salt="off")[0].token_ids


def test_an_engine_that_closes_amid_drafts_fails_their_streams():
    async def main():
        llm = AsyncLLM("graft-tiny", num_slots=NUM_SLOTS, max_rows=MAX_ROWS)

        async def parts_of(text, num_tokens, reuse, **fields):
            sampling = SamplingParams(num_tokens, ignore_eos=True)
            async for part in llm.stream(await llm.prepare(text, sampling, reuse, **fields)):
                yield part

        async for _ in parts_of(DOCUMENTS[0], 8, "graft"):
            pass
        # So long that it is not through before this thread is heard.
        parts = parts_of(f"# other\n{DOCUMENTS[0]}\nimport ", 1_500, "verified", provisional=True)
        assert (await anext(parts)).is_provisional
        await llm.close()
        with pytest.raises(OverloadedError, match="shutting down"):
            async for _ in parts:
                pass
        assert llm.snapshot().usage.request == 0

    asyncio.run(main())


def test_provisional_tokens_come_with_verified_alone():
    llm = LLM("graft-tiny", num_slots=1_000)
    with pytest.raises(ConfigError, match="reuse='verified' only"):
        llm.stream("def ", reuse="graft", provisional=True)


def test_the_command_line_verifies(capsys):
    texts = [DOCUMENTS[0], f"# other\n{DOCUMENTS[0]}\nimport "]
    found = {}
    for reuse in ("off", "verified"):
        assert main(["generate", *texts, "--reuse", reuse, "--json", "--max-new-tokens", "8"]) == 0
        found[reuse] = json.loads(capsys.readouterr().out)
    assert [one["token_ids"] for one in found["verified"]] == [one["token_ids"] for one in found["off"]]
    healing = found["verified"][1]["report"]["healing"]
    assert main(["generate", *texts, "--reuse", "verified", "--max-new-tokens", "8"]) == 0
    told = f"{healing['drafted_tokens']} drafted, {healing['retracted_tokens']} of them not verified"
    assert told in capsys.readouterr().out
