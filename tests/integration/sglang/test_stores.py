"""Donors in a directory: a server that was killed leaves them to the next one, for as long as the weights are the same."""

from __future__ import annotations

import random
import time

import pytest
from models import VOCABULARY
from server import SGLangServer

from reference import Copied, Fresh, Reference

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LENGTH = 600
_PATIENCE_S = 600.0


@pytest.fixture(scope="module")
def ids():
    rng = random.Random(14)
    return lambda count: [rng.randrange(3, VOCABULARY) for _ in range(count)]


@pytest.fixture(scope="module")
def references(model_dir):
    return {name: Reference(model_dir(name)) for name in ("llama", "llama-trained-on")}


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def start(request, model_dir, tmp_path_factory):
    """Return a function that makes a server with the same directory, and the directory."""
    folder = tmp_path_factory.mktemp("store")
    options = {"--tp-size": request.param, "--chunked-prefill-size": 256}
    environ = {
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join("01"[: request.param]),
        "KVGRAFT_STORE": f"file:{folder}?max_bytes=1GiB",
    }
    return lambda: SGLangServer(model_dir("llama"), options, environ), folder


@pytest.fixture(scope="module")
def documents(ids):
    return {name: ids(LENGTH) for name in ("shared", "damaged", "weights")}


@pytest.fixture(scope="module")
def server(start, documents):
    """The second server; the first one was killed when it had written what it read."""
    make, folder = start
    with make() as first:
        for document in documents.values():
            first.generate(document, 1)
        wait_for_objects(first, folder, len(documents))
        first.kill()
    damage(folder, documents)
    with make() as second:
        second.settle()
        yield second


def objects(folder):
    return list(folder.glob("*/*.safetensors"))


def wait_for_objects(server, folder, count):
    deadline = time.monotonic() + _PATIENCE_S
    while len(objects(folder)) < count * server.num_ranks:
        assert time.monotonic() < deadline, server.log()[-3000:]
        server.settle()


def damage(folder, documents):
    """Flip a bit in the K/V of one document, in every rank's part."""
    from kvgraft.memory.store.record import decode_head, head_size

    for path in objects(folder):
        raw = bytearray(path.read_bytes())
        head = decode_head(bytes(raw[: head_size(bytes(raw))]), path.parent.name, path.stem)
        if head.record.token_ids.tolist()[:LENGTH] == documents["damaged"]:
            raw[head.num_bytes + 100] ^= 4
            path.write_bytes(raw)


def shifted(server, document, ids):
    """Ask for a document behind text that nobody has seen; returns prompt, answer and what computed what was copied."""
    prompt = ids(40) + document + ids(10)
    answer = server.generate(prompt)
    (report,) = answer["meta_info"]["kvgraft"]
    return prompt, answer, {source["request"] for source in report["attempts"][-1]["sources"]}


def test_text_of_the_killed_server_is_copied(server, documents, references, ids):
    document = documents["shared"]
    prompt, answer, sources = shifted(server, document, ids)
    assert answer["meta_info"]["cached_tokens"] == LENGTH
    assert sources == {"a store"}
    reference = references["llama"]
    parts = [Fresh(prompt[:40]), Copied(reference.cache_of(Fresh(document)), 0, LENGTH), Fresh(prompt[40 + LENGTH :])]
    assert answer["output_ids"] == reference.answer(parts).tokens
    server.settle()
    assert server.is_healthy()


def test_damaged_text_is_computed(server, documents, references, ids):
    prompt, answer, sources = shifted(server, documents["damaged"], ids)
    assert answer["meta_info"]["cached_tokens"] == 0
    assert sources == set()
    assert answer["output_ids"] == references["llama"].answer([Fresh(prompt)]).tokens
    assert "damaged" in server.log()


def test_flush_empties_the_server_and_not_the_store(server, documents, ids):
    assert server.flush()
    shifted(server, ids(20), ids)  # opens the space again
    deadline, sources = time.monotonic() + _PATIENCE_S, set()
    while sources != {"a store"}:
        assert time.monotonic() < deadline, server.log()[-3000:]
        server.settle()
        assert server.flush() or sources
        shifted(server, ids(20), ids)
        time.sleep(1.0)
        server.settle()
        _, answer, sources = shifted(server, documents["shared"], ids)
    assert answer["meta_info"]["cached_tokens"] == LENGTH


def test_other_weights_get_nothing_of_the_store(server, documents, references, ids, model_dir):
    document = documents["weights"]
    for name in ("llama-trained-on", "llama"):
        assert server.post("/update_weights_from_disk", {"model_path": model_dir(name)})["success"]
        shifted(server, ids(20), ids)
        time.sleep(1.0)
        server.settle()
        prompt, answer, sources = shifted(server, document, ids)
        if name == "llama":
            assert (answer["meta_info"]["cached_tokens"], sources) == (LENGTH, {"a store"})
        else:
            assert (answer["meta_info"]["cached_tokens"], sources) == (0, set())
            assert answer["output_ids"] == references[name].answer([Fresh(prompt)]).tokens


def test_a_store_that_stalled_is_read_again(model_dir, ids, tmp_path):
    """Two reads that hang make reads look slow; while nothing is read, only time corrects that."""
    folder, stalled = tmp_path / "store", tmp_path / "store.stalled"
    environ = {"KVGRAFT_STORE": f"stalling:{folder}"}
    documents = [ids(LENGTH) for _ in range(18)]
    with SGLangServer(model_dir("llama"), {}, environ) as first:
        for document in documents:
            first.generate(document, 1)
        wait_for_objects(first, folder, len(documents))
        first.kill()
    with SGLangServer(model_dir("llama"), {}, environ) as second:
        second.settle()
        stalled.touch()
        for document in documents[:2]:
            _, answer, sources = shifted(second, document, ids)
            assert (answer["meta_info"]["cached_tokens"], sources) == (0, set())
        stalled.unlink()
        for document in documents[2:]:
            _, _, sources = shifted(second, document, ids)
            if sources == {"a store"}:
                break
            time.sleep(2.0)
        assert sources == {"a store"}, second.log()[-3000:]
        second.settle()
        assert second.is_healthy()
