"""Load a server over HTTP at several rates, every reuse mode from the same state, one rate after the other."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvgraft.bench.arrivals import arrival_times
from kvgraft.bench.client import GONE, CompletionsClient, completion_body
from kvgraft.bench.load import run_closed_loop, run_open_loop
from kvgraft.bench.rates import RateSearch, default_slo_ms
from kvgraft.bench.server_process import ServerProcess
from kvgraft.bench.summary import summarise
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from kvgraft.bench.serve_workload import ServeWorkload
    from kvgraft.bench.summary import RunSummary

    Run = Callable[[str, float], RunSummary]

_WARM_UP_CLIENTS = 4


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


class LoadTest:
    """Runs one mode at one rate at a time.

    Args:
        workload: Prompts; the first ones warm up, the next ones are measured.
        settings: What is sent.
        target: Gives the server.
        fit: Leaves out prompts that are too long, given what `/v1/models` says of the model.

    Attributes:
        rows: Figures of single requests of all runs.
        server: What `/v1/models` said of the model.
    """

    def __init__(
        self,
        workload: ServeWorkload,
        settings: LoadSettings,
        target: Target,
        fit: Callable[[ServeWorkload, dict[str, Any]], ServeWorkload] = lambda workload, _: workload,
    ) -> None:
        self.workload = workload
        self.settings = settings
        self.rows: list[dict[str, object]] = []
        self.server: dict[str, Any] = {}
        self._target = target
        self._fit = fit
        self.num_requests(1.0)

    def num_requests(self, rate: float) -> int:
        """Return the requests that a run at `rate` measures: those of the settings, as far as the workload has prompts."""
        wanted = self.settings.requests or max(1, round(self.settings.duration_s * rate))
        available = len(self.workload.prompts) - self.settings.warmup
        if available < 1:
            raise ConfigError(
                f"{self.workload.name} has {len(self.workload.prompts)} prompts that fit, --warmup takes "
                f"{self.settings.warmup}; lower it or take a larger pack"
            )
        return min(wanted, available)

    def run(self, mode: str, rate: float, advance: Callable[[], object] = lambda: None) -> RunSummary:
        """Measure a mode at a rate; `advance` is called per measured request.

        Raises:
            ConfigError: The server does not start, cannot be reached or serves no model.
        """
        with self._target.fresh() as access:
            return asyncio.run(self._measure(access, mode, rate, advance))

    async def _measure(self, access: LoadedServer, mode: str, rate: float, advance: Callable[[], object]) -> RunSummary:
        async with CompletionsClient(access.url, access.api_key) as client:
            model = await self._ask_for_model(client)
            warmup, count = self.settings.warmup, self.num_requests(rate)
            bodies = [
                completion_body(
                    prompt, model=model, max_tokens=self.settings.max_tokens, reuse=mode, cache_salt=access.cache_salt
                )
                for prompt in self.workload.prompts[: warmup + count]
            ]
            recorded = None if self.workload.times is None else self.workload.times[warmup:]
            arrivals = arrival_times(recorded, count, rate, self.settings.seed).tolist()
            warm = await run_closed_loop(client.stream, bodies[:warmup], _WARM_UP_CLIENTS)
            gone = next((exchange.failure for exchange in warm if exchange.failure in GONE), None)
            if gone is not None:
                raise ConfigError(
                    f"the server stopped answering in the warm-up ({gone}); see its log, or start it by hand"
                )
            result = await run_open_loop(
                client.stream, bodies[warmup:], arrivals, give_up_s=self.settings.give_up_s, advance=advance
            )
        self.rows += [{"mode": mode, "rate": rate} | asdict(exchange) for exchange in result.exchanges]
        return summarise(mode, rate, result, arrivals[-1], warm)

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


def measure_rates(run: Run, modes: Sequence[str], rates: Sequence[float]) -> list[RunSummary]:
    """Run every mode at a rate before the next higher rate; a mode that was given up is not run at higher ones."""
    runs: list[RunSummary] = []
    lost: set[str] = set()
    for rate in sorted(set(rates)):
        for mode in modes:
            if mode not in lost:
                runs.append(run(mode, rate))
                if runs[-1].gave_up is not None:
                    lost.add(mode)
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
