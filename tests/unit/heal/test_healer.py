"""What a healer does with a server that fails, hangs or is used by others. The clock goes on when the server is asked."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest

pytest.importorskip("zmq")
pytest.importorskip("aiohttp")

from kvgraft.donors import DonorCatalogue
from kvgraft.heal import Texts
from kvgraft.heal.healer import Healer, HealSettings
from kvgraft.heal.server import ServerError
from kvgraft.reuse.announcer import DonorAnnouncer
from kvgraft.types import Namespace

WAIT_S = 60.0
POLL_S = 0.001
REST_S = 10 * POLL_S
MODEL = Namespace("model")


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class FakeServer:
    """A server that does with a prompt what `acts` says of its length, and otherwise computes it.

    Attributes:
        tries: Length of each prompt, and when it came.
        num_left: Prompts that were given up.
        step_s: The clock goes on by so much at each question.
    """

    url = "http://server"

    def __init__(self, clock, step_s=POLL_S, **acts):
        self.clock, self.step_s = clock, step_s
        self.acts = {int(length.removeprefix("of_")): act for length, act in acts.items()}
        self.tries, self.num_left, self.is_gone = [], 0, False
        self._now = None

    async def num_requests(self):
        self.clock.now += self.step_s
        if self.is_gone:
            raise ServerError("gone")
        if self._now == "silent":
            await asyncio.Event().wait()
        return {None: 0, "disturbed": 2}.get(self._now, 1)

    async def compute(self, token_ids):
        self.tries.append((len(token_ids), self.clock.now))
        self._now = act = self.acts.get(len(token_ids), "done")
        try:
            if act == "fails":
                raise ServerError("out of order")
            if act != "done":
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_left += 1
            raise ServerError("broken off") from None
        finally:
            self._now = None

    def lengths(self):
        return [length for length, _ in self.tries]


class World:
    def __init__(self, *lengths, step_s=POLL_S, **acts):
        """The last text is the hottest."""
        self.clock = Clock()
        self.texts = Texts(clock=self.clock)
        self.server = FakeServer(self.clock, step_s, **acts)
        catalogue = DonorCatalogue(4_000)
        catalogue.watch(DonorAnnouncer(lambda event: self.texts.apply("engine", [event]), MODEL))
        for length in lengths:
            self.clock.now += 1
            catalogue.add(MODEL, np.arange(length, dtype=np.int32) + 1000 * length, None, generation=1)

    def healer(self, *, once=True, idle_s=0.0, **options):
        settings = HealSettings(idle_s=idle_s, poll_s=POLL_S, quiet_s=0.0, once=once, tokens_per_minute=float("inf"))
        return Healer(self.server, self.texts, settings, clock=self.clock, **options)

    def heal_once(self, **options):
        healer = self.healer(**options)
        asyncio.run(asyncio.wait_for(healer.run(asyncio.Event()), WAIT_S))
        return healer

    def heal_until(self, condition, **options):
        healer = self.healer(once=False, **options)

        async def scenario():
            closing = asyncio.Event()
            task = asyncio.create_task(healer.run(closing))
            async with asyncio.timeout(WAIT_S):
                while not condition(healer):
                    await asyncio.sleep(0)
            closing.set()
            await asyncio.wait_for(task, WAIT_S)

        asyncio.run(scenario())
        return healer


def test_a_text_that_always_fails_is_given_up_and_others_have_their_turn(caplog):
    world = World(40, 50, of_50="fails")
    healer = world.heal_once()
    assert world.server.lengths() == [50, 40, 50, 50]
    first, _, second, third = [at for _, at in world.server.tries]
    assert second - first >= REST_S
    assert third - second >= 2 * REST_S
    assert (healer.counts.texts, healer.counts.failed) == (1, 1)
    assert healer.has_given_up
    assert "a text of 50 tokens is given up: out of order" in caplog.text
    assert "healed_texts=1 healed_tokens=40 interrupted=0 refused=0 failed=1 open=0" in healer.line()


def test_a_text_that_never_fits_between_others_does_not_starve_short_ones():
    world = World(40, 50, of_50="disturbed")
    healer = world.heal_until(lambda healer: healer.counts.interrupted >= 3)
    assert world.server.lengths()[:2] == [50, 40]
    tries = [at for length, at in world.server.tries if length == 50]
    assert tries[1] - tries[0] >= REST_S
    assert tries[2] - tries[1] >= 2 * REST_S
    assert healer.counts.texts == 1
    assert healer.counts.failed == 0


def test_once_ends_though_somebody_always_comes():
    world = World(40, 50, step_s=REST_S, of_50="disturbed")
    healer = world.heal_once()
    assert (healer.counts.texts, healer.counts.interrupted, healer.counts.failed) == (1, 10, 1)
    assert healer.has_given_up


def test_once_ends_though_the_server_is_gone(caplog):
    world = World(40, step_s=1.0)
    world.server.is_gone = True
    healer = world.heal_once()
    assert not world.server.tries
    assert healer.has_given_up
    assert "http://server is given up: it has not answered for 30 s" in caplog.text


def test_once_is_well_when_everything_is_healed():
    assert not World(40, 50).heal_once().has_given_up


@pytest.mark.parametrize("draw", [0.0, 1.0])
def test_two_processes_do_not_come_back_at_once_behind_an_interruption(draw):
    world = World(40, step_s=0.02, of_40="disturbed")
    world.heal_until(lambda _: len(world.server.tries) >= 2, idle_s=1.0, draw=lambda: draw)
    first, second = [at for _, at in world.server.tries[:2]]
    assert 1.0 + draw / 2 <= second - first < 1.2 + draw / 2


def test_a_prompt_that_is_never_answered_is_left_and_has_failed(caplog):
    world = World(40, step_s=7.0, of_40="hangs")
    healer = world.heal_once()
    assert world.server.num_left == 3
    assert healer.counts.failed == 1
    assert "has not answered a prompt for 60 s" in caplog.text


def test_a_long_prompt_may_take_longer():
    world = World(1_000, step_s=7.0, of_1000="hangs")
    world.heal_until(lambda _: len(world.server.tries) >= 2)
    assert world.server.tries[1][1] - world.server.tries[0][1] >= 100


def test_a_server_that_does_not_say_in_time_how_busy_it_is_is_left(monkeypatch, caplog):
    monkeypatch.setattr("kvgraft.heal.healer._LOOK_S", 0.02)
    world = World(40, of_40="silent")
    healer = world.heal_until(lambda healer: healer.counts.interrupted >= 1)
    assert world.server.num_left >= 1
    assert "does not say any more how many requests run" in caplog.text
    assert healer.counts.failed == 0


def test_what_a_prompt_ends_with_that_was_left_is_of_no_interest():
    world, told = World(40, of_40="disturbed"), []
    healer = world.healer(once=False)

    async def scenario():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        closing = asyncio.Event()
        task = asyncio.create_task(healer.run(closing))
        async with asyncio.timeout(WAIT_S):
            while not world.server.num_left:
                await asyncio.sleep(0)
        closing.set()
        await task
        del task
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(scenario())
    assert not told
