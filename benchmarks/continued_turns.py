"""KL to full prefill by turn, of conversations whose first call begins with a document that was read at another place.

    python benchmarks/continued_turns.py --model smollm2-135m --sessions 20 [--kinds manual mturn] [--journal F]

Every turn is asked in four ways, each a tenant of one engine (`cache_salt`) that has read the document behind other notes:
`exact` with exact prefixes alone, the reference, which writes 32 greedy tokens; `continued`, as the engine does by default,
so that a turn goes on from what the one before it left; `repeated`, where the cache has nothing but the document, so that
every turn grafts and repairs it anew; and `none`, as `continued` with nothing repaired or corrected. All are shown the
reference's tokens. Nothing heals meanwhile.

Kinds: `manual` is made of the standard library's documentation, ten questions about a document of several entries; `mturn`
and `taubench` are packs in `--data`, left out where they are not there, with a document of the pack `xinstr` in front;
`quoted` is `taubench` as it was logged, where a turn repeats what the one before it said, so that later turns copy, too.
Prints JSON: a row per kind and turn, means over sessions with 95 % bootstraps over them, and the ratio of each turn to the
first.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.bench.fidelity.builtin import described
from kvgraft.bench.fidelity.rows import resamples
from kvgraft.bench.journal import Journal
from kvgraft.engine import LLM, SamplingParams
from kvgraft.fidelity import divergence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    Row = dict[str, object]
    Turns = list[tuple[str, str]]

TOKENS = 32
"""Of the reference's answer, which every way is shown."""
WAYS = {"continued": {}, "repeated": {}, "none": {"selection": "none", "correction": "none"}}
_ELSEWHERE = "Below are notes from a collection and a text. Say in one sentence what it is about."
_ROLE = "You are a helpful assistant. Keep answers short."
_NOTES = (600, 1_200)
"""Characters of the notes before a document of a pack."""
_INTERVAL = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Session:
    """What stood before a document where it was read, what stands before it here, and `(user, assistant)` by turn."""

    other_notes: str
    notes: str
    document: str
    turns: Sequence[tuple[str, str]]

    def prompt(self, number: int) -> str:
        """Return the prompt of a turn; the assistant speaks next."""
        said = [f"User: {asked}\n\nAssistant: {answered}" for asked, answered in self.turns[:number]]
        return "\n\n".join([_ROLE, self.notes, self.document, *said, f"User: {self.turns[number][0]}", "Assistant:"])

    @property
    def read_before(self) -> str:
        """The document behind another instruction and other notes."""
        return f"{_ELSEWHERE}\n\n{self.other_notes}\n\n{self.document}\n\nSummary:"


def manual(args: argparse.Namespace) -> Iterator[Session]:
    """Yield documents of entries of the standard library, and questions which entry says a sentence."""
    rng, entries = random.Random(args.seed), list(described())
    while True:
        drawn = rng.sample(entries, args.turns + 4)
        texts = [f"{name}\n{text}" for name, text, _ in drawn]
        asked = rng.sample(drawn[4:], args.turns)
        turns = [(f'Which entry says this: "{sentence}"', f"{name}.") for name, _, sentence in asked]
        yield Session("\n\n".join(texts[:2]), "\n\n".join(texts[2:4]), "\n\n".join(texts[4:]), turns)


def mturn(args: argparse.Namespace) -> Iterator[Session]:
    """Yield conversations of the pack `mturn`, behind documents of `xinstr`."""
    groups: dict[str, Turns] = {}
    for record in _records(args, _FILES["mturn"]):
        user = record["parts"][-2]["text"].removeprefix("User: ")
        groups.setdefault(record["group"], []).append((user, record["answers"][0]))
    return _behind_documents(args, groups.values())


def taubench(args: argparse.Namespace) -> Iterator[Session]:
    """Yield conversations of the pack `agent_taubench`, one after another, behind documents of `xinstr`.

    The pack logs both speakers, and what one has said stands in the other's prompt: that counts once.
    """
    said: dict[str, list[str]] = {}
    for record in _records(args, _FILES["taubench"]):
        messages = said.setdefault(record["session_id"], [])
        for text in (record["input"], record["output"]):
            if text and not any(earlier in text for earlier in messages):
                messages.append(text)
    turns = [turn for each in said.values() for turn in zip(each[1::2], each[2::2], strict=False)]
    return _behind_documents(args, [turns[start : start + args.turns] for start in range(0, len(turns), args.turns)])


def quoted(args: argparse.Namespace) -> Iterator[Session]:
    """Yield the same as it was logged: whatever is said, the next turn says again."""
    groups: dict[str, Turns] = {}
    for record in _records(args, _FILES["quoted"]):
        turns = groups.setdefault(record["session_id"], [])
        if record["input"] and record["output"] and not (turns and turns[-1][0] == record["input"]):
            turns.append((record["input"], record["output"]))
    return _behind_documents(args, groups.values())


KINDS: dict[str, Callable[[argparse.Namespace], Iterator[Session]]] = {
    "manual": manual,
    "mturn": mturn,
    "taubench": taubench,
    "quoted": quoted,
}
_FILES = {
    "mturn": "mturn.requests.jsonl",
    "taubench": "agent_taubench.jsonl.gz",
    "quoted": "agent_taubench.jsonl.gz",
}


def _behind_documents(args: argparse.Namespace, conversations: Iterable[Turns]) -> Iterator[Session]:
    rng = random.Random(args.seed)
    long = [turns[: args.turns] for turns in conversations if len(turns) >= args.turns]
    rng.shuffle(long)
    documents = [record["text"] for record in _records(args, "xinstr.docs.jsonl")]
    for turns in long:
        pieces = [_piece(rng, text, _NOTES) for text in rng.sample(documents, 2)]
        yield Session(*pieces, _piece(rng, rng.choice(documents), args.characters), turns)


def _piece(rng: random.Random, text: str, characters: tuple[int, int]) -> str:
    length = rng.randint(*characters)
    start = rng.randint(0, max(0, len(text) - length))
    return text[start : start + length]


def _records(args: argparse.Namespace, name: str) -> Iterator[dict[str, object]]:
    content = (Path(args.data) / name).read_bytes()
    text = gzip.decompress(content) if name.endswith(".gz") else content
    yield from map(json.loads, text.decode().splitlines())


def play(llm: LLM, session: Session) -> Iterator[Row]:
    """Yield the figures of every turn, from an empty cache."""
    llm.reset()
    for way in WAYS:
        llm.generate(session.read_before, SamplingParams(1), cache_salt=way)
    for number in range(len(session.turns)):
        prompt = session.prompt(number)
        reference = llm.dictate(
            prompt, [], SamplingParams(TOKENS, ignore_eos=True), "exact", cache_salt="exact", repair="before"
        )
        llm.generate(prompt, SamplingParams(1), "exact", cache_salt="exact")
        ways = {way: _compared(llm, prompt, way, reference.token_ids, reference.logits) for way in WAYS}
        for way, options in WAYS.items():
            if way != "repeated":
                llm.generate(prompt, SamplingParams(1), cache_salt=way, **options)
        yield {"turn": number, "tokens": len(llm.tokenize(prompt)), "ways": ways}


def _compared(llm: LLM, prompt: str, way: str, token_ids: Sequence[int], logits: Tensor) -> Row:
    with llm.probe(prompt, TOKENS, cache_salt=way, **WAYS[way]) as probe:
        found, report = divergence(logits, probe.logits(np.asarray(token_ids))), probe.report
    return {
        "mean_kl": found.mean_kl,
        "first_kl": found.first_kl,
        "first_flip": float(found.first_flip),
        "greedy_equal": float(found.greedy_equal),
        "continued_tokens": report.continued_tokens,
        "shifted_tokens": report.shifted_tokens,
        "recomputed_tokens": report.recomputed_tokens,
        "computed_tokens": report.computed_tokens,
        "generation": max((span.generation for span in report.spans), default=0),
    }


def rows_of(kind: str, sessions: Sequence[Sequence[Row]], seed: int) -> list[Row]:
    """Return a row per turn: means over the sessions of a kind, with intervals and the ratio to the first turn."""
    if not sessions:
        return []
    drawn = resamples(range(len(sessions)), seed)

    def column(turn: int, way: str, figure: str) -> NDArray[np.float64]:
        return np.array([session[turn]["ways"][way][figure] for session in sessions], np.float64)

    rows: list[Row] = []
    for turn in range(len(sessions[0])):
        row: Row = {"kind": kind, "turn": turn + 1, "sessions": len(sessions)}
        row["tokens"] = float(np.mean([session[turn]["tokens"] for session in sessions]))
        for way in WAYS:
            values = {figure: column(turn, way, figure) for figure in sessions[0][0]["ways"][way]}
            found: Row = {figure: float(value.mean()) for figure, value in values.items()}
            found["median_kl"] = float(np.median(values["mean_kl"]))
            found |= _interval("mean_kl", [values["mean_kl"][each].mean() for each in drawn])
            first = column(0, way, "mean_kl")
            found["of_first_turn"] = float(values["mean_kl"].mean() / first.mean())
            found |= _interval("of_first_turn", [values["mean_kl"][each].mean() / first[each].mean() for each in drawn])
            row[way] = found
        rows.append(row)
    return rows


def _interval(name: str, values: Sequence[float]) -> Row:
    low, high = np.percentile(values, _INTERVAL)
    return {f"{name}_low": float(low), f"{name}_high": float(high)}


def measure(llm: LLM, args: argparse.Namespace, journal: Journal) -> list[Row]:
    """Play the sessions of every kind that the journal does not have; return the rows, last of all but `quoted`."""
    kinds = [kind for kind in args.kinds if kind not in _FILES or (Path(args.data) / _FILES[kind]).is_file()]
    for number in range(args.sessions):
        for kind in kinds:
            if (kind, number) not in journal:
                session = next(itertools.islice(KINDS[kind](args), number, None), None)
                if session is not None:
                    journal.add({"suite": kind, "index": number, "turns": list(play(llm, session))})
                    print(f"{kind} {number + 1} of {args.sessions}", file=sys.stderr, flush=True)
    found = {kind: [record["turns"] for record in journal.under(kind)] for kind in kinds}
    rows = [row for kind, sessions in found.items() for row in rows_of(kind, sessions, args.seed)]
    every = [session for kind, sessions in found.items() for session in sessions if kind != "quoted"]
    return rows + (rows_of("all", every, args.seed) if len(kinds) > 1 else [])


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--sessions", type=int, default=20, help="of each kind, as far as its pack has them")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--characters", type=int, nargs=2, default=(2_200, 4_500), help="of a document of a pack")
    parser.add_argument("--data", default="../shared/data/dev", help="folder of packs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--journal", help="keep what is measured there, and go on from it")
    args = parser.parse_args()
    llm = LLM(args.model, dtype="float32", num_slots=24_000, heal="off")
    settings = {name: getattr(args, name) for name in ("model", "turns", "characters", "seed")}
    journal = Journal(Path(args.journal) if args.journal else None, json.loads(json.dumps(settings)))
    rows = measure(llm, args, journal)
    absent = sorted(kind for kind in args.kinds if kind in _FILES and not (Path(args.data) / _FILES[kind]).is_file())
    if absent:
        print(f"{', '.join(absent)}: not in {args.data}, left out", file=sys.stderr)
    print(json.dumps({**settings, "tokens": TOKENS, "absent": absent, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
