"""Where states of hybrid models are worth recording: packs through `StateRadixCache`, by recording policy at equal bytes.

    python -m benchmarks.prefix.state_recording agent_magagent mturn --data ../shared/data/dev --states 8,32,128 [--json]

Gives the share of prompt tokens that a match finds with room for so many states, and with a state at every token. K/V of
tokens have no limit: every policy stores the same. Runs no model. Answers are part of a prompt that repeats them, and not
recorded before.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.bench.fidelity.suites import load_suites
from kvgraft.bench.tokenization import load_tokenizer
from kvgraft.cli import run_command
from kvgraft.cli.parser import Parser
from kvgraft.cli.progress import progress
from kvgraft.prefix import (
    BranchingPoints,
    EndOfPrompt,
    EveryTokens,
    RadixCache,
    RadixKey,
    RecordingPrompt,
    StateRadixCache,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.prefix import StateRecording
    from kvgraft.types import TokenArray

_EVERYTHING = "everything"


@dataclass(frozen=True, slots=True)
class Room:
    """What states may take.

    Attributes:
        num_states: States that there is room for.
        state_bytes: Bytes of one.
        chunk_size: Tokens at whose multiples states can be recorded.
    """

    num_states: int
    state_bytes: int
    chunk_size: int


@dataclass(frozen=True, slots=True)
class Recording:
    """Prompts of one pack under one policy and with room for so many states.

    Attributes:
        pack: Name of the pack.
        policy: Where states are recorded; `everything` is a state at every token and no limit.
        room: What there is room for; None for no limit.
        num_tokens: Tokens of all prompts.
        hit_tokens: Tokens that a match found, the last one of a prompt never.
        num_recorded: States that were recorded.
    """

    pack: str
    policy: str
    room: Room | None
    num_tokens: int
    hit_tokens: int
    num_recorded: int

    @property
    def share(self) -> float:
        """Share of prompt tokens that were found."""
        return self.hit_tokens / max(self.num_tokens, 1)


def build_parser() -> Parser:
    """Return the parser of the command."""
    parser = Parser(
        prog="python -m benchmarks.prefix.state_recording",
        description="Replay packs through the prefix cache of hybrid models, without a model, by recording policy.",
    )
    parser.add_argument("packs", nargs="+", metavar="PACK", help="names in --data, or paths of packs")
    parser.add_argument("--data", default="", metavar="DIR", help="folder of the packs")
    parser.add_argument("--tokenizer", metavar="FILE", help="Hugging Face tokenizers JSON file (default: a plain one)")
    parser.add_argument("--states", type=_numbers, default=(8, 32, 128), metavar="N,N", help="room for so many states")
    parser.add_argument(
        "--intervals", type=_numbers, default=(64, 512), metavar="N,N", help="tokens between two states"
    )
    parser.add_argument(
        "--chunks", type=_numbers, default=(1, 64), metavar="N,N", help="tokens per chunk of the layers"
    )
    parser.add_argument("--state-bytes", type=int, default=2**20, metavar="N", help="bytes of one state, for the table")
    parser.add_argument("--json", action="store_true", help="print a JSON array instead of a table")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Replay every pack once per room and policy."""
    tokenize = load_tokenizer(args.tokenizer)
    policies: dict[str, StateRecording] = {"end": EndOfPrompt(), "branching": BranchingPoints()}
    policies |= {f"every {interval}": EveryTokens(interval) for interval in args.intervals}
    results: list[Recording] = []
    suites = load_suites(args.packs, args.data)
    cases = [(chunk, room, name) for chunk in args.chunks for room in args.states for name in policies]
    with progress(len(suites) * (1 + len(cases)), "replays") as advance:
        for suite in suites:
            prompts = [tokenize(request.prompt).astype(np.int64) for request in suite.requests]
            results.append(record_everything(suite.name, prompts))
            advance()
            for chunk_size, num_states, name in cases:
                room = Room(num_states, args.state_bytes, chunk_size)
                results.append(record(suite.name, prompts, name, policies[name], room))
                advance()
    if args.json:
        print(json.dumps([asdict(result) | {"share": round(result.share, 5)} for result in results], indent=1))
    else:
        _print_table(results)
    return 0


def record(
    pack: str,
    prompts: Sequence[TokenArray],
    name: str,
    policy: StateRecording,
    room: Room,
) -> Recording:
    """Look every prompt up, record its states as `policy` says, and evict the least recently used ones beyond the room."""
    cache = StateRadixCache.create_simulated(state_chunk_size=room.chunk_size)
    slots = count()
    hit_tokens = num_recorded = 0
    for token_ids in prompts:
        match = cache.match_prefix(RadixKey(token_ids, limit=max(len(token_ids) - 1, 0)))
        hit_tokens += match.prefix_len
        prompt = RecordingPrompt(
            prompt_len=len(token_ids),
            prefix_len=match.prefix_len,
            branching_len=match.branching_len,
            alignment=cache.state_alignment,
        )
        states = {position: next(slots) for position in policy.positions(prompt)}
        result = cache.insert(RadixKey(token_ids), states=states)
        num_recorded += len(states) - len(result.state_freed)
        cache.evict(0, cache.state_total_size - room.num_states)
    return Recording(pack, name, room, sum(map(len, prompts)), hit_tokens, num_recorded)


def record_everything(pack: str, prompts: Sequence[TokenArray]) -> Recording:
    """Look every prompt up with a state at every token that was ever computed: what exact prefixes can give at most."""
    cache = RadixCache.create_simulated()
    hit_tokens = 0
    for token_ids in prompts:
        hit_tokens += cache.match_prefix(RadixKey(token_ids, limit=max(len(token_ids) - 1, 0))).prefix_len
        cache.insert(RadixKey(token_ids))
    return Recording(pack, _EVERYTHING, None, sum(map(len, prompts)), hit_tokens, cache.total_size)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 8,32") from error
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError("every number must be at least 1")
    return numbers


def _print_table(results: Sequence[Recording]) -> None:
    most = {result.pack: result for result in results if result.policy == _EVERYTHING}
    print(
        f"{'pack':>18s}{'chunk':>7s}{'states':>8s}{'MiB':>7s}{'policy':>12s}{'recorded':>10s}{'found':>8s}{'of all':>9s}"
    )
    for result in results:
        share = result.hit_tokens / max(most[result.pack].hit_tokens, 1)
        print(
            f"{result.pack:>18s}{_room_cells(result.room)}{result.policy:>12s}{result.num_recorded:>10d}"
            f"{result.share:>8.1%}{share:>9.1%}"
        )


def _room_cells(room: Room | None) -> str:
    if room is None:
        return " " * 22
    return f"{room.chunk_size:>7d}{room.num_states:>8d}{room.num_states * room.state_bytes >> 20:>7d}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_command(build_parser, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
