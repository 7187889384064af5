"""Weights that change in a running server: nothing that the old ones computed is copied afterwards."""

from __future__ import annotations

import random

import pytest
import torch
from models import VOCABULARY
from server import SGLangServer

from reference import Copied, Fresh, Reference

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

POOL = 3000


@pytest.fixture(scope="module")
def ids():
    rng = random.Random(7)
    return lambda count: [rng.randrange(3, VOCABULARY) for _ in range(count)]


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def server(request, model_dir):
    options = {"--tp-size": request.param, "--chunked-prefill-size": 256, "--max-total-tokens": POOL}
    with SGLangServer(
        model_dir("llama"), options, {"SGLANG_CPU_OMP_THREADS_BIND": "|".join("01"[: request.param])}
    ) as server:
        yield server


@pytest.fixture(scope="module")
def references(model_dir):
    return {name: Reference(model_dir(name)) for name in ("llama", "llama-trained-on")}


@pytest.fixture
def load(server, model_dir):
    """Return a function that gives the server other weights; it leaves the first ones, and an empty cache."""

    def load(name, **fields):
        answer = server.post("/update_weights_from_disk", {"model_path": model_dir(name), **fields})
        assert answer["success"], answer

    yield load
    load("llama")


def shifted(server, document, ids, **fields):
    """Ask for `document` behind text that nobody has seen; returns prompt and answer."""
    prompt = ids(40) + document + ids(10)
    return prompt, server.generate(prompt, **fields)


def cold(references, name, prompt):
    return references[name].answer([Fresh(prompt)])


def test_donors_of_old_weights_are_gone_with_the_cache(server, references, load, ids):
    kept, evicted = ids(300), ids(300)
    server.generate(evicted, 1)
    server.generate(ids(POOL - 400), 1)  # moves it to host memory
    server.generate(kept, 1)
    _, answer = shifted(server, evicted, ids)
    assert answer["meta_info"]["kvgraft"][0]["attempts"][0]["sources"][0]["tier"] == "host"
    load("llama-trained-on")
    for document in (kept, evicted):
        prompt, answer = shifted(server, document, ids)
        assert answer["meta_info"]["cached_tokens"] == 0
        assert answer["output_ids"] == cold(references, "llama-trained-on", prompt).tokens
    _, answer = shifted(server, kept, ids)
    assert answer["meta_info"]["cached_tokens"] == 300, "text that the new weights computed is copied again"


def test_nothing_is_copied_between_new_weights_and_a_flush(server, references, load, ids):
    """`flush_cache: false` keeps old K/V in SGLang's tree on purpose. None of it is moved to other prompts."""
    document = ids(300)
    server.generate(document, 1)
    load("llama-trained-on", flush_cache=False)
    prompt, answer = shifted(server, document, ids)
    assert answer["meta_info"]["cached_tokens"] == 0
    assert answer["output_ids"] == cold(references, "llama-trained-on", prompt).tokens
    miss = answer["meta_info"]["kvgraft"][0]["report"]["miss"]
    assert miss["reason"] == "reuse_off"
    assert "/flush_cache" in miss["detail"]
    server.generate(document + ids(40), 1)  # SGLang's own hit on what the old weights computed
    _, answer = shifted(server, document, ids)
    assert answer["meta_info"]["cached_tokens"] == 0, "what attended to the old weights' K/V is no donor"
    assert server.flush()
    server.generate(document, 1)
    prompt, answer = shifted(server, document, ids)
    assert answer["meta_info"]["cached_tokens"] == 300
    reference = references["llama-trained-on"]
    parts = [Fresh(prompt[:40]), Copied(reference.cache_of(Fresh(document)), 0, 300), Fresh(prompt[340:])]
    assert answer["output_ids"] == reference.answer(parts).tokens


def test_failed_update_leaves_nothing_to_copy_either(server, load, ids):
    document = ids(300)
    server.generate(document, 1)
    with pytest.raises(OSError, match="400"):
        load("llama", model_path="/nowhere")
    _, answer = shifted(server, document, ids)
    assert answer["meta_info"]["cached_tokens"] == 0


def test_tensors_that_a_trainer_sends_in_a_session(server, references, load, ids, model_dir):
    """Each part flushes, as is the default; the end of the session then finds nothing that old weights computed."""
    from sglang.srt.utils import MultiprocessingSerializer

    document, name = ids(300), "model.layers.1.input_layernorm.weight"
    server.generate(document, 1)
    weight = torch.linspace(0.5, 1.5, references["llama"].model.config.hidden_size)
    torch.multiprocessing.set_sharing_strategy("file_system")
    sent = MultiprocessingSerializer.serialize([(name, weight)], output_str=True)
    assert server.post("/begin_weight_update", {"selector": "all"})["success"]
    server.flush()
    server.generate(document, 1)
    body = {"serialized_named_tensors": [sent] * server.num_ranks, "selector": "all"}
    assert server.post("/update_weights_from_tensor", body)["success"]
    assert server.post("/end_weight_update", {})["success"]
    prompt, answer = shifted(server, document, ids)
    assert answer["meta_info"]["cached_tokens"] == 0
    changed = Reference(model_dir("llama"))
    changed.model.get_parameter(name).data = weight
    assert answer["output_ids"] == changed.answer([Fresh(prompt)]).tokens
    server.generate(document, 1)
    _, answer = shifted(server, document, ids)
    assert answer["meta_info"]["cached_tokens"] == 300, "the session's end left reuse on"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_request_that_runs_while_weights_change(server, references, load, ids, mode):
    """It goes on, with its old K/V or without; nothing that it computed reaches others before a flush."""
    document = ids(300)
    server.generate(document, 1)
    prompt = ids(40) + document + ids(10)
    answers = server.stream(prompt, 400)
    next(answers)
    assert server.post_raw("/pause_generation", {"mode": mode})
    load("llama-trained-on", flush_cache=mode == "retract")
    assert server.post_raw("/continue_generation", {})
    *_, answer = answers
    (report,), output = answer["meta_info"]["kvgraft"], answer["output_ids"]
    attempts = report["attempts"]
    assert len(attempts) == (2 if mode == "retract" else 1)
    assert report["report"]["shifted_tokens"] == 300
    if mode == "retract":
        assert attempts[1]["spans"] == []
        start = attempts[1]["num_tokens"] - len(prompt)
        want = references["llama-trained-on"].answer([Fresh(prompt + output[:start])], 16)
        assert output[start : start + 16] == want.tokens
    else:
        for text in (document, output[:300]):
            _, answer = shifted(server, text, ids)
            assert answer["meta_info"]["cached_tokens"] == 0


def test_released_memory_holds_no_donors(server, ids):
    document = ids(300)
    server.generate(document, 1)
    server.settle()
    assert server.post_raw("/release_memory_occupation", {})
    assert server.post_raw("/resume_memory_occupation", {})
    _, answer = shifted(server, document, ids)
    assert answer["meta_info"]["cached_tokens"] == 0
    assert server.is_healthy()
