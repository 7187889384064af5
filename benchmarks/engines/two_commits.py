"""Time to first token of two checkouts of kvgraft, embedded or inside the same engine, in turns.

    git worktree add ../before REVISION
    .venv/bin/python benchmarks/engines/two_commits.py vllm --before ../before --venv .venv-vllm
    .venv-sglang/bin/python benchmarks/engines/two_commits.py sglang --before ../before
    .venv/bin/python benchmarks/engines/two_commits.py embedded --before ../before --model smollm2-135m

Two servers, or engines, run at the same time, each with the sources of one checkout, and answer the same prompts one after
the other, each first in every second round, so that the noise of the machine hits both alike.
A round has a new document, read
after one head; then it is asked for after another head (`moved`), the same prompt again (`again`), and a prompt of which
nothing is known (`unknown`). Per kind and length: both medians, and the median of the rounds' ratios after / before with a
bootstrapped 95 % interval. JSON goes to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ttft import INSTRUCTION_TOKENS, connector_of, ensure_model, lengths, moved_document, say, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Ask = Callable[[list[int]], tuple[float, int]]
    """Sends a prompt for one token; returns milliseconds and the tokens that were reused by the engine's count."""

SIDES = ("before", "after")
_VLLM_PORTS = {"before": 31_700, "after": 31_710}
_SPIN_SECONDS = 0.3
"""Time in which an engine that has answered stores what it keeps and its threads come to rest."""
_RESAMPLES = 2_000


def measure(sides: dict[str, Ask], prompt_tokens: int, rounds: int, rng: random.Random) -> list[dict[str, object]]:
    """Return a row per kind of prompt; the first round is not counted."""
    times: dict[str, dict[str, list[float]]] = {}
    cached: dict[str, dict[str, int]] = {}
    for number in range(rounds + 1):
        prompts = moved_document(rng, prompt_tokens)
        unknown = text(rng, prompt_tokens)
        order = SIDES if number % 2 else SIDES[::-1]
        for kind, prompt in (
            ("donor", prompts.donor),
            ("moved", prompts.target),
            ("again", prompts.target),
            ("unknown", unknown),
        ):
            for side in order:
                elapsed, count = sides[side](prompt)
                if number:
                    times.setdefault(kind, {}).setdefault(side, []).append(elapsed)
                    cached.setdefault(kind, {})[side] = count
        say(f"{prompt_tokens} tokens, round {number} of {rounds}")
    return [row(prompt_tokens, kind, times[kind], cached[kind], rng) for kind in times if kind != "donor"]


def row(
    prompt_tokens: int, kind: str, times: dict[str, list[float]], cached: dict[str, int], rng: random.Random
) -> dict[str, object]:
    """Summarise the rounds of one kind of prompt."""
    ratios = [after / before for before, after in zip(times["before"], times["after"], strict=True)]
    drawn = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    interval = [drawn[int(share * _RESAMPLES)] for share in (0.025, 0.975)]
    return {
        "prompt_tokens": prompt_tokens,
        "kind": kind,
        **{f"{side}_ms": round(statistics.median(times[side]), 2) for side in SIDES},
        **{f"{side}_cached_tokens": cached[side] for side in SIDES},
        "ratio": round(statistics.median(ratios), 4),
        "ratio_ci": [round(value, 4) for value in interval],
        "rounds": len(ratios),
    }


@contextmanager
def vllm_sides(trees: dict[str, Path], args: argparse.Namespace) -> Iterator[dict[str, Ask]]:
    """Start two vLLM servers."""
    from vllm_server import ServerSettings, VLLMServer

    model = ensure_model(args.model)

    def asker(server: VLLMServer, other: VLLMServer) -> Ask:
        def ask(prompt: list[int]) -> tuple[float, int]:
            with other.paused():
                answer = server.stream(prompt)
                time.sleep(_SPIN_SECONDS)
            return 1e3 * answer.seconds, answer.cached_tokens

        return ask

    with ExitStack() as stack:
        before, after = (
            stack.enter_context(
                VLLMServer(
                    ServerSettings(args.venv, model, _VLLM_PORTS[side], connector_of("none"), environ=environment(tree))
                )
            )
            for side, tree in trees.items()
        )
        yield {"before": asker(before, after), "after": asker(after, before)}


@contextmanager
def sglang_sides(trees: dict[str, Path], args: argparse.Namespace) -> Iterator[dict[str, Ask]]:
    """Start two SGLang servers."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "integration" / "sglang"))
    from models import write_model
    from server import STANDINS, SGLangServer
    from sglang_ttft import OPTIONS, first_token_ms

    del args  # nothing to choose

    def asker(server: SGLangServer) -> Ask:
        return lambda prompt: first_token_ms(server, prompt)

    with ExitStack() as stack:
        model = write_model("llama-29m", Path(stack.enter_context(tempfile.TemporaryDirectory())))
        sides = {}
        for side, tree in trees.items():
            variables = {"PYTHONPATH": os.pathsep.join([str(STANDINS), environment(tree)["PYTHONPATH"]])}
            sides[side] = asker(stack.enter_context(SGLangServer(model, OPTIONS, variables)))
        yield sides


@contextmanager
def embedded_sides(trees: dict[str, Path], args: argparse.Namespace) -> Iterator[dict[str, Ask]]:
    """Start two embedded engines, each in a process of its own."""
    worker = Path(__file__).with_name("embedded_worker.py")

    def started(tree: Path) -> subprocess.Popen[str]:
        command = [sys.executable, str(worker), str(args.model)]
        variables = os.environ | environment(tree)
        return subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def asker(process: subprocess.Popen[str]) -> Ask:
        def ask(prompt: list[int]) -> tuple[float, int]:
            process.stdin.write(json.dumps(prompt) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            return answer["ms"], answer["cached"]

        return ask

    with ExitStack() as stack:
        processes = {side: stack.enter_context(started(tree)) for side, tree in trees.items()}
        for process in processes.values():
            json.loads(process.stdout.readline())  # it is ready
        yield {side: asker(process) for side, process in processes.items()}
        for process in processes.values():
            process.stdin.close()


ENGINES = {"vllm": vllm_sides, "sglang": sglang_sides, "embedded": embedded_sides}


def environment(tree: Path) -> dict[str, str]:
    """Variables with which a server imports the sources of a checkout, not those that are installed."""
    sources = (tree / "src").resolve()
    if not (sources / "kvgraft").is_dir():
        raise SystemExit(f"{tree} is no checkout of kvgraft")
    return {"PYTHONPATH": str(sources)}


def commit_of(tree: Path) -> str:
    """Name what is checked out."""
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--before", type=Path, required=True, help="checkout of the earlier revision")
    parser.add_argument("--after", type=Path, default=Path(__file__).parents[2], help="checkout of the later one")
    parser.add_argument("--lengths", type=lengths, default=(1024, 4096), help="tokens of a prompt, with commas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--venv", type=Path, default=Path(".venv-vllm"), help="environment with vLLM")
    parser.add_argument(
        "--model",
        type=Path,
        default=Path("runs/engine-model"),
        help="for vLLM, made if not there; for the embedded engine, any",
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if min(args.lengths) <= 2 * INSTRUCTION_TOKENS:
        parser.error(f"prompts have more than {2 * INSTRUCTION_TOKENS} tokens")
    trees = {"before": args.before, "after": args.after}
    rng = random.Random(args.seed)
    with ENGINES[args.engine](trees, args) as sides:
        rows = [found for tokens in args.lengths for found in measure(sides, tokens, args.rounds, rng)]
    commits = {side: commit_of(tree) for side, tree in trees.items()}
    print(json.dumps({"engine": args.engine, "commits": commits, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
