"""Any interleaving of arrivals, chunks, hits, preemption, failures and ends with vLLM's own scheduler and block manager."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
from ghost_engine import BLOCK, GhostEngine, config_of
from models import save_tiny
from vllm.v1.request import RequestStatus

from engines import text

SYSTEMS = [text(seed, 5 * BLOCK) for seed in (1, 2)]
GAPS = [text(seed, 3 * BLOCK + 5) for seed in (3, 4)]
DOCUMENTS = [text(seed, 70) for seed in (5, 6)]


def prompt_of(rng):
    """A system prompt, something between it and a document, the document or not, and a question."""
    parts = [*rng.choice(SYSTEMS)]
    parts += rng.choice([[], *GAPS, GAPS[0] + GAPS[1], GAPS[0][:BLOCK]])
    parts += rng.choice([[], *DOCUMENTS, *DOCUMENTS])
    return parts + text(rng.randrange(10, 13), rng.randrange(1, 40))


def walk(engine, rng, *, actions):
    """Let requests arrive, run, fail and end at random, then serve whoever is left."""
    for number in range(2):
        engine.add(f"donor{number}", text(20 + number, 30) + DOCUMENTS[number], "graft")
        engine.finish()
    for number in range(actions):
        action = rng.random()
        if action < 0.45:
            mode = rng.choice(["off", "exact", "graft", "graft", "graft"])
            engine.add(
                f"r{number}",
                prompt_of(rng),
                mode,
                max_tokens=rng.choice([1, 2, 60, 140]),
                priority=rng.randrange(3),
                skips_cache=rng.random() < 0.05,
            )
        elif action < 0.5 and engine.names:
            if rng.random() < 0.5:
                engine.schedule()
            engine.abort(rng.choice(engine.names))
        elif action < 0.54:
            # While a request waits for a load, vLLM preempts all that run, and then refuses.
            with suppress(RuntimeError):
                engine.scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.7)
        else:
            engine.fails = rng.random() < 0.15
            for _ in range(rng.randrange(1, 4)):
                engine.step()
    engine.fails = False
    engine.finish()
    engine.check_workers()
    assert engine.manager.block_pool.get_num_free_blocks() == engine.manager.block_pool.num_gpu_blocks - 1


@pytest.fixture(scope="module")
def folder(model_folder):
    return save_tiny("llama", model_folder)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("load", ["sync", "async", "auto"])
@pytest.mark.parametrize("is_async", [False, True], ids=["", "async-scheduling"])
def test_nothing_reads_a_block_before_it_is_computed(folder, is_async, load, policy, pytestconfig):
    config = config_of(folder, load=load, is_async=is_async, policy=policy)
    walks = int(pytestconfig.getoption("--walks"))
    grafts = failures = repairs = 0
    for seed in range(walks):
        config.scheduler_config.long_prefill_token_threshold = (
            64 if seed % 2 else 0
        )  # many short chunks, or one long one
        engine = GhostEngine(config, num_blocks=(60, 23)[seed // 2 % 2])
        try:
            walk(engine, random.Random(seed), actions=40)
        except Exception as error:
            error.add_note(f"walk {seed}")
            raise
        grafts, failures = grafts + engine.num_grafts, failures + engine.num_failed
        repairs += engine.num_repairs
    assert grafts > walks
    assert repairs
    assert failures


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("load", ["sync", "auto"])
@pytest.mark.parametrize("is_async", [False, True], ids=["", "async-scheduling"])
def test_no_step_has_more_rows_than_its_limit_and_none_waits_for_ever(folder, is_async, load, policy):
    """Requests are preempted, aborted, fail and begin again meanwhile."""
    limit = 180
    config = config_of(
        folder, load=load, is_async=is_async, policy=policy, max_recompute_tokens_per_step=limit, first_k=40
    )
    most = 0
    for seed in range(3):
        engine = GhostEngine(config, num_blocks=(60, 23)[seed % 2])
        commands = engine.graft.commands

        def counted(output, engine=engine, commands=commands):
            nonlocal most
            running = engine.graft._attempts.running
            made = commands(output)
            gaps = [int(np.searchsorted(one.plan.compute, one.end)) for one in made.grafts if not one.asynchronous]
            repairs = [running[one.request_id].claim.num_repair_rows for one in made.repairs]
            rows = sum(gaps) + sum(repairs)
            assert rows <= limit or (len(gaps), len(repairs)) == (1, 0), (gaps, repairs)
            most = max(most, len(gaps) + len(repairs))
            return made

        engine.graft.commands = counted
        walk(engine, random.Random(seed), actions=40)
    assert most > 0


def test_a_request_that_a_reset_preempts_goes_on_from_its_own_blocks(folder):
    """vLLM preempts all that run and cannot forget their blocks, as another request waits for a load: it raises."""
    engine = GhostEngine(config_of(folder, load="async"), num_blocks=60)
    for number, document in enumerate(DOCUMENTS):
        engine.add(f"donor{number}", text(20 + number, 30) + document, "graft")
        engine.finish()
    engine.add("runs", text(41, 40) + DOCUMENTS[0] + text(42, 20), "graft", max_tokens=5)
    request = engine.scheduler.requests["runs"]
    while not request.num_output_tokens:
        engine.step()
    engine.add("waits", text(43, 40) + DOCUMENTS[1] + text(44, 20), "graft")
    engine.step()
    with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.step()
    engine.step()
    assert engine.manager.get_computed_blocks(request)[1] == 4 * BLOCK, "it was repaired before"
    request.block_hashes.renew()
    assert engine.manager.get_computed_blocks(request)[1] == BLOCK, "what stands in front of the graft is exact"
    assert engine.num_grafts == 2
    engine.finish()


@pytest.mark.parametrize("load", ["sync", "auto"])
@pytest.mark.parametrize("is_async", [False, True], ids=["", "async-scheduling"])
def test_no_token_is_drawn_over_a_graft_that_failed(folder, is_async, load):
    """A step that was scheduled before the failure is known computes the next token over what was never made."""
    engine = GhostEngine(config_of(folder, load=load, is_async=is_async), num_blocks=60)
    engine.add("donor", text(20, 30) + DOCUMENTS[0], "graft")
    engine.finish()
    engine.fails = True
    engine.add("grafted", text(21, 40) + DOCUMENTS[0] + text(22, 3), "graft", max_tokens=8)
    request = engine.scheduler.requests["grafted"]
    engine.step()
    engine.finish()
    assert engine.num_failed == 1
    assert (request.num_output_tokens, request.num_output_placeholders) == (8, 0)


@pytest.mark.parametrize("is_async", [False, True], ids=["", "async-scheduling"])
@pytest.mark.parametrize("arrives_later", [0, 1, 2])
def test_nobody_finds_what_a_failed_graft_was_to_compute(folder, is_async, arrives_later):
    """The graft's blocks of exact text are public, and vLLM computes them chunk by chunk once the graft has failed."""
    config = config_of(folder, is_async=is_async)
    config.scheduler_config.long_prefill_token_threshold = 64
    engine = GhostEngine(config, num_blocks=60)
    gap = text(30, 6 * BLOCK)
    for name, prompt in [("donor", text(20, 30) + DOCUMENTS[0]), ("system", SYSTEMS[0] + [1])]:
        engine.add(name, prompt, "graft")
        engine.finish()
    engine.fails = True
    engine.add("grafted", SYSTEMS[0] + gap + DOCUMENTS[0] + [1], "graft")
    for _ in range(arrives_later):
        engine.step()
    engine.add("plain", SYSTEMS[0] + gap + text(31, 40), "off", max_tokens=8)
    engine.step()
    engine.finish()
    assert engine.num_failed == 1


@pytest.mark.parametrize("is_ended", [False, True], ids=["goes-on", "ends"])
@pytest.mark.parametrize("num_drawn", [62, 63, 64, 65])
@pytest.mark.parametrize("is_async", [False, True], ids=["", "async-scheduling"])
def test_what_a_session_takes_back_is_no_donor(folder, is_async, num_drawn, is_ended):
    """Further input takes the place of the last token drawn, whose K/V a step under way has computed, and captured."""
    engine = GhostEngine(config_of(folder, is_async=is_async), num_blocks=60)
    prompt = text(20, 40)
    engine.stops.add(("talks", len(prompt) + num_drawn))
    engine.add("talks", [*prompt], "graft", max_tokens=200, is_session=True)
    request = engine.scheduler.requests["talks"]
    for _ in range(num_drawn + 5):
        engine.step()
    assert request.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    engine.add("talks", text(21, 30), "graft", max_tokens=200, is_session=True)
    while not is_ended and request.num_output_tokens < 20:
        engine.step()
    engine.abort("talks")
    engine.finish()
    engine.add("other", text(22, 60), "graft")  # workers hear of the donors
    engine.finish()
    assert [donor.num_tokens for donor in engine.graft.registry.catalogue] == [len(prompt), 60]
