"""A fake engine with `AsyncLLM`'s interface, and a client that speaks ASGI to the app without a socket."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from kvgraft.config import ServerConfig
from kvgraft.engine.request import FinishReason, RequestOutput, StreamPart
from kvgraft.engine.sampling import SamplingParams, TokenLogprobs
from kvgraft.errors import ConfigError
from kvgraft.memory import SlotUsage
from kvgraft.observability.prometheus import PrometheusRecorder
from kvgraft.server import create_app
from kvgraft.types import UNCALIBRATED, GraftReport, Miss, MissReason

PATIENCE_S = 60.0
VOCABULARY = 256


class FakeTokenizer:
    """One token per byte."""

    chat_template = None

    def decode(self, token_ids):
        return bytes(token_ids).decode("utf-8", "replace")

    def apply_chat_template(self, conversation, *, tools, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        if any(message["content"] == "refuse me" for message in conversation):
            raise ValueError("roles must\nalternate")
        return json.dumps({"messages": conversation, "tools": tools})


class FakeEngine:
    """Answers `hello` byte by byte, as often as fits into `max_new_tokens`, and does what a test tells it to."""

    def __init__(self):
        self.loaded = SimpleNamespace(name="fake", tokenizer=FakeTokenizer(), vocab_size=VOCABULARY)
        self.max_model_len = 2_000
        self.graft_refusal = None
        self.answer = "hello"
        self.prepared = []
        self.calls = []
        self.cancelled = []
        self.fail_at = None
        self.failure = None
        self.hold_at = None
        self.is_alive = True
        self.is_closing = False
        self.check_error = None
        self.num_checks = 0
        self.num_resets = 0
        self.window_usage = None
        self.class_risks = {}
        self.closed_with = []

    async def prepare(self, prompt, sampling=None, reuse="graft", **options):
        ids = list(prompt.encode()) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not ids:
            raise ConfigError("the prompt is empty; give at least one token")
        if len(ids) >= self.max_model_len:
            raise ConfigError(f"the prompt has {len(ids)} tokens; shorten it")
        self.prepared.append(prompt)
        self.calls.append(SimpleNamespace(prompt=prompt, reuse=reuse, sampling=sampling, **options))
        return SimpleNamespace(
            request_id=options.get("request_id"), token_ids=np.array(ids), sampling=sampling or SamplingParams()
        )

    async def stream(self, request):
        sampling, text = request.sampling, ""
        count = min(len(self.answer), sampling.max_new_tokens)
        try:
            for step in range(count):
                if self.failure is not None and step == (self.fail_at or 0):
                    raise self.failure
                if step == self.hold_at:
                    await asyncio.Event().wait()
                await asyncio.sleep(0)
                letter = self.answer[step]
                text += letter
                output = self._output(request, text) if step == count - 1 else None
                yield StreamPart(letter, ord(letter), output, self._logprobs(sampling, letter))
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled.append(request.request_id)
            raise

    def _logprobs(self, sampling, letter):
        if sampling.logprobs is None:
            return None
        return TokenLogprobs(ord(letter), -0.5, tuple((97 + i, float("-inf")) for i in range(sampling.logprobs)))

    def _output(self, request, text):
        length = len(request.token_ids)
        report = GraftReport(
            num_tokens=length, exact_tokens=1, computed_tokens=length - 1, miss=Miss(MissReason.NO_DONORS)
        )
        reason = FinishReason.STOP if len(text) == len(self.answer) else FinishReason.LENGTH
        return RequestOutput(
            request.request_id, request.token_ids, tuple(text.encode()), text, reason, report, 0.01, 0.02
        )

    def snapshot(self):
        return SimpleNamespace(
            is_alive=self.is_alive,
            is_closing=self.is_closing,
            num_running=1,
            num_waiting=2,
            usage=SlotUsage(60, 10, 20, 10, 100),
            window_usage=self.window_usage,
            num_donors=3,
            donor_tokens=300,
            host_bytes=4,
            num_errors=5,
            num_preemptions=6,
            attention="sdpa on cpu",
            risk=UNCALIBRATED,
            class_risks=self.class_risks,
            num_pending_audits=7,
            num_left_out_audits=8,
        )

    async def check(self):
        self.num_checks += 1
        if self.check_error is not None:
            raise self.check_error

    async def reset(self):
        self.num_resets += 1

    async def close(self, grace_s=0.0):
        self.closed_with.append(grace_s)


@dataclass
class Reply:
    """What the app sent."""

    status: int | None = None
    headers: dict = field(default_factory=dict)
    chunks: list = field(default_factory=list)
    ended: bool = False

    @property
    def body(self):
        return b"".join(self.chunks)

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]

    @property
    def events(self):
        """Data of the server-sent events; JSON is parsed."""
        texts = [event.removeprefix("data: ") for event in self.body.decode().split("\n\n") if event]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]


async def exchange(app, method, path, *, headers=(), body=(b"",), leave_after=None):
    """Send one request; `leave_after` chunks of the answer the client disconnects (0: as soon as it has sent the body)."""
    reply, left = Reply(), asyncio.Event()
    if leave_after == 0:
        left.set()
    chunks = list(body)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("utf-8", "surrogatepass"),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.lower(), value) for name, value in headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }

    async def receive():
        if chunks:
            chunk = chunks.pop(0)
            if chunk is None:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.start":
            assert reply.status is None
            reply.status = message["status"]
            reply.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            assert reply.status is not None
            reply.chunks.append(message.get("body", b""))
            reply.ended = not message.get("more_body", False)
            if leave_after is not None and len(reply.chunks) >= leave_after:
                left.set()

    async with asyncio.timeout(PATIENCE_S):
        await app(scope, receive, send)
    return reply


class Server:
    """An app over a fake engine."""

    def __init__(self, **settings):
        self.engine = FakeEngine()
        self.metrics = PrometheusRecorder("fake")
        self.app = create_app(self.engine, ServerConfig().updated(settings), self.metrics)

    def call(self, method, path, *, headers=(), body=(b"",), leave_after=None):
        """Send raw bytes."""
        return asyncio.run(exchange(self.app, method, path, headers=headers, body=body, leave_after=leave_after))

    def get(self, path, **options):
        return self.call("GET", path, **options)

    def post(self, path, value, *, headers=(), leave_after=None):
        """Send JSON."""
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        headers = [(b"content-type", b"application/json"), *headers]
        return self.call("POST", path, headers=headers, body=[body], leave_after=leave_after)

    def complete(self, prompt="Say it", **fields):
        return self.post("/v1/completions", {"prompt": prompt} | fields)

    def chat(self, *messages, **fields):
        messages = messages or ({"role": "user", "content": "Hi"},)
        return self.post("/v1/chat/completions", {"messages": list(messages)} | fields)


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def make_server():
    return Server
