"""KV events of the embedded engine over ZMQ: a reader knows what the prefix cache holds, and of nothing approximate."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("msgspec")
zmq = pytest.importorskip("zmq")

from tests.page_index import PageIndex, tree_pages  # noqa: E402
from tests.standins.scripted_provider import FOLDER, Script  # noqa: E402

from kvgraft.cli import main  # noqa: E402
from kvgraft.engine import LLM, SamplingParams  # noqa: E402
from kvgraft.engine.async_llm import AsyncLLM  # noqa: E402
from kvgraft.engine.event_feed import EventFeed  # noqa: E402
from kvgraft.engine.model.loading import adopt_model  # noqa: E402
from kvgraft.errors import ConfigError, IntegrationError  # noqa: E402
from kvgraft.events import AllBlocksCleared, BlockRemoved, BlockStored, ZmqEventSubscriber, wire  # noqa: E402
from kvgraft.reuse.donor_events import donor_scope, is_donor, scope_of  # noqa: E402
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model  # noqa: E402

GREEDY = SamplingParams(8, ignore_eos=True)
WAIT_S = 60.0


def make_llm(endpoint, family="llama", **settings):
    settings = {"num_slots": 2_000, "selection": "none", "page_size": 16, "kv_events": endpoint} | settings
    return LLM(adopt_model(family, tiny_model(family), None), **settings)


class Reader:
    """A router beside the engine: reads until it knows what the cache holds."""

    def __init__(self, endpoint, replay_endpoint):
        self.subscriber = ZmqEventSubscriber(endpoint, replay_endpoint=replay_endpoint)
        self.index = PageIndex()
        self.events = []

    def connect(self, publish):
        """Publish until something arrives: from then on nothing is lost, and what was missed before is replayed."""
        while not (batches := self.subscriber.receive(0.05)):
            publish()
        self._take(batches)

    def _take(self, batches):
        for batch in batches:
            self.events += batch.events
            self.index.read(batch.events)

    def read_until(self, pages):
        """Everything that was published ends with the state that the cache is in now."""
        for _ in range(1_000):
            if self.index.pages == pages():
                return
            self._take(self.subscriber.receive(WAIT_S))
        raise AssertionError("the reader does not learn what is stored")

    def close(self):
        self.subscriber.close()


@pytest.fixture
def endpoints(tmp_path):
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"


@pytest.fixture
def served(endpoints, rng, request):
    """An engine, and a reader that came before its first event and may ask for what it misses while it connects."""
    endpoint, replay = endpoints
    setting = json.dumps({"endpoint": endpoint, "replay_endpoint": replay})
    llm = make_llm(setting, **getattr(request, "param", {}))
    reader = Reader(endpoint, replay)
    reader.connect(lambda: llm.generate(rng.integers(3, VOCABULARY, 100), GREEDY, "exact"))
    yield llm, reader
    reader.close()
    llm.close()


def random_prompt(rng, length):
    return rng.integers(3, VOCABULARY, length)


SETTINGS = [{}, {"page_size": 1}, {"page_size": 64}, {"family": "gemma2"}, {"eviction_policy": "slru"}]


@pytest.mark.parametrize("served", SETTINGS, indirect=True, ids=str)
def test_a_reader_knows_what_is_stored_after_evictions_and_resets(served, rng):
    llm, reader = served
    documents = [random_prompt(rng, 200) for _ in range(3)]

    def pages():
        return tree_pages(llm.space.prefix)

    for salt in ("", "tenant"):
        llm.generate(
            [np.concatenate([documents[0], random_prompt(rng, 40)]) for _ in range(3)], GREEDY, cache_salt=salt
        )
    assert len(pages()) > 0
    reader.read_until(pages)
    for _ in range(12):  # more than there is room for
        llm.generate(np.concatenate([random_prompt(rng, 30), *documents[:2]]), GREEDY, "exact")
    llm.score(documents[2], [3, 4])
    reader.read_until(pages)
    assert any(type(event).__name__ == "BlockRemoved" for event in reader.events)
    llm.reset()
    assert not pages()
    reader.read_until(pages)
    assert AllBlocksCleared() in reader.events
    llm.generate(documents, GREEDY)
    reader.read_until(pages)
    assert {event.block_size for event in reader.events if isinstance(event, BlockStored)} == {llm.config.page_size}
    llm.check()


@pytest.mark.parametrize("served", [{}, {"page_size": 1}, {"family": "gemma2"}], indirect=True, ids=str)
def test_no_page_at_or_behind_a_graft_is_told_of(served, rng):
    llm, reader = served
    head, document = random_prompt(rng, 70), random_prompt(rng, 150)
    llm.generate([head, document], GREEDY)
    reader.read_until(lambda: tree_pages(llm.space.prefix))
    before = len(reader.events)
    prompt = np.concatenate([head, random_prompt(rng, 20), document, random_prompt(rng, 30)])
    output = llm.generate(prompt, GREEDY)[0]
    first_graft = min(span.target_start for span in output.report.spans)
    assert 70 <= first_graft <= 90
    llm.generate(random_prompt(rng, 40), GREEDY, "exact")  # what comes behind it has arrived when this has
    reader.read_until(lambda: tree_pages(llm.space.prefix))
    text = (*prompt.tolist(), *output.token_ids)
    told = [pages for pages in reader.index.pages.values() if pages == text[: len(pages)]]
    page_size = llm.config.page_size
    assert max(map(len, told)) <= first_graft
    # A hybrid tree forgets a prefix whose window was left behind and that nothing exact continues.
    assert max(map(len, told)) >= first_graft // page_size * page_size or llm.space.window_usage() is not None
    new = {token for event in reader.events[before:] if isinstance(event, BlockStored) for token in [event.token_ids]}
    assert all(set(prompt[-30:].tolist()) - set(tokens) for tokens in new), "the grafted prompt's end is in no event"


def test_a_substituted_request_is_told_of_nowhere(endpoints, rng, tmp_path, monkeypatch):
    """Its K/V are another text's; a router that hashed its tokens would take them for exact."""
    monkeypatch.syspath_prepend("tests/standins")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    script, (endpoint, replay) = Script(tmp_path), endpoints
    llm = make_llm(
        json.dumps({"endpoint": endpoint, "replay_endpoint": replay}),
        semantic_provider="scripted_provider:Scripted",
        semantic_deadline_ms=60_000,
    )
    publisher = llm.engine._events._publisher
    stored, prompt = random_prompt(rng, 200), random_prompt(rng, 150)
    llm.generate(stored, GREEDY, "off")
    script.answer(stored.tolist())
    output = llm.generate(prompt, GREEDY, "substitute")[0]
    assert output.report.substituted_tokens > 100
    pages = tree_pages(llm.space.prefix)
    llm.close()
    index = PageIndex()
    for _, payload in publisher._sent:
        index.read(wire.decode_batch(payload).events)
    assert index.pages == pages
    assert {text[:16] for text in index.pages.values()} == {tuple(stored[:16].tolist())}


def test_served_engine_publishes_from_its_own_thread_and_closes(endpoints, rng):
    endpoint, replay = endpoints
    setting = json.dumps({"endpoint": endpoint, "replay_endpoint": replay, "topic": "kv"})

    async def serve():
        llm = AsyncLLM(adopt_model("llama", tiny_model("llama"), None), num_slots=500, page_size=16, kv_events=setting)
        reader = Reader(endpoint, replay)
        try:
            arrived = asyncio.create_task(asyncio.to_thread(reader.connect, lambda: None))
            while not arrived.done():
                request = await llm.prepare(random_prompt(rng, 100), GREEDY)
                async for _ in llm.stream(request):
                    pass
            await arrived
            await asyncio.to_thread(reader.read_until, lambda: tree_pages(llm._engine.space.prefix))
            assert len(reader.index.pages) >= 107 // 16
            await llm.reset()
            await asyncio.to_thread(reader.read_until, dict)
            assert reader.events[-1] == AllBlocksCleared()
        finally:
            reader.close()
            await llm.close()

    asyncio.run(serve())
    with zmq.Context.instance().socket(zmq.PUB) as again:
        again.bind(endpoint)  # nobody holds it any more


def free_port():
    """One below those that the system gives to clients of other tests meanwhile."""
    for port in random.sample(range(12_000, 32_000), 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def test_a_port_in_use_is_told_in_one_line_before_a_model_is_loaded(capsys):
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        endpoint = f"tcp://*:{listener.getsockname()[1]}"
        with pytest.raises(IntegrationError, match="choose a free endpoint") as caught:
            LLM("no such model", kv_events=endpoint)
        assert "\n" not in str(caught.value)
        assert main(["serve", "--port", "0", "--kv-events", endpoint]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("kvgraft: cannot open 'tcp://*:")


def test_tokens_that_other_machines_can_read_are_told_of_in_one_line(caplog):
    port = free_port()
    EventFeed(f"tcp://*:{port}").close()
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith(f"any client that reaches tcp://*:{port} reads the tokens of all prompts")
    assert "\n" not in line


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:{}", "ipc:///{}/kv", "tcp://router.example.org:{}"])
def test_others_are_not(caplog, tmp_path, endpoint):
    EventFeed(endpoint.format(str(tmp_path).lstrip("/") if "ipc" in endpoint else free_port())).close()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_an_endpoint_of_this_machine_s_own_is_bound():
    """Only where somebody is connected to can a reader connect."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    feed = EventFeed(endpoint)
    try:
        with pytest.raises(IntegrationError, match="choose a free endpoint"):
            EventFeed(endpoint)
    finally:
        feed.close()


def await_free(port):
    """ZeroMQ closes a socket behind the call that closes it."""
    for _ in range(600):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("0.0.0.0", port))
            return
        time.sleep(0.1)
    raise AssertionError("the port stays taken")


def test_a_start_that_fails_frees_the_port():
    port = free_port()
    endpoint = f"tcp://*:{port}"
    for _ in range(2):
        with pytest.raises(Exception, match="no such model"):
            LLM("no such model", kv_events=endpoint)
        await_free(port)
    llm = make_llm(endpoint)
    llm.close()
    llm.close()


@pytest.mark.parametrize("missing", ["msgspec", "zmq"])
def test_a_missing_extra_is_named(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"pip install 'kvgraft\[router\]'"):
        make_llm("tcp://*:0")


def test_a_program_that_forgets_to_close_ends(tmp_path):
    script = f"""
import numpy as np
from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.testing.tiny_models import tiny_model
llm = LLM(adopt_model("llama", tiny_model("llama"), None), num_slots=500, kv_events="ipc://{tmp_path}/events")
llm.generate(np.arange(3, 100), SamplingParams(2))
print("done")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


def test_without_readers_nothing_is_recorded(rng):
    llm = make_llm("")
    llm.generate(random_prompt(rng, 100), GREEDY)
    assert llm.engine._events.log is None
    assert all(not node.page_hashes for node in llm.space.prefix.root_handle.subtree())


def test_only_replay_keeps_what_was_sent(endpoints, rng):
    """Batches would pile up otherwise, in a server that runs for weeks."""
    endpoint, replay = endpoints
    for setting, kept in ((endpoint, False), (json.dumps({"endpoint": endpoint, "replay_endpoint": replay}), True)):
        llm = make_llm(setting)
        publisher = llm.engine._events._publisher
        llm.generate(random_prompt(rng, 100), GREEDY)
        llm.close()
        assert publisher._num_published > 0
        assert bool(publisher._sent) is kept


def test_batches_are_what_readers_of_vllm_and_sglang_take(endpoints, rng):
    endpoint, replay = endpoints
    llm = make_llm(json.dumps({"endpoint": endpoint, "replay_endpoint": replay, "as_arrays": True}))
    publisher = llm.engine._events._publisher
    prompt = random_prompt(rng, 40)
    llm.generate(prompt, SamplingParams(1))
    llm.close()
    _, payload = publisher._sent[0]
    (stored,) = wire.decode_batch(payload).events
    assert stored.token_ids == tuple(prompt[:32].tolist())
    assert (stored.block_size, stored.parent_block_hash, len(stored.block_hashes)) == (16, None, 2)


class DonorReader:
    """A router beside the engine that knows donors."""

    def __init__(self, endpoint, replay):
        self.subscriber = ZmqEventSubscriber(endpoint, replay_endpoint=replay)
        self.donors, self.pages = {}, set()

    def receive(self, timeout_s):
        events = [event for batch in self.subscriber.receive(timeout_s) for event in batch.events]
        for event in events:
            if isinstance(event, BlockStored) and is_donor(event):
                self.donors[event.block_hashes[0]] = (event.token_ids, donor_scope(event).scope)
            elif isinstance(event, BlockStored):
                self.pages.update(event.block_hashes)
            for block_hash in getattr(event, "block_hashes", ()) if isinstance(event, BlockRemoved) else ():
                self.donors.pop(block_hash, None)
        return events

    def read_until(self, held):
        for _ in range(1_000):
            if sorted(self.donors.values()) == held():
                return
            self.receive(WAIT_S)
        raise AssertionError("the reader does not learn which donors there are")


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_donors_are_told_of_where_that_is_asked_for(endpoints, rng, family):
    """Every donor that the engine has is announced, with its text and digests; those that go and a reset are told of."""
    endpoint, replay = endpoints
    setting = json.dumps({"endpoint": endpoint, "replay_endpoint": replay})
    llm = make_llm(setting, family, announce_donors=True, num_slots=400)
    reader = DonorReader(endpoint, replay)

    def held():
        return sorted((tuple(d.token_ids.tolist()), scope_of(salt=d.namespace.tenant_salt)) for d in llm.space.donors)

    try:
        while not reader.receive(0.05):
            llm.generate([int(t) for t in rng.integers(2, VOCABULARY, 60)], GREEDY)
        for turn in range(12):
            salt = "alice" if turn % 3 == 0 else ""
            llm.generate([int(t) for t in rng.integers(2, VOCABULARY, 60)], GREEDY, cache_salt=salt)
        assert held()
        reader.read_until(held)
        assert not reader.pages & set(reader.donors)
        llm.reset()
        assert not held()
        reader.read_until(held)
    finally:
        reader.subscriber.close()
        llm.close()


def test_announcing_donors_to_nobody_is_refused():
    with pytest.raises(ConfigError, match="announce_donors adds donors to the KV events; set kv_events"):
        make_llm("", announce_donors=True)
