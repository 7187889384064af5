"""32 streaming clients at once over HTTP, in a pool that holds a third of them; some leave."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

import openai
import pytest

from kvgraft.bench.client import CompletionsClient
from kvgraft.bench.server_process import ServerProcess

NUM_CLIENTS = 32
MAX_TIE = 1e-4
PATIENCE_S = 600


class Ask:
    """One client's request, and what it gets if nobody else is there."""

    def __init__(self, number):
        rng = random.Random(number)
        self.prompt = [rng.randrange(5, 4_000) for _ in range(rng.randrange(10, 300))]
        self.length = rng.randrange(8, 40)
        self.reuse = ("off", "exact")[number % 2]
        self.leaves_after = rng.randrange(0, 8) if number % 4 == 3 else None
        self.alone = None

    @property
    def num_slots(self):
        return len(self.prompt) + self.length


async def stream(client, ask, leaves_after=None):
    """Tokens and the margin between the two likeliest at each."""
    answer = await client.completions.create(
        model="graft-tiny",
        prompt=ask.prompt,
        max_tokens=ask.length,
        temperature=0,
        logprobs=2,
        stream=True,
        extra_body={"ignore_eos": True, "kvgraft": {"reuse": ask.reuse}},
    )
    tokens = []
    async with aclosing(answer):
        async for chunk in answer:
            for choice in chunk.choices:
                for token, top in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True):
                    best = sorted(top.values(), reverse=True)
                    tokens.append((token, best[0] - best[-1] if len(best) > 1 else 0.0))
            if leaves_after is not None and len(tokens) > leaves_after:
                break
    return tokens


def assert_same_up_to_ties(got, alone):
    assert len(got) == len(alone)
    for (token, _), (expected, margin) in zip(got, alone, strict=True):
        if token != expected:
            assert margin < MAX_TIE
            return


async def when_idle(http):
    async with asyncio.timeout(PATIENCE_S):
        while True:
            health = await http.get_json("/health")
            assert health["invariant"] == "ok"
            if not any(health["requests"].values()):
                return health
            await asyncio.sleep(0.05)


@pytest.mark.slow
def test_many_clients_get_what_each_would_get_alone_and_leak_nothing():
    asks = [Ask(number) for number in range(NUM_CLIENTS)]
    num_slots = sum(ask.num_slots for ask in asks) // 3

    async def main(url):
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client,
            CompletionsClient(url) as http,
        ):
            for ask in asks:
                if ask.leaves_after is None:
                    ask.alone = await stream(client, ask)
            results = await asyncio.gather(*(stream(client, ask, ask.leaves_after) for ask in asks))
            health = await when_idle(http)
        for ask, got in zip(asks, results, strict=True):
            if ask.leaves_after is None:
                assert len(got) == ask.length
                assert_same_up_to_ties(got, ask.alone)
        return health

    with ServerProcess(["--num-slots", str(num_slots)]) as server:
        health = asyncio.run(main(server.url))
    assert health["slots"]["request"] == 0
    assert health["slots"]["total"] == num_slots
