"""Run requests through an engine by hand, a step at a time, or such that it sees all of them at once."""

from __future__ import annotations

import asyncio
import threading

from kvgraft.engine import SamplingParams
from kvgraft.engine.requests.options import RequestOptions

SMALL = {"donor_tokens": 1 << 15}
"""Settings of an engine with little text: tables for the default of 4 million tokens are a third of a short test's time."""

GEMMA3 = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
"""The fewest layers of Gemma 3 of both kinds; by itself it has a full one in six."""


def submit(engine, prompt, count, reuse="graft", selection=None):
    request = engine.builder.build(
        prompt, RequestOptions(SamplingParams(count, ignore_eos=True), reuse, selection=selection)
    )
    engine.add(request)
    return engine._active[request.request_id]


def run_to_end(engine):
    outputs = {}
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            if event.part.output is not None:
                outputs[event.request_id] = event.part.output
    return outputs


async def run_together(llm, requests):
    """The parts of each request of an `AsyncLLM` whose thread sees none before it sees all."""
    return await asyncio.gather(*await begin_together(llm, requests))


async def begin_together(llm, requests):
    """Tasks that give the parts of each request; the engine's thread sees none before it sees all.

    Otherwise one that is sent late may find the others done, and none ever waits, is refused or preempted.
    """
    gate = threading.Event()
    llm._command(gate.wait, lambda error: None)
    tasks = [asyncio.create_task(_parts(llm.stream(request))) for request in requests]
    await asyncio.sleep(0)  # every stream has asked for its request to be added
    gate.set()
    return tasks


async def _parts(stream):
    return [part async for part in stream]
