"""Load servers over HTTP, every side from the same state, one load after the other; sides are reuse modes, or servers."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvgraft.bench.arrivals import Load, arrival_times
from kvgraft.bench.client import GONE, CompletionsClient, completion_body, now
from kvgraft.bench.load import LoadResult, run_closed_loop, run_open_loop
from kvgraft.bench.rates import RateSearch, default_slo_ms
from kvgraft.bench.server_process import ServerProcess
from kvgraft.bench.summary import summarise
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from kvgraft.bench.client import TimedRequest
    from kvgraft.bench.serve_workload import ServeWorkload
    from kvgraft.bench.summary import RunSummary

    Run = Callable[[str, float], RunSummary]

_WARM_UP_CLIENTS = 4
CLOSED_LOOP_REQUESTS = 200
"""Requests of a closed loop where nothing else is asked for; their time is not known before."""


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Requests of a run.

    Attributes:
        duration_s: Seconds of arrivals per run, where `requests` is None.
        requests: Requests per run, or None.
        max_tokens: Output tokens of every request; the end-of-text token does not end it.
        warmup: Requests that are sent before measuring, so that the cache holds what it would in steady operation.
        seed: Of the arrivals where the pack has none.
        give_up_s: A run ends when a request has waited that long for its first token.
    """

    duration_s: float
    requests: int | None
    max_tokens: int
    warmup: int
    seed: int
    give_up_s: float


@dataclass(frozen=True, slots=True)
class LoadedServer:
    """Where a run sends its requests, and the salt that keeps its cache apart, if any."""

    url: str
    cache_salt: str | None = None
    api_key: str | None = None


class Target(Protocol):
    """Gives every run a server that knows nothing yet."""

    description: str

    def fresh(self) -> AbstractContextManager[LoadedServer]:
        """Open a fresh state for one run."""


class OwnServer:
    """Starts a server process per run, all with the same arguments of `kvgraft serve`."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = tuple(arguments)
        self.description = "a fresh server process per run: kvgraft serve " + " ".join(arguments)

    @contextmanager
    def fresh(self) -> Iterator[LoadedServer]:
        """Start the process and end it afterwards."""
        with ServerProcess(self._arguments) as server:
            yield LoadedServer(server.url)


class GivenServer:
    """A server that is running already; every run has a cache salt of its own, the pool is as earlier runs left it."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url if "://" in url else f"http://{url}"
        self._api_key = api_key
        self.description = f"{self._url}, a fresh cache_salt per run"

    @contextmanager
    def fresh(self) -> Iterator[LoadedServer]:
        """Draw a salt."""
        yield LoadedServer(self._url, f"bench-{uuid.uuid4().hex}", self._api_key)


@dataclass(frozen=True, slots=True)
class Side:
    """One of those that are compared: a server as it was set up, or a reuse mode that it is asked for."""

    target: Target
    reuse: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """Greedy answers of a side beside those of the first one.

    Attributes:
        num_equal: Answers of the same text.
        num_asked: Answers that both have given.
        failure: Why there are fewer than were asked for, or None.
    """

    num_equal: int
    num_asked: int
    failure: str | None = None


class LoadTest:
    """Runs one side under one load at a time.

    Args:
        workload: Prompts; the first ones warm up, the next ones are measured.
        settings: What is sent.
        sides: What is compared, by name.
        fit: Leaves out prompts that are too long, given what `/v1/models` says of the model.

    Attributes:
        rows: Figures of single requests of all runs.
        server: What `/v1/models` said of the model.
    """

    def __init__(
        self,
        workload: ServeWorkload,
        settings: LoadSettings,
        sides: Mapping[str, Side],
        fit: Callable[[ServeWorkload, dict[str, Any]], ServeWorkload] = lambda workload, _: workload,
    ) -> None:
        self.workload = workload
        self.settings = settings
        self.rows: list[dict[str, object]] = []
        self.server: dict[str, Any] = {}
        self.sides = dict(sides)
        self._fit = fit
        self.num_requests(Load(rate=1.0))

    def num_requests(self, load: Load) -> int:
        """Return the requests that a run measures: those of the settings, as far as the workload has prompts."""
        of_load = CLOSED_LOOP_REQUESTS if load.clients else round(self.settings.duration_s * load.rate)
        wanted = self.settings.requests or max(1, of_load)
        available = len(self.workload.prompts) - self.settings.warmup
        if available < 1:
            raise ConfigError(
                f"{self.workload.name} has {len(self.workload.prompts)} prompts that fit, --warmup takes "
                f"{self.settings.warmup}; lower it or take a larger pack"
            )
        return min(wanted, available)

    def run(self, name: str, load: Load, advance: Callable[[], object] = lambda: None) -> RunSummary:
        """Measure a side under a load; `advance` is called per measured request.

        Raises:
            ConfigError: The server does not start, cannot be reached or serves no model.
        """
        with self.sides[name].target.fresh() as access:
            return asyncio.run(self._measure(access, name, load, advance))

    def answers(self, name: str, count: int) -> list[str | None]:
        """Return the texts of `count` greedy answers of a side after its warm-up, None for one that failed.

        Raises:
            ConfigError: As `run`.
        """
        with self.sides[name].target.fresh() as access:
            return asyncio.run(self._answers(access, name, count))

    async def _answers(self, access: LoadedServer, name: str, count: int) -> list[str | None]:
        async with CompletionsClient(access.url, access.api_key) as client:
            model = await self._ask_for_model(client)
            warmup = self.settings.warmup
            await self._warm_up(client, self._bodies(access, name, model, 0, warmup))
            bodies = self._bodies(access, name, model, warmup, warmup + count)
            return [await client.text(body) for body in bodies]

    async def _measure(self, access: LoadedServer, name: str, load: Load, advance: Callable[[], object]) -> RunSummary:
        async with CompletionsClient(access.url, access.api_key) as client:
            model = await self._ask_for_model(client)
            warmup, count = self.settings.warmup, self.num_requests(load)
            warm = await self._warm_up(client, self._bodies(access, name, model, 0, warmup))
            bodies = self._bodies(access, name, model, warmup, warmup + count)
            result, arrival_s = await self._under(load, client, bodies, advance)
        self.rows += [{"mode": name, "load": str(load)} | asdict(exchange) for exchange in result.exchanges]
        return summarise(name, load, result, arrival_s, warm)

    def _bodies(self, access: LoadedServer, name: str, model: str, start: int, stop: int) -> list[bytes]:
        return [
            completion_body(
                prompt,
                model=model,
                max_tokens=self.settings.max_tokens,
                reuse=self.sides[name].reuse,
                cache_salt=access.cache_salt,
            )
            for prompt in self.workload.prompts[start:stop]
        ]

    @staticmethod
    async def _warm_up(client: CompletionsClient, bodies: Sequence[bytes]) -> list[TimedRequest]:
        warm = await run_closed_loop(client.stream, bodies, _WARM_UP_CLIENTS)
        gone = next((exchange.failure for exchange in warm if exchange.failure in GONE), None)
        if gone is not None:
            raise ConfigError(f"the server stopped answering in the warm-up ({gone}); see its log, or start it by hand")
        return warm

    async def _under(
        self, load: Load, client: CompletionsClient, bodies: Sequence[bytes], advance: Callable[[], object]
    ) -> tuple[LoadResult, float]:
        """Send `bodies`; returns the result, and the seconds in which they came."""
        if load.clients:
            started = now()
            exchanges = await run_closed_loop(client.stream, bodies, load.clients, advance)
            seconds = now() - started
            return LoadResult(tuple(exchanges), len(bodies), seconds, None), seconds
        settings, times = self.settings, self.workload.times
        recorded = None if times is None else times[settings.warmup :]
        arrivals = arrival_times(recorded, len(bodies), load.rate, settings.seed).tolist()
        result = await run_open_loop(client.stream, bodies, arrivals, give_up_s=settings.give_up_s, advance=advance)
        return result, arrivals[-1]

    async def _ask_for_model(self, client: CompletionsClient) -> str:
        """Learn the model's name and longest sequence, and leave out what does not fit."""
        models = (await client.get_json("/v1/models")).get("data")
        if not models or "id" not in models[0]:
            raise ConfigError(
                "the server lists no model under /v1/models; give the address of an OpenAI-compatible server"
            )
        if not self.server:
            self.server = dict(models[0])
            self.workload = self._fit(self.workload, self.server)
        return str(models[0]["id"])


def check_answers(test: LoadTest, count: int) -> dict[str, AnswerCheck]:
    """Ask every side the same `count` prompts, and compare its greedy answers with those of the first side."""
    answers = {name: test.answers(name, count) for name in test.sides}
    first, *others = answers
    return {name: _compared(answers[first], answers[name]) for name in others}


def _compared(expected: Sequence[str | None], given: Sequence[str | None]) -> AnswerCheck:
    both = [(a, b) for a, b in zip(expected, given, strict=True) if a is not None and b is not None]
    missing = len(expected) - len(both)
    return AnswerCheck(sum(a == b for a, b in both), len(both), f"{missing} were not answered" if missing else None)


def measure_loads(
    run: Callable[[str, Load], RunSummary], sides: Sequence[str], loads: Sequence[Load]
) -> list[RunSummary]:
    """Run every side under a load before the next higher one; a side that was given up is not run under higher ones."""
    runs: list[RunSummary] = []
    lost: set[str] = set()
    for load in sorted(set(loads), key=lambda each: (each.clients, each.rate)):
        for side in sides:
            if side not in lost:
                runs.append(run(side, load))
                if runs[-1].gave_up is not None:
                    lost.add(side)
    return runs


def search_rates(
    run: Run, modes: Sequence[str], first: float, slo_ttft_ms: float | None, max_runs: int
) -> tuple[list[RunSummary], float | None]:
    """Look for every mode's highest sustained rate from `first` on, in at most `max_runs` runs each, modes taking turns.

    Without a limit, `off` goes first: its p95 at the highest rate at which it is stable becomes the limit of the others.

    Returns:
        Runs in order, and the limit of time to first token, None if `off` was never stable.

    Raises:
        ConfigError: There is no limit and `off` is not among the modes.
    """
    runs: list[RunSummary] = []
    if slo_ttft_ms is None:
        if "off" not in modes:
            raise ConfigError("without the mode off there is nothing to take the limit from; give --slo-ttft-ms")
        runs += _take_turns(run, ["off"], first, max_runs, lambda summary: summary.stable)
        slo_ttft_ms = default_slo_ms(runs)
        modes = [mode for mode in modes if mode != "off"]
        if slo_ttft_ms is None:
            return runs, None
    limit = slo_ttft_ms
    runs += _take_turns(run, modes, first, max_runs, lambda summary: summary.sustains(limit))
    return runs, limit


def _take_turns(
    run: Run, modes: Sequence[str], first: float, max_runs: int, is_good: Callable[[RunSummary], bool]
) -> list[RunSummary]:
    runs = []
    searches = {mode: RateSearch(first, max_runs) for mode in modes}
    while any(search.next_rate is not None for search in searches.values()):
        for mode, search in searches.items():
            rate = search.next_rate
            if rate is not None:
                runs.append(run(mode, rate))
                search.record(sustained=is_good(runs[-1]))
    return runs
