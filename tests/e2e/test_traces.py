"""Traces of a real engine behind the real app: what they tell is what the answers told, and they tell no text."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from tests.unit.server.conftest import exchange

from kvgraft.cli import main
from kvgraft.config import ServerConfig
from kvgraft.engine import AsyncLLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.observability import NullRecorder, Recorders
from kvgraft.observability.chrome_trace import ChromeTrace
from kvgraft.observability.otel.tracing import RequestTraces
from kvgraft.server import create_app
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = "def swordfish(width, height):\n    return width * height\n" * 16
STAGES = {"queue", "lookup", "graft", "prefill", "decode"}


class Traced:
    """An app over a tiny model; after the `async with` its spans and trace events are there."""

    def __init__(self, folder):
        self._file = folder / "trace.json"
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._traces, self._trace = RequestTraces(provider, "tiny"), ChromeTrace(self._file)

    async def __aenter__(self):
        recorders = Recorders([self._traces, self._trace])
        model = adopt_model("llama", tiny_model("llama"), None)
        self.engine = AsyncLLM(model, None, recorders, num_slots=2_000, selection="none", heal="off")
        self.app = create_app(self.engine, ServerConfig(), None, self._traces)
        return self

    async def __aexit__(self, *_):
        await self.engine.close()
        await asyncio.to_thread(self._traces.close)
        self._trace.close()
        self.events = json.loads(self._file.read_text())
        spans = self._exporter.get_finished_spans()
        self.servers = [span for span in spans if span.name not in STAGES]

    def below(self, server):
        """Stages of one exchange, by name."""
        return {
            span.name: span
            for span in self._exporter.get_finished_spans()
            if span.parent is not None and span.parent.span_id == server.context.span_id
        }

    async def post(self, headers=(), leave_after=None, **fields):
        body = json.dumps({"max_tokens": 3, "temperature": 0, "ignore_eos": True} | fields).encode()
        headers = [(b"content-type", b"application/json"), *headers]
        return await exchange(
            self.app, "POST", "/v1/completions", headers=headers, body=[body], leave_after=leave_after
        )


@pytest.fixture
def prompts():
    """A document, and the same behind another beginning."""
    rng = np.random.default_rng(20261123)
    document = rng.integers(3, VOCABULARY, 300).tolist()
    return document, [*rng.integers(3, VOCABULARY, 20).tolist(), *document]


def test_traces_tell_what_the_answers_told(tmp_path, prompts):
    document, shifted = prompts
    header = (b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())

    async def main():
        async with Traced(tmp_path) as traced:
            replies = [
                await traced.post(prompt=document),
                await traced.post([header], prompt=shifted),
                await traced.post(prompt=shifted, n=2),
            ]
        return traced, [reply.json for reply in replies]

    traced, answers = asyncio.run(main())
    assert len(traced.servers) == 3
    for server, answer in zip(traced.servers, answers, strict=True):
        told, usage = server.attributes, answer["usage"]
        assert server.name == "text_completion tiny"
        assert told["gen_ai.response.id"] == answer["id"]
        assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
        assert told["gen_ai.usage.cache_read.input_tokens"] == usage["kvgraft"]["exact_tokens"]
        assert told["kvgraft.reuse.shifted_tokens"] == usage["kvgraft"]["shifted_tokens"]
        assert told.get("kvgraft.miss.reason") == usage["kvgraft"]["miss"]
        assert server.status.status_code is StatusCode.UNSET
    _, grafted, repeated = traced.servers
    assert grafted.attributes["kvgraft.reuse.shifted_tokens"] > 200
    assert repeated.attributes["gen_ai.request.choice.count"] == 2
    stages = traced.below(grafted)
    assert set(stages) == STAGES
    assert len(stages["graft"].events) == len(answers[1]["kvgraft"]["spans"])
    assert grafted.start_time <= stages["queue"].start_time
    assert stages["decode"].end_time <= grafted.end_time
    assert (f"{grafted.context.trace_id:032x}", f"{grafted.parent.span_id:016x}") == (TRACE, PARENT)
    _check_events(traced.events, answers)


def _check_events(events, answers):
    """One track per choice whose stages lie in it, one for steps, which do not overlap."""
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tracks = {}
    for event in events:
        if event["ph"] == "X":
            start, end = round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)
            tracks.setdefault(names[event["tid"]], []).append((start, end))
    choices = [f"{answer['id']}-{choice['index']}" for answer in answers for choice in answer["choices"]]
    assert sorted(tracks) == sorted(["steps", *choices])
    for name, found in tracks.items():
        bounds, stages = (None, found) if name == "steps" else (found[0], found[1:])
        moments = [moment for stage in stages for moment in stage]
        assert moments == sorted(moments)
        assert bounds is None or (bounds[0] <= moments[0] and moments[-1] <= bounds[1])


def test_requests_that_go_wrong_have_spans_too(tmp_path, prompts):
    document, _ = prompts

    async def main():
        async with Traced(tmp_path) as traced:
            refused = await traced.post(prompt=document, temperature=9)
            await traced.post(prompt=document, stream=True, max_tokens=1_500, leave_after=1)
            traced.engine._engine.adapter.forward = None  # the engine fails on everything from here on
            failed = await traced.post(prompt=document)
        return traced, (refused.status, failed.status)

    traced, statuses = asyncio.run(main())
    assert statuses == (400, 500)
    refused, left, failed = traced.servers
    assert refused.attributes["http.response.status_code"] == 400
    assert refused.attributes["error.type"] == "invalid_request_error"
    assert traced.below(refused) == {}
    assert left.attributes["error.type"] == "client_disconnected"
    assert left.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert left.attributes["gen_ai.usage.output_tokens"] >= 1
    assert [server.status.status_code for server in (refused, left, failed)] == [
        StatusCode.UNSET,
        StatusCode.UNSET,
        StatusCode.ERROR,
    ]
    assert traced.below(failed)["prefill"].status.status_code is StatusCode.ERROR


class Idle(NullRecorder):
    """Waits for what an engine does while nobody asks."""

    def __init__(self):
        self.has_come = threading.Event()

    def record_idle(self, record):
        self.record = record
        self.has_come.set()


def test_healing_while_nobody_waits_is_told_of(prompts):
    document, shifted = prompts
    idle = Idle()

    async def main():
        model = adopt_model("llama", tiny_model("llama"), None)
        engine = AsyncLLM(model, None, idle, num_slots=2_000, selection="none")
        for prompt in (document, [*shifted, *reversed(document)]):
            request = await engine.prepare(prompt, SamplingParams(2))
            assert [part async for part in engine.stream(request)]
        await asyncio.to_thread(idle.has_come.wait, 60)
        await engine.close()

    asyncio.run(main())
    assert idle.record.work == "heal"
    assert idle.record.started > 0
    assert idle.record.seconds > 0


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--max-new-tokens", "2", "--num-slots", "2000", PROMPT, "# Now:\n" + PROMPT],
        ["bench", "ttft", "--lengths", "300", "--repeat", "1", "--num-slots", "2000"],
    ],
    ids=["generate", "bench ttft"],
)
def test_commands_write_a_trace_that_holds_no_text(tmp_path, capsys, command):
    file = tmp_path / "trace.json"
    assert main([*command, "--trace-out", str(file)]) == 0
    capsys.readouterr()
    events = json.loads(file.read_text())
    assert sum(event["name"] == "graft" and event["pid"] == 2 for event in events) == 1
    assert "swordfish" not in file.read_text()
