"""Table T8: cost of each step of reuse per 1,000 tokens, memory per token, and how rare hits may be.

Lookup, registration and copies are called by themselves, on data of their own; computing again and publishing are what is
left of whole requests when the rest is taken away.
"""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvgraft.bench.ttft import ONE_TOKEN, Draws, GraftAs, RoundShape, measure_round
from kvgraft.donors import CostModel, DonorCatalogue, DonorQuery, plan_graft
from kvgraft.graft.executor import RotatedSpans, SpanCopy, copy_spans
from kvgraft.memory.pool import SlotPool
from kvgraft.types import Namespace, RepairTime, ReuseMode

from .measured import MeasuredTable
from .settings import RoundsSettings, option
from .statistics import median, percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgraft.bench.journal import Journal
    from kvgraft.engine import LLM
    from kvgraft.memory.pool import SlotPlace

    Row = dict[str, Any]

_NAMESPACE = Namespace("bench")
_SECRET = bytes(32)
_THOUSAND = 1_000


@dataclass(frozen=True)
class CostSettings(RoundsSettings):
    """Lengths, and the catalogue of the lookups."""

    num_donors: int = option(200, "other texts of that length that are known", least=1)


STEPS = {
    "lookup": "matching and planning a prompt with a known document",
    "lookup, nothing known": "the same for a prompt of new text",
    "register": "making a text findable",
    "copy": "K/V of a span that stays where it was, into other slots",
    "copy and rotate": "K/V of a span that moves",
    "compute again": "the share of the default policy, its look and the correction, per 1,000 recomputed tokens",
    "publish": "after the first token: prefix, donor, bookkeeping",
    "full prefill": "for comparison",
}


def measure(llm: LLM, settings: CostSettings, journal: Journal, advance: Callable[[], object]) -> list[Row]:
    """Return rows of steps, of memory and of the hit rate at which reuse pays; `advance` is called once per round."""
    rows: list[Row] = []
    for length in settings.lengths:
        bench = _CostOfLength(llm, settings, length)
        for number in range(settings.rounds):
            if (length, number) not in journal:
                journal.add({"length": length, "round": number, **bench.round(number)})
            advance()
        records = list(journal.under(length))
        rows += [_step(length, step, records) for step in STEPS]
        rows.append(_break_even(length, records))
    return rows + _memory(llm, settings)


class _CostOfLength:
    """Measures every step at one length."""

    def __init__(self, llm: LLM, settings: CostSettings, length: int) -> None:
        self._llm, self._settings, self._length = llm, settings, length
        self._draws = Draws(llm, (settings.seed, length))
        self._catalogue = DonorCatalogue((settings.num_donors + settings.rounds + 1) * 2 * length, secret=_SECRET)
        for _ in range(settings.num_donors):
            self._catalogue.add(_NAMESPACE, self._draws.tokens(length).astype(np.int32), None)
        pool = llm.adapter.pool
        self._pool = SlotPool(pool.layers, 2 * length, next(llm.adapter.model.parameters()).dtype, pool.device)
        self._warm_up()

    def round(self, number: int) -> Row:
        """Milliseconds of every step, and tokens that they were for."""
        return {
            **self._lookups(),
            "copy_ms": self._copy(0),
            "copy_and_rotate_ms": self._copy(self._settings.shift),
            **self._requests(number),
        }

    def _warm_up(self) -> None:
        self._lookups()
        self._copy(1)
        measure_round(self._llm, self._draws, self._shape(self._settings.shift + 256))

    def _shape(self, length: int) -> RoundShape:
        return RoundShape(length, self._settings.shift, ONE_TOKEN)

    def _lookups(self) -> Row:
        document, new = (self._draws.tokens(self._length).astype(np.int32) for _ in range(2))
        started = time.perf_counter()
        self._catalogue.add(_NAMESPACE, document, None)
        register_s = time.perf_counter() - started
        beginning = self._draws.tokens(self._settings.shift).astype(np.int32)
        prompt = np.concatenate([beginning, document[: self._length - len(beginning)]])
        return {
            "register_ms": 1e3 * register_s,
            "lookup_ms": 1e3 * self._look_up(prompt),
            "lookup_nothing_known_ms": 1e3 * self._look_up(new),
        }

    def _look_up(self, prompt: np.ndarray) -> float:
        started = time.perf_counter()
        matches = self._catalogue.find(DonorQuery(_NAMESPACE, prompt))
        plan_graft(len(prompt), 0, matches, CostModel(copy_per_token=0.0, per_span=0.0))
        return time.perf_counter() - started

    def _copy(self, shift: int) -> float:
        """Copy all layers of `length` tokens to slots beside them; milliseconds."""
        source = _PoolSource(self._pool.place(np.arange(self._length)))
        started = time.perf_counter()
        spans = RotatedSpans([SpanCopy(source, 0, shift, self._length)], self._llm.adapter.rope, self._pool.device)
        place = self._pool.place(np.arange(self._length, 2 * self._length))
        with torch.inference_mode():
            copy_spans(spans, place, range(len(self._pool.layers)))
        return 1e3 * (time.perf_counter() - started)

    def _requests(self, number: int) -> Row:
        draws = Draws(self._llm, (self._settings.seed, self._length, number))
        ways = (GraftAs("none", "none"), GraftAs(repair=RepairTime.BEFORE))
        found = measure_round(self._llm, draws, self._shape(self._length), ways)
        plain, default = found.grafts
        more = int(default.report.computed_tokens - plain.report.computed_tokens)
        self._llm.reset()
        started = time.perf_counter()
        output = self._llm.generate(draws.tokens(self._length), ONE_TOKEN, ReuseMode.OFF)[0]
        return {
            "cold_ms": 1e3 * found.cold.ttft_s,
            "hit_ms": 1e3 * default.ttft_s,
            "compute_again_ms": 1e3 * (default.ttft_s - plain.ttft_s),
            "compute_again_tokens": more,
            "publish_ms": 1e3 * (time.perf_counter() - started - output.ttft_s),
            "full_prefill_ms": 1e3 * found.cold.ttft_s,
        }


@dataclass(frozen=True, slots=True, eq=False)
class _PoolSource:
    """A `KVSource` of slots."""

    place: SlotPlace

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.place.read(layer)


def _step(length: int, step: str, records: Sequence[Row]) -> Row:
    name = step.replace(",", "").replace(" ", "_")
    values = [_THOUSAND * record[f"{name}_ms"] / max(1, record.get(f"{name}_tokens", length)) for record in records]
    return {
        "length": length,
        "step": step,
        "what": STEPS[step],
        "per_1k_tokens_ms": median(values),
        "per_1k_tokens_p95_ms": percentile(values, 95),
    }


def _break_even(length: int, records: Sequence[Row]) -> Row:
    """The share of prompts that must hit for what all of them pay, lookup and registration, to be won back."""
    paid = [record["lookup_nothing_known_ms"] + record["register_ms"] for record in records]
    saved = [record["cold_ms"] - record["hit_ms"] for record in records]
    pays = median(paid)
    gain = median(saved)
    share = None if pays is None or not gain or gain <= 0 else pays / gain
    return {
        "length": length,
        "step": "break-even hit rate",
        "what": "(lookup + register) / (cold - hit)",
        "share": share,
    }


def _memory(llm: LLM, settings: CostSettings) -> list[Row]:
    """Bytes per token of the catalogue that is full, and of K/V."""
    length = max(settings.lengths)
    draws = Draws(llm, (settings.seed, length, settings.rounds))
    num_tokens = settings.num_donors * length
    tracemalloc.start()
    catalogue = DonorCatalogue(num_tokens, secret=_SECRET)
    while catalogue.num_tokens < num_tokens:
        catalogue.add(_NAMESPACE, draws.tokens(length).astype(np.int32), None)
    index_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = next(llm.adapter.model.parameters()).element_size()
    kv_bytes = sum(2 * shape.num_kv_heads * shape.head_dim * size for shape in llm.adapter.pool.layers)
    return [
        {
            "step": "memory of the catalogue",
            "what": "token ids and index of a full one",
            "bytes": index_bytes / num_tokens,
        },
        {"step": "memory of K/V", "what": "all layers, in slots or on the host", "bytes": float(kv_bytes)},
    ]


TABLE = MeasuredTable(
    "cost",
    "What reuse costs",
    "Milliseconds per 1,000 tokens of lookup, registration, copy, rotation, computing again and publishing; bytes per token "
    "of the catalogue and of K/V; and the share of prompts that must hit for reuse to pay.",
    CostSettings,
    ("length", "round"),
    measure,
)
