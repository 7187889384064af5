"""Table `engines` of the benchmark suite: kvgraft beside the exact prefix caches of three engines, on one model.

    python benchmarks/engines/make_smollm2.py runs/smollm2
    python benchmarks/record.py suite-engines -- python benchmarks/engines/suite_engines.py --journal runs/suite-engines.jsonl

Three engines (`kvgraft serve`, stock vLLM and SGLang on this machine's CPU), each in three variants: `off` reuses nothing,
`exact` is the engine as it comes, `kvgraft` is the same with kvgraft's default settings (`suite_servers.py`). The three
servers of an engine run at once; all but the one that is asked are held still. Prompts go to them in turn, as token ids:

    documents     requests of the pack in its order, after `--warmup` of them: documents that were read behind others before
    new text      the control: the same prompts with their tokens shuffled, of which nobody has anything

Then `documents` again, as an open loop: requests arrive at a rate, whatever became of earlier ones, and the highest rate is
looked for at which 95 % have their first token in time: within `--limit-factor` times the p95 of `off` one by one, the same
for every variant of an engine. Answers have two tokens, so that a repair after the first one is not in its time. Needs
the environments of `make test-vllm` and `make test-sglang`; an engine that does not start is a row with the reason. With
`--journal` an interrupted run goes on: what caches knew is read again without being timed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from suite_servers import ENGINES, VARIANTS, Engine, EngineServer, Reply, Site
from tokenizers import Tokenizer
from vllm_server import MODEL_NAME, Json, ServerError, package_versions, reason
from vllm_ttft import names_of, say

from kvgraft.bench.arrivals import Load, arrival_times
from kvgraft.bench.client import CompletionsClient, completion_body
from kvgraft.bench.journal import Journal
from kvgraft.bench.load import run_open_loop
from kvgraft.bench.rates import sustained_rates
from kvgraft.bench.serve import search_rates
from kvgraft.bench.serve_workload import BUILTIN_RAG, load_workload
from kvgraft.bench.server_process import end_on_sigterm
from kvgraft.bench.summary import RunSummary, summarise

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Prompt = list[int]

DOCUMENTS, CONTROL, LOAD = "documents", "new text", "load"
KEY = ("engine", "variant", "workload", "index")
"""Of the journal."""

_RESAMPLES = 2000
_HIT_TOKENS = 16
"""The shortest run that kvgraft reuses by default; shuffled prompts share their first token by chance."""
_AFTER_S = 0.2
"""What a server does behind an answer, publishing what it has read say, is not part of the next one."""
_BEFORE_S = 0.05
"""Until processes that were held still run again."""
_FIRST_LOAD = 0.5
"""Of what `off` could answer one by one."""
_GIVE_UP_S = 90.0
"""A run at a rate ends when a request has waited that long for its first token."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured; part of the record.

    Attributes:
        pack: Where prompts come from.
        min_prompt: Shortest prompt in tokens.
        max_prompt: Longest prompt in tokens.
        warmup: Prompts that are not timed.
        requests: Timed prompts.
        control: Prompts of new text.
        load_requests: Requests of a run at one rate.
        load_runs: Rates that are tried per variant; 0 leaves throughput out.
        load_variants: Variants whose throughput is looked for.
        answer_tokens: Tokens of an answer in the open loop.
        limit_factor: Of the p95 of `off`.
        threads: That engines compute on.
        seed: Of everything that is drawn.
    """

    pack: str
    min_prompt: int
    max_prompt: int
    warmup: int
    requests: int
    control: int
    load_requests: int
    load_runs: int
    load_variants: tuple[str, ...]
    answer_tokens: int
    limit_factor: float
    threads: int
    seed: int

    @property
    def num_prompts(self) -> int:
        """Prompts that a run takes."""
        return self.warmup + self.requests + self.load_runs * self.load_requests


class Server(Protocol):
    """One variant of an engine."""

    url: str

    def ask(self, token_ids: Sequence[int]) -> Reply:
        """Ask for an answer and time its first token."""
        ...

    def pause(self) -> None:
        """Hold it still."""
        ...

    def resume(self) -> None:
        """Let it go on."""
        ...


class EngineRun:
    """Measures one engine; what the journal has is not measured again.

    Args:
        name: Of the engine.
        servers: By variant, all held still.
        prompts: As many as the settings take.
        settings: What is measured.
        journal: Keeps every request and every run at a rate.
    """

    def __init__(
        self,
        name: str,
        servers: Mapping[str, Server],
        prompts: Sequence[Prompt],
        settings: Settings,
        journal: Journal,
    ) -> None:
        self._name = name
        self._servers = servers
        self._prompts = prompts
        self._settings = settings
        self._journal = journal

    def measure(self) -> None:
        """Measure what the journal lacks."""
        settings = self._settings
        first = settings.warmup + settings.requests
        for index, prompt in enumerate(self._prompts[:first]):
            self._ask_all(DOCUMENTS, index, prompt)
            say(f"{self._name}: {index + 1} of {first} prompts")
        rng = random.Random(settings.seed)
        for index, prompt in enumerate(self._prompts[:first][-settings.control :] if settings.control else ()):
            self._ask_all(CONTROL, index, rng.sample(prompt, len(prompt)))
        if settings.load_runs:
            self._load()

    def _ask_all(self, workload: str, index: int, prompt: Prompt) -> None:
        """Ask every variant, another one first each time."""
        start = index % len(VARIANTS)
        for variant in VARIANTS[start:] + VARIANTS[:start]:
            with self._running(variant) as server:
                reply = server.ask(prompt)
            key = (self._name, variant, workload, index)
            if key not in self._journal:
                self._journal.add(dict(zip(KEY, key, strict=True)) | asdict(reply))

    def _load(self) -> None:
        times = [reply["seconds"] for reply in replies(self._journal, self._settings, self._name, "off", DOCUMENTS)]
        tried: dict[str, int] = {}

        def run(variant: str, rate: float) -> RunSummary:
            number = tried[variant] = tried.get(variant, -1) + 1
            key = (self._name, variant, LOAD, number)
            if key not in self._journal:
                with self._running(variant) as server:
                    figures = asdict(asyncio.run(self._at_rate(server.url, variant, rate, number)))
                self._journal.add(dict(zip(KEY, key, strict=True)) | {"summary": figures})
            found = self._journal.get(*key)
            assert found is not None
            summary = RunSummary(**found["summary"])
            say(f"{self._name} {variant}: {rate:.2f} requests/s, p95 {summary.ttft_ms.get('p95', 0):.0f} ms")
            return summary

        first = _FIRST_LOAD / statistics.mean(times)
        search_rates(
            run, self._settings.load_variants, first, limit_ms(times, self._settings), self._settings.load_runs
        )

    async def _at_rate(self, url: str, variant: str, rate: float, number: int) -> RunSummary:
        """Send the `number`-th group of prompts, which no run of this variant has sent before."""
        settings = self._settings
        first = settings.warmup + settings.requests + number * settings.load_requests
        bodies = [
            completion_body(prompt, model=MODEL_NAME, max_tokens=settings.answer_tokens)
            for prompt in self._prompts[first : first + settings.load_requests]
        ]
        arrivals = arrival_times(None, len(bodies), rate, settings.seed).tolist()
        async with CompletionsClient(url) as client:
            result = await run_open_loop(client.stream, bodies, arrivals, give_up_s=_GIVE_UP_S)
        return summarise(variant, Load(rate=rate), result, arrivals[-1])

    @contextmanager
    def _running(self, variant: str) -> Iterator[Server]:
        server = self._servers[variant]
        server.resume()
        time.sleep(_BEFORE_S)
        try:
            yield server
            time.sleep(_AFTER_S)
        finally:
            server.pause()


def replies(journal: Journal, settings: Settings, engine: str, variant: str, workload: str) -> list[Json]:
    """Timed requests in order; of `documents` those behind the warm-up."""
    first = settings.warmup if workload == DOCUMENTS else 0
    count = settings.requests if workload == DOCUMENTS else settings.control
    found = (journal.get(engine, variant, workload, index) for index in range(first, first + count))
    return [record for record in found if record is not None]


def limit_ms(off_seconds: Sequence[float], settings: Settings) -> float:
    """Time in which 95 % of requests must have their first token."""
    return settings.limit_factor * 1e3 * float(np.percentile(off_seconds, 95))


def rows_of(journal: Journal, settings: Settings, engine: str) -> list[Json]:
    """A row per workload and variant."""
    rows = []
    for workload in (DOCUMENTS, CONTROL):
        by_variant = {variant: replies(journal, settings, engine, variant, workload) for variant in VARIANTS}
        if not all(by_variant.values()):
            continue
        rates = load_columns(journal, settings, engine, by_variant["off"]) if workload == DOCUMENTS else {}
        for variant, found in by_variant.items():
            row = {"engine": engine, "workload": workload, "variant": variant}
            rows.append(row | times_columns(found, by_variant["off"], settings.seed) | rates.get(variant, {}))
    return rows


def times_columns(found: Sequence[Json], off: Sequence[Json], seed: int) -> Json:
    """Figures of one variant beside those of `off` for the same prompts."""
    seconds, base = (np.array([record["seconds"] for record in records]) for records in (found, off))
    ratios = base / seconds
    drawn = np.random.default_rng(seed).choice(ratios, (_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    prompt_tokens = sum(record["prompt_tokens"] for record in found)
    return {
        "requests": len(found),
        "prompt_tokens": int(statistics.median(record["prompt_tokens"] for record in found)),
        "reused_share": sum(record["reused_tokens"] for record in found) / prompt_tokens,
        "hit_share": statistics.mean(record["reused_tokens"] >= _HIT_TOKENS for record in found),
        "ttft_ms": 1e3 * float(np.median(seconds)),
        "ttft_p95_ms": 1e3 * float(np.percentile(seconds, 95)),
        "ttft_ratio": float(np.median(ratios)),
        "ttft_ratio_low": float(low),
        "ttft_ratio_high": float(high),
        "same_first_token_share": statistics.mean(a["first"] == b["first"] for a, b in zip(found, off, strict=True)),
    }


def load_columns(journal: Journal, settings: Settings, engine: str, off: Sequence[Json]) -> dict[str, Json]:
    """Highest sustained rate by variant, as far as it was looked for."""
    runs = []
    for variant in settings.load_variants:
        runs += [RunSummary(**record["summary"]) for record in journal.under(engine, variant, LOAD)]
    limit = limit_ms([record["seconds"] for record in off], settings)
    return {
        found.mode: {
            "limit_ms": limit,
            "requests_per_s": found.rate,
            "p95_at_rate_ms": found.p95_ttft_ms,
            "rate_ratio": found.ratio,
        }
        for found in sustained_rates(runs, limit)
    }


@contextmanager
def servers_of(engine: Engine, site: Site, port: int) -> Iterator[dict[str, EngineServer]]:
    """Start every variant, each held still while the next one starts."""
    with ExitStack() as stack:
        servers = {}
        for number, variant in enumerate(VARIANTS):
            say(f"{engine.name} {variant}: starting")
            servers[variant] = stack.enter_context(EngineServer(engine, variant, site, port + 20 * number))
            servers[variant].pause()
        yield servers


def is_complete(journal: Journal, settings: Settings, engine: str) -> bool:
    """Whether the journal has all requests of an engine and, where rates are looked for, the runs of the last variant."""
    documents, control = (replies(journal, settings, engine, VARIANTS[-1], kind) for kind in (DOCUMENTS, CONTROL))
    runs = [
        journal.get(engine, variant, LOAD, settings.load_runs - 1)
        for variant in settings.load_variants
        if settings.load_runs
    ]
    return len(documents) == settings.requests and len(control) == settings.control and None not in runs


def read_prompts(settings: Settings, tokenizer: Tokenizer) -> list[Prompt]:
    """Token ids of the pack's requests of the lengths that are measured, in order."""
    workload = load_workload(settings.pack, settings.num_prompts, settings.seed)
    prompts = [tokenizer.encode(text).ids for text in workload.prompts]
    fitting = [ids for ids in prompts if settings.min_prompt <= len(ids) <= settings.max_prompt]
    if len(fitting) < settings.num_prompts:
        raise SystemExit(
            f"{settings.pack} has {len(fitting)} prompts of {settings.min_prompt} to {settings.max_prompt} tokens, "
            f"{settings.num_prompts} are asked for; lower --requests, --load-runs or --load-requests, or raise --max-prompt"
        )
    return fitting[: settings.num_prompts]


def parsed_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2"), help="folder that make_smollm2.py wrote")
    parser.add_argument("--engines", type=names_of(ENGINES), default=tuple(ENGINES), help="with commas")
    parser.add_argument("--pack", default=BUILTIN_RAG, help="request pack, as for kvgraft bench serve")
    parser.add_argument("--min-prompt", type=int, default=0, help="shortest prompt in tokens")
    parser.add_argument("--max-prompt", type=int, default=1200, help="longest prompt in tokens")
    parser.add_argument("--warmup", type=int, default=8, help="prompts that are not timed")
    parser.add_argument("--requests", type=int, default=24, help="timed prompts")
    parser.add_argument("--control", type=int, default=5, help="prompts of new text")
    parser.add_argument("--load-requests", type=int, default=16, help="requests of a run at one rate")
    parser.add_argument("--load-runs", type=int, default=3, help="rates that are tried per variant; 0: none")
    parser.add_argument("--load-variants", type=names_of(dict.fromkeys(VARIANTS)), default=("off", "kvgraft"))
    parser.add_argument("--answer-tokens", type=int, default=4, help="per answer of the open loop")
    parser.add_argument("--limit-factor", type=float, default=3.0, help="of the p95 of off, one by one")
    parser.add_argument("--threads", type=int, default=2, help="that engines compute on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=31_400)
    parser.add_argument("--journal", type=Path, help="file from which an interrupted run goes on")
    return parser.parse_args()


def main() -> int:
    """Measure all engines; one that fails is part of the result and does not end the others."""
    end_on_sigterm()
    args = parsed_arguments()
    settings = Settings(**{name: getattr(args, name) for name in Settings.__slots__})
    prompts = read_prompts(settings, Tokenizer.from_file(str(args.model / "tokenizer.json")))
    journal = Journal(args.journal, {"table": "engines", **asdict(settings)}, KEY)
    rows: list[Json] = []
    versions: Json = {}
    with tempfile.TemporaryDirectory(prefix="kvgraft-suite-") as folder:
        site = Site(args.model.resolve(), args.threads, args.max_prompt + 256, Path(folder))
        for number, name in enumerate(args.engines):
            engine = ENGINES[name]
            try:
                versions[name] = package_versions(Path(site.python(engine.venv)).parents[1], engine.packages)
                if not is_complete(journal, settings, name):
                    with servers_of(engine, site, args.port + number) as servers:
                        EngineRun(name, servers, prompts, settings, journal).measure()
            except ServerError as error:
                rows.append({"engine": name, "workload": DOCUMENTS, "variant": "-", "failure": reason(error)})
                say(f"{name} failed: {error}")
            rows += rows_of(journal, settings, name)
    title = "Engines: off, with their own exact prefix cache, and with kvgraft"
    facts = {**asdict(settings), "pack": Path(settings.pack).name, "model": args.model.name, "engines": versions}
    print(json.dumps({"table": "engines", "title": title, "settings": facts, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
