"""`heal` against servers and publishers that do what a test says, over real sockets: vLLM's and SGLang's ways to be asked."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import pytest
from aiohttp import web

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from kvgraft.donors import DonorCatalogue
from kvgraft.donors.front import front_digest
from kvgraft.errors import ConfigError
from kvgraft.events import PublisherConfig, ZmqEventPublisher
from kvgraft.events.publisher import load_zmq
from kvgraft.heal.healer import HealSettings
from kvgraft.heal.probe import require_publisher
from kvgraft.heal.process import heal
from kvgraft.heal.server import RefusedError, Server, ServerError
from kvgraft.reuse.announcer import DonorAnnouncer
from kvgraft.router import WorkerSpec
from kvgraft.types import Namespace

WAIT_S = 60.0
QUICK = HealSettings(idle_s=0.0, poll_s=0.02, quiet_s=0.2, once=True)
FOREVER = HealSettings(idle_s=0.0, poll_s=0.02)
MODEL = Namespace("model")


class Engine:
    """An engine as it looks from outside.

    Attributes:
        answer: Status of completions; 0 for none until `release` is set.
        others: Requests of others, by its metrics.
        told: What it says instead of its models and its load; empty for these.
        heals: Whether it registers what it computes, as an engine with kvgraft in it does.
        seen: Bodies of completions.
        left: Set when a completion was given up.
    """

    def __init__(self, folder, kind):
        self.kind, self.folder = kind, folder
        self.answer, self.others, self.own, self.heals, self.key = 200, 0, 0, True, ""
        self.has_metrics, self.model, self.told = True, "base", ""
        self.seen = []
        self.arrived, self.left, self.release = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.events, self.replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self.catalogue = DonorCatalogue(4_000)
        self.publisher = self.runner = None
        self.port = 0

    async def start(self):
        self.publisher = ZmqEventPublisher(PublisherConfig(endpoint=self.events, replay_endpoint=self.replay))
        self.catalogue.watch(DonorAnnouncer(lambda event: self.publisher.publish([event]), MODEL, sends_fronts=True))
        await self.serve()

    async def serve(self):
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        if self.kind == "sglang":
            app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/generate" if self.kind == "sglang" else "/v1/completions", self._complete)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        self.port = self.runner.addresses[0][1]

    async def stop(self):
        await self.runner.cleanup()
        self.publisher.close()

    @property
    def spec(self):
        return WorkerSpec(f"http://127.0.0.1:{self.port}", events=self.events, replay=self.replay)

    def add(self, tokens, generation=1, salt=""):
        return self.catalogue.add(Namespace("model", "", salt), tokens, None, generation=generation).donor

    def compute(self, text, start, generation=1):
        """A text that a request computed from `start` on."""
        place = {"start_position": start, "front": front_digest(MODEL.key, text[:start]), "before": text[:start]}
        self.catalogue.add(MODEL, text[start:], None, generation=generation, **place)

    def prompts(self):
        return [body.get("prompt", body.get("input_ids")) for body in self.seen]

    async def _models(self, request):
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "no key"}, status=401)
        if self.told:
            return web.Response(text=self.told)
        adapter = {"id": "adapter", "owned_by": self.kind, "parent": "base"}
        return web.json_response({"data": [adapter, {"id": self.model, "owned_by": self.kind, "parent": None}]})

    async def _metrics(self, _request):
        if self.told:
            return web.Response(text=self.told)
        if not self.has_metrics:
            return web.Response(text="python_info 1\n")
        running, waiting = f"{self.kind}:num_requests_running", f"{self.kind}:num_requests_waiting"
        return web.Response(text=f'{running}{{engine="0"}} {self.own}.0\n{waiting}{{engine="0"}} {self.others}.0\n')

    async def _loads(self, _request):
        if self.told:
            return web.Response(text=self.told)
        return web.json_response({"loads": [{"num_running_reqs": self.own, "num_waiting_reqs": self.others}]})

    async def _complete(self, request):
        body = json.loads(await request.read())
        self.seen.append(body)
        self.arrived.set()
        self.own += 1
        try:
            if not self.answer:
                await self.release.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        finally:
            self.own -= 1
        if self.answer not in (0, 200):
            return web.json_response({"error": {"message": "no\nroom"}}, status=self.answer)
        if self.heals:
            exact = self.add(np.array(self.prompts()[-1], np.int32), generation=0)
            for donor in self.catalogue.inside(MODEL, exact.token_ids, min_generation=1):
                self.catalogue.remove(donor.donor_id)
        return web.json_response({"choices": []})


def tokens(seed, length=100):
    return np.random.default_rng(seed).integers(0, 30_000, length).astype(np.int32)


@asynccontextmanager
async def engine_of(tmp_path, kind="vllm"):
    engine = Engine(tmp_path, kind)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@asynccontextmanager
async def healing(engine, settings=FOREVER, **options):
    closing = asyncio.Event()
    task = asyncio.create_task(heal([engine.spec], settings, closing=closing, **options))
    try:
        yield task
    finally:
        closing.set()
        await asyncio.wait_for(task, WAIT_S)


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def once(engine, **options):
    return asyncio.wait_for(heal([engine.spec], QUICK, closing=asyncio.Event(), **options), WAIT_S)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_approximate_text_that_was_announced_before_is_computed_alone_once(tmp_path, kind, caplog):
    async def scenario():
        async with engine_of(tmp_path, kind) as engine:
            engine.add(tokens(1), generation=0)
            engine.add(tokens(2))
            engine.add(tokens(3), generation=2)
            engine.add(tokens(4), salt="salt")
            with caplog.at_level(logging.INFO):
                await once(engine)
            assert engine.prompts() == [tokens(3).tolist(), tokens(2).tolist()]
            exact = {"kvgraft": "exact"}  # which grafts nothing and leaves a donor behind
            for body in engine.seen:
                assert "priority" not in body
                if kind == "vllm":
                    assert (body["kv_transfer_params"], body["model"], body["max_tokens"]) == (exact, "base", 1)
                else:
                    assert (body["sampling_params"]["custom_params"], body["sampling_params"]["max_new_tokens"]) == (
                        exact,
                        1,
                    )
            await once(engine)
            assert len(engine.seen) == 2
            assert "healed_texts=2 healed_tokens=200 interrupted=0 refused=0 failed=0 open=0 private=1" in caplog.text

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_session_is_healed_in_its_place_before_other_texts(tmp_path, kind, caplog):
    """One prompt from its beginning on makes all its turns exact, and what its next turn begins with an exact prefix."""

    async def scenario():
        async with engine_of(tmp_path, kind) as engine:
            turns = np.cumsum([600, 100, 50, 80])
            session = np.concatenate([tokens(5, 600), *(tokens(6 + turn, 100) for turn in range(3))])[: turns[-1]]
            for start, stop in itertools.pairwise(turns.tolist()):
                engine.compute(session[:stop], start)
            engine.add(tokens(2), generation=2)
            with caplog.at_level(logging.INFO):
                await once(engine)
            assert engine.prompts() == [session.tolist(), tokens(2).tolist()]
            assert "healed_texts=2 healed_tokens=930 " in caplog.text
            assert "open=0 private=0 donors_announced=6 healed_in_place=1" in caplog.text
            await once(engine)
            assert len(engine.seen) == 2

    asyncio.run(scenario())


def test_text_that_is_announced_later_is_computed_too(tmp_path):
    async def scenario():
        async with engine_of(tmp_path) as engine, healing(engine, priority=7, api_key="secret"):
            engine.key = "secret"
            engine.add(tokens(1))
            await until(lambda: len(engine.seen) == 1)
            engine.add(tokens(2))
            await until(lambda: len(engine.seen) == 2)
            assert [body["priority"] for body in engine.seen] == [7, 7]

    asyncio.run(scenario())


def test_an_engine_that_registers_nothing_is_not_asked_again_and_again(tmp_path):
    async def scenario():
        async with engine_of(tmp_path) as engine:
            engine.heals = False
            engine.add(tokens(1))
            await once(engine)
            assert len(engine.seen) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_nothing_is_sent_while_others_use_the_server(tmp_path, kind):
    async def scenario():
        async with engine_of(tmp_path, kind) as engine:
            engine.others = 1
            engine.add(tokens(1))
            async with healing(engine):
                await asyncio.sleep(0.5)
                assert not engine.seen
                engine.others = 0
                await until(lambda: len(engine.seen) == 1)

    asyncio.run(scenario())


def test_a_text_is_given_up_when_somebody_comes_and_tried_again_behind(tmp_path):
    async def scenario():
        async with engine_of(tmp_path) as engine:
            engine.answer = 0
            engine.add(tokens(1))
            async with healing(engine):
                await asyncio.wait_for(engine.arrived.wait(), WAIT_S)
                await asyncio.sleep(0.2)
                assert not engine.left.is_set(), "its own request is nobody else's"
                engine.others = 1
                await asyncio.wait_for(engine.left.wait(), WAIT_S)
                engine.answer, engine.others = 200, 0
                await until(lambda: len(engine.seen) == 2)
                assert engine.prompts() == [tokens(1).tolist()] * 2

    asyncio.run(scenario())


def test_what_runs_is_given_up_at_the_end(tmp_path):
    async def scenario():
        async with engine_of(tmp_path) as engine:
            engine.answer = 0
            engine.add(tokens(1))
            async with healing(engine):
                await asyncio.wait_for(engine.arrived.wait(), WAIT_S)
            await asyncio.wait_for(engine.left.wait(), WAIT_S)

    asyncio.run(scenario())


def test_a_text_that_the_server_refuses_is_left_as_it_is(tmp_path, caplog):
    async def scenario():
        async with engine_of(tmp_path) as engine:
            engine.answer = 400
            engine.add(tokens(1))
            await once(engine)
            assert len(engine.seen) == 1
            assert "a text of 100 tokens is left as it is" in caplog.text
            assert '/v1/completions answers 400: {"error": {"message": "no' in caplog.text

    asyncio.run(scenario())


def test_once_says_whether_something_was_given_up(tmp_path):
    async def scenario():
        async with engine_of(tmp_path) as engine:
            engine.add(tokens(1))
            assert await once(engine) is True
            engine.add(tokens(2))
            engine.answer = 500
            assert await once(engine) is False
            assert engine.prompts()[1:] == [tokens(2).tolist()] * 3

    asyncio.run(scenario())


@asynccontextmanager
async def server_of(engine):
    async with aiohttp.ClientSession() as session:
        engine.heals = False
        server = Server(session, engine.spec.url)
        await server.describe()
        yield server


@pytest.mark.parametrize("status", [302, 401, 403, 404, 408, 429, 500, 503])
def test_what_is_not_wrong_with_the_prompt_has_the_server_asked_anew_what_it_is(tmp_path, status):
    async def scenario():
        async with engine_of(tmp_path) as engine, server_of(engine) as server:
            engine.answer, engine.model = status, "another"
            with pytest.raises(ServerError, match=f"answers {status}"):
                await server.compute([1, 2, 3])
            engine.answer = 200
            await server.compute([1, 2, 3])
            assert [body["model"] for body in engine.seen] == ["base", "another"]

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [400, 413, 422])
def test_what_is_wrong_with_the_prompt_is_refused(tmp_path, status):
    async def scenario():
        async with engine_of(tmp_path) as engine, server_of(engine) as server:
            engine.answer = status
            with pytest.raises(RefusedError, match=f"answers {status}"):
                await server.compute([1, 2, 3])

    asyncio.run(scenario())


def test_a_server_that_changed_its_key_or_kind_is_waited_for(tmp_path):
    async def scenario():
        async with engine_of(tmp_path) as engine, server_of(engine) as server:
            engine.answer, engine.key = 401, "secret"
            for message in ("answers 401", "wants a key", "wants a key"):
                with pytest.raises(ServerError, match=message):
                    await server.compute([1, 2, 3])
            engine.answer, engine.key, engine.kind = 200, "", "kvgraft"
            with pytest.raises(ServerError, match="heals itself"):
                await server.num_requests()
            engine.kind = "vllm"
            await server.compute([1, 2, 3])

    asyncio.run(scenario())


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("vllm", "vllm:num_requests_running +Inf\n"),
        ("vllm", "vllm:num_requests_running 1e999\n"),
        ("vllm", "vllm:num_requests_running -\n"),
        ("vllm", '{"loads": ' + DEEP),
        ("sglang", '{"loads": ' + DEEP),
        ("sglang", '{"loads": [{"num_running_reqs": 1e999, "num_waiting_reqs": 0}]}'),
        ("sglang", '{"loads": [{"num_running_reqs": "' + "9" * 5_000 + '", "num_waiting_reqs": 0}]}'),
    ],
)
def test_odd_loads_are_loads_that_nobody_tells(tmp_path, kind, told):
    async def scenario():
        async with engine_of(tmp_path, kind) as engine, server_of(engine) as server:
            engine.told = told
            with pytest.raises(ServerError, match="does not say how many requests run"):
                await server.num_requests()

    asyncio.run(scenario())


@pytest.mark.parametrize("told", [DEEP, '{"data": ' + DEEP, '{"data": 1}'])
def test_odd_models_are_none(tmp_path, told):
    async def scenario():
        async with engine_of(tmp_path) as engine:
            engine.told = told
            with pytest.raises(ConfigError, match="does not list a model"):
                await once(engine)

    asyncio.run(scenario())


def test_a_failure_of_ours_does_not_end_the_healing_of_others(tmp_path, monkeypatch, caplog):
    compute = Server.compute

    async def breaks(self, token_ids):
        if len(token_ids) == 50:
            raise RuntimeError("of ours")
        await compute(self, token_ids)

    monkeypatch.setattr(Server, "compute", breaks)

    async def scenario():
        for name in "ab":
            (tmp_path / name).mkdir()
        async with engine_of(tmp_path / "a") as first, engine_of(tmp_path / "b") as second:
            first.add(tokens(1, 50))
            closing = asyncio.Event()
            task = asyncio.create_task(heal([first.spec, second.spec], FOREVER, closing=closing))
            await until(lambda: "healing has failed and ends" in caplog.text)
            second.add(tokens(2))
            await until(lambda: len(second.seen) == 1)
            closing.set()
            assert await asyncio.wait_for(task, WAIT_S) is False

    asyncio.run(scenario())


def test_a_server_that_fails_or_goes_away_is_waited_for(tmp_path, caplog):
    async def scenario():
        async with engine_of(tmp_path) as engine, healing(engine):
            engine.answer = 503
            engine.add(tokens(1))
            await until(lambda: len(engine.seen) >= 2)
            await engine.runner.cleanup()
            await until(lambda: "does not answer" in caplog.text)
            engine.seen.clear()
            engine.answer = 200
            await engine.serve()
            await until(lambda: len(engine.seen) == 1)

    asyncio.run(scenario())


def test_no_more_tokens_than_are_allowed(tmp_path):
    async def scenario():
        async with engine_of(tmp_path) as engine:
            for seed in range(4):
                engine.add(tokens(seed))
            settings = HealSettings(idle_s=0.0, poll_s=0.02, tokens_per_minute=200.0)
            async with healing(engine, settings):
                await until(lambda: len(engine.seen) == 2)
                await asyncio.sleep(0.5)
                assert len(engine.seen) == 2

    asyncio.run(scenario())


def test_kvgraft_serve_is_left_alone(tmp_path, caplog):
    async def scenario():
        async with engine_of(tmp_path, "kvgraft") as engine:
            engine.add(tokens(1))
            await asyncio.wait_for(heal([engine.spec], FOREVER, closing=asyncio.Event()), WAIT_S)
            assert not engine.seen
            assert "which heals itself" in caplog.text

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"key": "secret"}, ConfigError, "wants a key; give it with --api-key or in OPENAI_API_KEY"),
        ({"kind": "triton"}, ConfigError, "does not list a model of vLLM, SGLang or kvgraft"),
        ({"has_metrics": False}, ServerError, "does not say how many requests run; start it without"),
        (
            {"replay": None, "events": "ipc:///nowhere/events"},
            ConfigError,
            "no server publishes KV events at ipc:///nowhere",
        ),
        ({"replay": "ipc:///nowhere/replay"}, ConfigError, "no server sends KV events again at ipc:///nowhere/replay"),
    ],
)
def test_what_cannot_be_healed_is_said_in_one_line_at_the_start(tmp_path, monkeypatch, change, error, message):
    monkeypatch.setattr("kvgraft.heal.probe.PATIENCE_S", 0.3)

    async def scenario():
        async with engine_of(tmp_path) as engine:
            for name, value in change.items():
                setattr(engine, name, value)
            with pytest.raises(error, match=message) as caught:
                await once(engine)
            assert "\n" not in str(caught.value)

    asyncio.run(scenario())


def test_an_endpoint_of_another_kind_publishes_nothing(tmp_path, monkeypatch):
    """The replay endpoint given for the events', and the port of the HTTP server."""
    monkeypatch.setattr("kvgraft.heal.probe.PATIENCE_S", 0.3)

    async def scenario():
        async with engine_of(tmp_path) as engine:
            for endpoint in (engine.replay, f"tcp://127.0.0.1:{engine.port}"):
                engine.events = endpoint
                with pytest.raises(ConfigError, match="no server publishes KV events at"):
                    await once(engine)

    asyncio.run(scenario())


def test_a_publisher_that_connects_instead_of_listening_is_explained(monkeypatch):
    """vLLM's does where its endpoint names a host: both sides would wait for the other for ever."""
    monkeypatch.setattr("kvgraft.heal.probe.PATIENCE_S", 0.3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    zmq = load_zmq()
    publisher = zmq.Context.instance().socket(zmq.PUB)
    try:
        publisher.connect(f"tcp://127.0.0.1:{port}")
        with pytest.raises(ConfigError) as caught:
            require_publisher(f"tcp://127.0.0.1:{port}", None)
    finally:
        publisher.close(linger=0)
    told = str(caught.value)
    assert f"vLLM connects to tcp://127.0.0.1:{port} and listens at tcp://*:{port}" in told
    assert "\n" not in told


def test_nobody_listens(tmp_path):
    async def scenario():
        async with engine_of(tmp_path) as engine:
            await engine.runner.cleanup()
            with pytest.raises(ServerError, match=r"does not answer: .*; start the server, or check --url"):
                await once(engine)

    asyncio.run(scenario())
