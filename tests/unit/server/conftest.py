"""A fake engine with `AsyncLLM`'s interface, and a client that speaks ASGI to the app without a socket."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, fields
from types import SimpleNamespace

import numpy as np
import pytest

from kvgraft.config import ServerConfig
from kvgraft.engine.memory_use import MemoryUse
from kvgraft.engine.requests.request import FinishReason, PromptFacts, RequestOutput, StreamPart
from kvgraft.engine.sampling.sampling import TokenLogprobs
from kvgraft.errors import ConfigError, ContextLengthError, UnknownSessionError
from kvgraft.memory import SlotUsage
from kvgraft.observability.prometheus import PrometheusRecorder
from kvgraft.server import create_app
from kvgraft.types import UNCALIBRATED, GraftReport, Miss, MissReason, NamedPart

PATIENCE_S = 60.0
VOCABULARY = 256


class FakeBackend:
    """What `tokenizers` has behind a fast tokenizer."""

    def decode(self, token_ids, *, skip_special_tokens):
        del skip_special_tokens
        return bytes(token_ids).decode("utf-8", "replace")

    def id_to_token(self, token_id):
        return chr(token_id)


class FakeTokenizer:
    """One token per byte."""

    chat_template = None
    is_fast = True
    backend_tokenizer = FakeBackend()

    def __call__(self, text, *, add_special_tokens=True, return_offsets_mapping=False):
        del add_special_tokens
        encoded = {"input_ids": list(text.encode())}
        if return_offsets_mapping:
            encoded["offset_mapping"] = [(i, i + 1) for i, letter in enumerate(text) for _ in letter.encode()]
        return encoded

    def decode(self, token_ids):
        return bytes(token_ids).decode("utf-8", "replace")

    def apply_chat_template(self, conversation, *, tools, tokenize, add_generation_prompt, **variables):
        assert not tokenize
        if "tools" not in self.chat_template:
            tools = None
        if not add_generation_prompt:
            variables["ends"] = True
        if any(message["content"] == "refuse me" for message in conversation):
            raise ValueError("roles must\nalternate")
        return json.dumps({"messages": conversation, "tools": tools} | variables, ensure_ascii=False)


class FakeEngine:
    """Answers `hello` byte by byte, as often as fits into `max_new_tokens`, and does what a test tells it to."""

    def __init__(self):
        self.loaded = SimpleNamespace(name="fake", tokenizer=FakeTokenizer(), vocab_size=VOCABULARY)
        self.max_model_len = 2_000
        self.graft_refusal = None
        self.answer = "hello"
        self.stopped_by = ""
        self.ends_with_token = False
        self.started = []
        self.num_parts = 0
        self.drafts = ()
        self.healing = None
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
        self.window_usage = self.state_usage = None
        self.class_risks = {}
        self.closed_with = []
        self.sessions = []
        self.config = SimpleNamespace(session_ttl_s=600.0)

    async def check_length(self, prompt):
        if isinstance(prompt, str) and len(prompt) > self.max_model_len * 10:
            raise ContextLengthError("the prompt is too long", "prompt")

    async def tokenize(self, prompt, *, add_special_tokens=True):
        special = [2] if add_special_tokens and isinstance(prompt, str) else []
        return np.array([*special, *(prompt.encode() if isinstance(prompt, str) else prompt)])

    async def build(self, prompt, options):
        ids = list(prompt.encode()) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not ids:
            raise ConfigError("the prompt is empty; give at least one token")
        if len(ids) >= self.max_model_len:
            raise ContextLengthError(f"the prompt has {len(ids)} tokens; shorten it")
        self.prepared.append(prompt)
        self.calls.append(
            SimpleNamespace(prompt=prompt, **{at.name: getattr(options, at.name) for at in fields(options)})
        )
        named = tuple(
            NamedPart(label.document_id, label.start, label.stop - label.start) for label in options.documents
        )
        return SimpleNamespace(
            request_id=options.request_id,
            token_ids=np.array(ids),
            sampling=options.sampling,
            documents=named,
        )

    async def stream(self, request, admitted=None):
        sampling, text = request.sampling, ""
        self.started.append((request.request_id, self.num_parts))
        if self.failure is None or self.fail_at is not None:
            admitted and admitted()
        count = min(len(self.answer), sampling.max_new_tokens)
        try:
            for step in range(count):
                if self.failure is not None and step == (self.fail_at or 0):
                    raise self.failure
                if step == self.hold_at:
                    await asyncio.Event().wait()
                await asyncio.sleep(0)
                if step == 0:
                    for draft in self.drafts:
                        yield StreamPart(draft, ord(draft), is_provisional=True)
                prompt = PromptFacts(request.token_ids, _scored(request)) if step == 0 else None
                letter = self.answer[step]
                text += letter
                output = self._output(request, text) if step == count - 1 else None
                told = self._logprobs(sampling, letter)
                held = self.stopped_by if step == count - 1 and sampling.include_stop else ""
                ends = self.ends_with_token and output is not None
                self.num_parts += 1
                yield StreamPart("" if ends else letter + held, ord(letter), output, told, prompt=prompt, is_end=ends)
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
            num_tokens=length,
            exact_tokens=1,
            computed_tokens=length - 1,
            miss=Miss(MissReason.NO_DONORS),
            healing=self.healing,
        )
        reason = FinishReason.STOP if len(text) == len(self.answer) else FinishReason.LENGTH
        return RequestOutput(
            request.request_id,
            request.token_ids,
            tuple(text.encode()),
            text,
            reason,
            report,
            0.01,
            0.02,
            prompt_logprobs=_scored(request),
        )

    def snapshot(self):
        return SimpleNamespace(
            is_alive=self.is_alive,
            is_closing=self.is_closing,
            num_running=1,
            num_waiting=2,
            usage=SlotUsage(60, 10, 20, 10, 100),
            window_usage=self.window_usage,
            state_usage=self.state_usage,
            num_donors=3,
            donor_tokens=300,
            host_bytes=4,
            prefix_host_tokens=9,
            num_sessions=2,
            slots_kept=30,
            num_errors=5,
            num_preemptions=6,
            num_rebuilds=0,
            attention="sdpa on cpu",
            risk=UNCALIBRATED,
            class_risks=self.class_risks,
            num_pending_audits=7,
            num_left_out_audits=8,
            proposals={"donors": 9, "tokens": 250},
            semantic_calls={"hit": 2, "timeout": 1},
            stores=(),
            num_cold_donors=0,
            num_heal_candidates=11,
            num_healed_tokens=120,
            num_healed_requests=13,
            heals_dropped={"pressure": 14},
            memory=MemoryUse(100, 200, 4, 50, 0, 0, 300, 1_000),
        )

    async def check(self):
        self.num_checks += 1
        if self.check_error is not None:
            raise self.check_error

    async def reset(self):
        self.num_resets += 1

    async def open_session(self, session_id="", *, ttl_s=None, cache_salt="", owner=""):
        self.sessions.append((session_id, ttl_s, cache_salt, owner))
        return session_id or "made-up", ttl_s or 600.0

    async def close_session(self, session_id, *, cache_salt="", owner=""):
        found = [s for s in self.sessions if (s[0], *s[2:]) == (session_id, cache_salt, owner)]
        if not found:
            raise UnknownSessionError("there is no such session")
        self.sessions.remove(found[0])

    async def close(self, grace_s=0.0):
        self.closed_with.append(grace_s)


def _scored(request):
    """What is known of each token of the prompt, if it was asked for."""
    asked = request.sampling.prompt_logprobs
    if asked is None:
        return None
    top = tuple((97 + i, -0.25 * (i + 1)) for i in range(asked))
    return (None, *(TokenLogprobs(int(token), -1.5, top) for token in request.token_ids[1:]))


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


async def exchange(app, method, path, *, headers=(), body=(b"",), leave_after=None, local="127.0.0.1"):
    """Send one request to the address `local`.

    `leave_after` chunks of the answer the client disconnects (0: as soon as it has sent the body).
    """
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
        "path": path.partition("?")[0],
        "raw_path": path.partition("?")[0].encode("utf-8", "surrogatepass"),
        "root_path": "",
        "query_string": path.partition("?")[2].encode(),
        "headers": [(name.lower(), value) for name, value in headers],
        "client": ("127.0.0.1", 1),
        "server": (local, 2),
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
