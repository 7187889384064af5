"""Patches kept with a donor: do they lower the error of its grafts behind another front? Two experiments on HotpotQA.

    python benchmarks/patches.py [--limit 12] [--seed 0] [--model smollm2-135m] [--data ../shared/data/dev]

A prompt is instructions, the first six of a question's ten passages, and the question. Its first passage is exact, the others
are copied, keys turned to their new positions, from one of two donors: `first`, where each passage stood right behind the
instructions, and `order`, a prompt with the same passages in another order. What full prefill behind a *front* gives, less
the copy, is cut to a low rank per passage, layer and K/V head, keys at position 0, and added to the copy: a patch (Kamera,
arXiv 2606.23581). Fronts to learn from: `order`, the passages in a third order, and `others`, three passages of another
question. A full patch behind a front is the same as a donor that was read behind it: `front order` and `front others`.

Patches called `oracle` are learned from the prompt's own full prefill: what no patch of their kind can surpass.
Among them are key patches of rank 1 that repair scores in place of keys (ATTUNER, arXiv 2609.36722): `scores` is the best one
for the queries behind the passages, `totals` adds one vector to all keys of a passage and makes its total score right in
every head.

No two of prompt, donor and front have the same passage in front of a passage. KL is that to the model's own full prefill over
32 tokens of its greedy continuation; `default` recomputes before the first token. `truth` is the floor of the instrument,
which `--linear bfloat16` raises. JSON goes to stdout, without texts.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fidelity_pairs import draws, ratio
from kvgraft.bench.chat import has_chat_template
from kvgraft.bench.fidelity.one_space import in_one_space
from kvgraft.bench.fidelity.split import SPLITS, split
from kvgraft.bench.fidelity.subject import stock_attention
from kvgraft.bench.fidelity.suites import load_suite
from kvgraft.bench.journal import Journal
from kvgraft.config import EngineConfig
from kvgraft.engine import LLM
from kvgraft.fidelity import divergence, stock_reference
from kvgraft.graft.drift import CORRECTIONS
from kvgraft.graft.model import SequenceRows
from kvgraft.graft.rope import RopeShift, rotate_keys
from kvgraft.graft.select import NoRecompute, QuerySeam
from kvgraft.graft.sparse_prefill import SparsePrefill
from kvgraft.graft.steps import GraftSteps
from kvgraft.types import GraftPlan, Match
from passage_patches import RANKS, Agreement, PassageKV, cuts, score_patch, total_patch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvgraft.bench.fidelity.request import FidelityRequest
    from kvgraft.engine.attention import AttentionBackend, BatchAttention, LayerQuery
    from kvgraft.errors import PolicyError
    from kvgraft.fidelity import StockReference
    from kvgraft.memory.pool import SlotPool
    from kvgraft.types import TokenArray

CONTINUATION_TOKENS = 32
RECOMPUTED = ("none", "default")
BEFORE_DEFAULT = "rank 4"
"""The cut of fronts that is measured under the default, too."""
FRONT_CUTS = tuple(f"rank {rank}" for rank in RANKS)
ORACLES = ("mean", "rank 1", "rank 8")
"""Cuts of the true difference whose error is measured."""
FIGURES = ("mean_kl", "first_kl", "greedy_equal")
MARK = "\x00"
"""Stands for the text of a message where a chat template is cut."""
Copies = dict[int, PassageKV]
"""By number of the passage."""
NUM_OTHERS = 3
"""Passages of another question in a front of `others`."""


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A prompt in pieces: instructions, passages, and what follows them."""

    rid: str
    head: TokenArray
    passages: tuple[TokenArray, ...]
    tail: TokenArray

    def tokens(self, order: Sequence[int]) -> TokenArray:
        """Return the prompt with its passages in that order."""
        return np.concatenate([self.head, *(self.passages[number] for number in order), self.tail])

    def starts(self, order: Sequence[int]) -> dict[int, int]:
        """Return the position of each passage's first token."""
        lengths = [len(self.passages[number]) for number in order]
        return dict(zip(order, (len(self.head) + np.cumsum([0, *lengths[:-1]])).tolist(), strict=True))


class QueryRecorder:
    """An attention backend that keeps the queries of the last forward pass, (num_heads, num_rows, head_dim) by layer."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.name = backend.name
        self.queries: dict[int, Tensor] = {}
        self.scale = 0.0

    def plan(self, batch: Sequence[SequenceRows], pool: SlotPool) -> BatchAttention:
        """See `AttentionBackend`."""
        return _RecordedAttention(self, self._backend.plan(batch, pool))


@dataclass(frozen=True, slots=True, eq=False)
class _RecordedAttention:
    recorder: QueryRecorder
    attention: BatchAttention

    @property
    def masses(self) -> Sequence[Tensor | None]:
        return self.attention.masses

    def attend(self, layer: int, query: LayerQuery) -> Tensor:
        self.recorder.queries[layer], self.recorder.scale = query.query.clone(), query.scale
        return self.attention.attend(layer, query)


class Bench:
    """A model and its slots, of which the first ones hold the prompt at hand; the engine around it is idle."""

    def __init__(self, llm: LLM) -> None:
        self._adapter = llm.adapter
        self._slots = np.arange(self._adapter.pool.num_slots)
        self.recorder = QueryRecorder(self._adapter.attention.backend)
        self._adapter.attention = replace(self._adapter.attention, backend=self.recorder)

    def compute(self, tokens: TokenArray, start: int = 0, num_logits: int = 1) -> Tensor:
        """Compute positions from `start` on over what the slots hold before; returns logits of the last rows."""
        positions = np.arange(start, len(tokens))
        rows = SequenceRows(tokens[start:], positions, self._slots[: len(tokens)], num_logits=num_logits)
        return self._adapter.forward([rows])[0].logits

    def read(self, start: int, length: int) -> PassageKV:
        """Return the K/V of positions from `start` on."""
        place = self._adapter.pool.place(self._slots[start : start + length])
        layers = [place.read(layer) for layer in range(self._adapter.num_layers)]
        keys, values = (torch.stack(parts).float() for parts in zip(*layers, strict=True))
        return PassageKV(self.turned(keys, start, 0), values)

    def write(self, start: int, kv: PassageKV) -> None:
        """Put K/V at positions from `start` on."""
        place = self._adapter.pool.place(self._slots[start : start + kv.keys.shape[1]])
        dtype = self._adapter.pool.dtype
        for layer, keys in enumerate(self.turned(kv.keys, 0, start)):
            place.write(layer, keys.to(dtype), kv.values[layer].to(dtype))

    def turned(self, keys: Tensor, source: int, target: int) -> Tensor:
        """Turn keys as if they stood from position `target` on and not from `source`; 0 stands for 0 for all of them."""
        offsets = torch.arange(keys.shape[1])
        old, new = (offsets + start if start else torch.zeros_like(offsets) for start in (source, target))
        assert self._adapter.rope is not None, "models with keys that cannot be turned are refused before"
        return torch.stack(
            [
                each if spec is None else rotate_keys(each, RopeShift.between(old, new, spec.inv_freq), spec.pairing)
                for each, spec in zip(keys, self._adapter.rope, strict=True)
            ]
        )

    def answer(self, tokens: TokenArray, steps: GraftSteps, continuation: TokenArray) -> Tensor:
        """Return logits (len(continuation), vocab_size) over what is grafted in the slots."""
        prefill = SparsePrefill(tokens, self._slots[: len(tokens)], steps, on_policy_error=_raise)
        outcome = None
        while outcome is None:
            outcome = prefill.receive(self._adapter.forward([prefill.next_rows(len(tokens))])[0])
        whole = np.concatenate([tokens, continuation[:-1]])
        return torch.cat([outcome.logits[None], self.compute(whole, len(tokens), len(continuation) - 1)])


def _raise(error: PolicyError) -> None:
    raise error


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """Queries behind the passages in full prefill, and the scale of scores.

    Shape: (num_layers, num_kv_heads, group, n, head_dim).
    """

    queries: Tensor
    scale: float


class Trial:
    """One question: K/V of its passages behind every front, and the error of what is made of them.

    Its passages stand as given; the first one is exact.
    """

    def __init__(self, bench: Bench, question: Question, reference: StockReference) -> None:
        self._bench, self._question, self._reference = bench, question, reference
        self._order = tuple(range(len(question.passages)))
        self._tokens, self._starts = question.tokens(self._order), question.starts(self._order)
        self.reused = self._order[1:]
        self.true = self.in_order(self._order)
        self._tail = self._asked()

    def in_order(self, order: Sequence[int]) -> Copies:
        """Return the K/V of every passage in a prompt with that order."""
        self._bench.compute(self._question.tokens(order))
        starts, passages = self._question.starts(order), self._question.passages
        return {number: self._bench.read(starts[number], len(passages[number])) for number in order}

    def behind(self, front: TokenArray) -> Copies:
        """Return the K/V of every passage right behind the instructions and `front`."""
        before = np.concatenate([self._question.head, front])
        self._bench.compute(before)
        found = {}
        for number, passage in enumerate(self._question.passages):
            self._bench.compute(np.concatenate([before, passage]), len(before))
            found[number] = self._bench.read(len(before), len(passage))
        return found

    def difference(self, exact: Copies, donor: Copies) -> Copies:
        """Return what reused passages lack of `exact`."""
        return {number: exact[number] - donor[number] for number in self.reused}

    def _asked(self) -> Tail:
        """Return the queries of question and continuation; the slots hold the true passages."""
        whole = np.concatenate([self._tokens, self._reference.token_ids[:-1]])
        self._bench.compute(whole, len(self._tokens) - len(self._question.tail))
        recorder = self._bench.recorder
        queries = torch.stack([recorder.queries[layer] for layer in sorted(recorder.queries)]).float()
        num_kv_heads = self.true[0].keys.shape[2]
        return Tail(queries.unflatten(1, (num_kv_heads, -1)), recorder.scale)

    def scored(self, donor: Copies, *, totals: bool) -> Copies:
        """Return copies with the true scores as far as a key patch of rank 1, or of one vector, can give them."""
        tail, patched = self._tail, {}
        for number in self.reused:
            start = self._starts[number]
            true, copied = (self._bench.turned(kv.keys, 0, start) for kv in (self.true[number], donor[number]))
            if totals:
                patch = total_patch(true, copied, tail.queries, tail.scale)
            else:
                patch = score_patch(true - copied, tail.queries.flatten(2, 3))
            patched[number] = replace(donor[number], keys=self._bench.turned(copied + patch, start, 0))
        return patched

    def with_true_keys(self, donor: Copies) -> Copies:
        """Return true keys over the donor's values."""
        return {number: replace(donor[number], keys=self.true[number].keys) for number in self.reused}

    def error(self, copies: Copies, *, is_repaired: bool) -> dict[str, float]:
        """Graft `copies` and compare; `is_repaired` is the default, else nothing is recomputed."""
        first = self._order[0]
        self._bench.write(self._starts[first], self.true[first])
        for number in self.reused:
            self._bench.write(self._starts[number], copies[number])
        spans = [Match(self._starts[n], n, 0, len(self._question.passages[n])) for n in self.reused]
        plan = GraftPlan.over(len(self._tokens), self._starts[self.reused[0]], spans)
        policy, correction = (QuerySeam(0.1), CORRECTIONS["drift"]) if is_repaired else (NoRecompute(), None)
        steps = GraftSteps(plan, policy, token_ids=self._tokens, correction=correction)
        logits = self._bench.answer(self._tokens, steps, self._reference.token_ids)
        found = divergence(self._reference.logits, logits)
        return {"mean_kl": found.mean_kl, "first_kl": found.first_kl, "greedy_equal": float(found.greedy_equal)}


class QuestionErrors:
    """What all patches leave of one question's error."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.errors: dict[str, dict[str, float]] = {}
        self.agreements: dict[str, dict[str, Any]] = {}

    def measure(self, donors: dict[str, Copies], fronts: dict[str, Copies]) -> None:
        """Measure every donor with every patch, and fronts as donors."""
        trial = self._trial
        self._add("truth", "none", trial.true, ("none",))
        for front, copies in fronts.items():
            self._add(f"front {front}", "none", copies, ("none",))
        for donor, copies in donors.items():
            self._add(donor, "none", copies)
            for front, exact in fronts.items():
                self._learn(donor, copies, front, exact)
            self._learn(donor, copies, "oracle", trial.true)
            self._add(donor, "oracle scores", trial.scored(copies, totals=False), ("none",))
            self._add(donor, "oracle totals", trial.scored(copies, totals=True), ("none",))
            self._add(donor, "oracle all keys", trial.with_true_keys(copies), ("none",))

    def _learn(self, donor: str, copies: Copies, front: str, exact: Copies) -> None:
        trial = self._trial
        learned = trial.difference(exact, copies)
        patches: dict[str, Copies] = {}
        for number, difference in learned.items():
            for name, patch in cuts(difference).items():
                patches.setdefault(name, {})[number] = patch
        true = trial.difference(trial.true, copies)
        self.agreements[f"{donor}, {front}"] = {
            part: asdict(
                Agreement.of(
                    [getattr(true[number], part) for number in true],
                    [getattr(learned[number], part) for number in true],
                    {name: [getattr(cut[number], part) for number in true] for name, cut in patches.items()},
                )
            )
            for part in ("keys", "values")
        }
        if front == "oracle":
            keys = {number: copies[number] + cut.only_keys() for number, cut in patches["mean"].items()}
            self._add(donor, "oracle mean of keys", keys, ("none",))
        for name in ORACLES if front == "oracle" else FRONT_CUTS:
            patched = {number: copies[number] + cut for number, cut in patches[name].items()}
            is_served = name == BEFORE_DEFAULT and front != "oracle"
            self._add(donor, f"{front} {name}", patched, RECOMPUTED if is_served else ("none",))

    def _add(self, donor: str, patch: str, copies: Copies, recomputed: Sequence[str] = RECOMPUTED) -> None:
        for each in recomputed:
            found = self._trial.error(copies, is_repaired=each == "default")
            self.errors[f"{donor} / {patch} / {each}"] = found


def measure_question(
    bench: Bench, question: Question, others: Question, llm: LLM, rng: random.Random
) -> dict[str, Any]:
    """Measure everything for one question."""
    order = tuple(range(len(question.passages)))
    with llm.adapter.stock(stock_attention(llm)) as model:
        reference = stock_reference(model, question.tokens(order), CONTINUATION_TOKENS, np.empty(0, np.int64))
    trial = Trial(bench, question, reference)
    second = apart(rng, [order])
    third = apart(rng, [order, second])
    donors = {"first": trial.behind(question.head[:0]), "order": trial.in_order(second)}
    front = np.concatenate(others.passages[:NUM_OTHERS])
    measured = QuestionErrors(trial)
    measured.measure(donors, {"order": trial.in_order(third), "others": trial.behind(front)})
    return {
        "rid": question.rid,
        "num_tokens": len(question.tokens(order)),
        "reused_tokens": sum(len(question.passages[number]) for number in trial.reused),
        "num_reused": len(trial.reused),
        "agreements": measured.agreements,
        "errors": measured.errors,
    }


def apart(rng: random.Random, orders: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Draw an order in which no passage has the one in front of it that it has in `orders`, or stands first again."""
    taken = {pair for order in orders for pair in pairwise((None, *order))}
    order = list(orders[0])
    while True:
        rng.shuffle(order)
        if taken.isdisjoint(pairwise((None, *order))):
            return tuple(order)


def rows(requests: Sequence[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Return a row per setting, with ratios of means to the same without a patch and with the oracle of means."""
    drawn = draws(["hotpot"] * len(requests), seed)
    columns = {
        label: {name: np.array([request["errors"][label][name] for request in requests]) for name in FIGURES}
        for label in requests[0]["errors"]
    }
    table = []
    for label, mine in columns.items():
        donor, patch, recomputed = label.split(" / ")
        kl = mine["mean_kl"]
        row = {"donor": donor, "patch": patch, "recomputed": recomputed, "n": len(kl)}
        row |= {name: float(values.mean()) for name, values in mine.items()}
        row |= {
            "median_kl": float(np.median(kl)),
            "mean_kl_ci": np.quantile(kl[drawn].mean(1), [0.025, 0.975]).tolist(),
        }
        for name, other in (("none", "none"), ("means", "oracle mean")):
            base = columns.get(f"{donor} / {other} / {recomputed}")
            if base is not None and patch != other:
                row[f"of_{name}"] = ratio(kl, base["mean_kl"], drawn) | {"nearer": int((kl < base["mean_kl"]).sum())}
        table.append(row)
    return table


def agreement_rows(requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return means over requests."""

    def average(found: Sequence[Any]) -> Any:  # noqa: ANN401 - a number, or a tree of numbers
        if not isinstance(found[0], dict):
            return float(np.mean(found))
        return {key: average([each[key] for each in found]) for key in found[0]}

    return average([request["agreements"] for request in requests])


def patch_bytes(llm: LLM, requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the bytes of patches per token of a passage of mean length, in bfloat16, and the share of the token's K/V."""
    length = sum(request["reused_tokens"] for request in requests)
    length /= sum(request["num_reused"] for request in requests)
    layers = llm.adapter.pool.layers
    numbers = sum(2 * shape.num_kv_heads * shape.head_dim for shape in layers)
    found = {}
    sizes_of = {"mean": [shape.head_dim / length for shape in layers]}
    sizes_of |= {f"rank {rank}": [rank * (1 + shape.head_dim / length) for shape in layers] for rank in RANKS}
    for name, sizes in sizes_of.items():
        stored = sum(2 * shape.num_kv_heads * size for shape, size in zip(layers, sizes, strict=True))
        found[name] = {"bytes_per_token": 2 * stored, "share_of_kv": stored / numbers}
    return {"passage_tokens": length, "kv_bytes_per_token": 2 * numbers, "patches": found}


def questions(llm: LLM, requests: Sequence[FidelityRequest], num_passages: int) -> list[Question]:
    """Cut prompts into pieces at the edges of passages, in the words of the model's chat template where it has one."""
    tokenizer = llm.loaded.tokenizer

    def encode(text: str) -> TokenArray:
        return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)

    before, after = "", ""
    if has_chat_template(llm):
        turns = [{"role": "user", "content": MARK}]
        before, after = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True).split(MARK)
    beginning = encode(before) if before else llm.tokenize("")
    found = []
    for request in requests:
        first, *passages, last = (part.text for part in request.parts)
        passages = passages[:num_passages]
        head = np.concatenate([beginning, encode(f"{first}\n\n")])
        found.append(
            Question(request.rid, head, tuple(encode(f"{text}\n\n") for text in passages), encode(last + after))
        )
    return found


def in_bfloat16(model: torch.nn.Module) -> None:
    """Have linear layers but the last compute in bfloat16, everything between them in float32: the same for all settings."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.to(torch.bfloat16)
            module.register_forward_pre_hook(lambda _, given: (given[0].bfloat16(),))
            module.register_forward_hook(lambda _, __, found: found.float())


def sample(llm: LLM, args: argparse.Namespace) -> list[Question]:
    """Draw questions of the suite, and one more, each with other passages."""
    side = split(load_suite("rag", args.data).requests, args.split)
    by_passages = {frozenset(request.keys): request for request in side if request.group.startswith("hotpot")}
    found = questions(llm, list(by_passages.values()), args.passages)
    fitting = [each for each in found if len(each.tokens(range(len(each.passages)))) <= args.max_prompt_tokens]
    if len(fitting) <= args.limit:
        raise SystemExit(f"{len(fitting)} questions fit, and {args.limit} need one more; lower --limit")
    return random.Random(args.seed).sample(fitting, args.limit + 1)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure what the journal does not have yet, and lay out all of it."""
    llm = LLM(args.model, in_one_space(EngineConfig(num_slots=args.num_slots, dtype="float32")))
    if args.linear == "bfloat16":
        in_bfloat16(llm.adapter.model)
    bench, drawn = Bench(llm), sample(llm, args)
    facts = {"model": args.model, "fingerprint": llm.loaded.fingerprint, "split": args.split, "limit": args.limit}
    facts |= {
        "passages": args.passages,
        "max_prompt_tokens": args.max_prompt_tokens,
        "seed": args.seed,
        "linear": args.linear,
    }
    journal = Journal(args.journal, facts)
    for index, (question, others) in enumerate(pairwise(drawn)):
        if ("hotpot", index) not in journal:
            rng = random.Random(f"{args.seed} {question.rid}")
            found = measure_question(bench, question, others, llm, rng)
            journal.add({"suite": "hotpot", "index": index} | found)
            print(".", end="", file=sys.stderr, flush=True)
    requests = list(journal.under())
    return facts | {
        "rows": rows(requests, args.seed),
        "agreements": agreement_rows(requests),
        "size": patch_bytes(llm, requests),
        "requests": [
            {
                "rid": request["rid"],
                "num_tokens": request["num_tokens"],
                "reused_tokens": request["reused_tokens"],
                "mean_kl": {label: float(f"{found['mean_kl']:.4g}") for label, found in request["errors"].items()},
            }
            for request in requests
        ],
    }


def main() -> int:
    """Parse the command line, measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--limit", type=int, default=12)
    add("--seed", type=int, default=0)
    add("--split", choices=SPLITS, default="dev")
    add("--passages", type=int, default=6)
    add("--max-prompt-tokens", type=int, default=900)
    add("--journal", type=Path)
    add("--data", default="../shared/data/dev")
    add("--model", default="smollm2-135m")
    add("--linear", choices=("float32", "bfloat16"), default="float32", help="arithmetic of linear layers")
    add("--num-slots", type=int, default=4000)
    print(json.dumps(measure(parser.parse_args()), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
