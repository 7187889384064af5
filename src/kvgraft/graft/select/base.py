"""The interface of selection policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvgraft.graft.select.repeats import MOST_COUNTED, REPEAT_WEIGHT

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SelectionContext:
    """The reused tokens of a prompt, run by run, and what is computed anyway.

    Attributes:
        num_tokens: Length of the prompt.
        reused: int64 (num_reused,), ascending prompt positions of reused tokens.
        seam_distance: int64 (num_reused,), distance of each from the start of its run (0: first token of the run).
        live: int64, ascending positions that are computed anyway.
        seed: For policies that draw; the same for the same prompt, in any batch.
        repeats: int64, ascending, those of `reused` that the prompt says before the run that copies them, too (`repeats`).
    """

    num_tokens: int
    reused: NDArray[np.int64]
    seam_distance: NDArray[np.int64]
    live: NDArray[np.int64]
    seed: int = 0
    repeats: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def num_counted(self) -> int:
        """The reused tokens, up to `MOST_COUNTED` repeated ones as `REPEAT_WEIGHT` each: what a share is of."""
        return len(self.reused) + (REPEAT_WEIGHT - 1) * min(MOST_COUNTED, len(self.repeats))

    @property
    def run_starts(self) -> NDArray[np.int64]:
        """Indices in `reused` at which a run begins: tokens that follow one another in prompt and donor. O(num_reused)."""
        begins = np.ones(len(self.reused), np.bool_)
        begins[1:] = (np.diff(self.reused) != 1) | (np.diff(self.seam_distance) != 1)
        return np.flatnonzero(begins)


@dataclass(frozen=True, slots=True, eq=False)
class Recompute:
    """One step of a policy: compute these reused positions, and the query rows after them once more.

    Attributes:
        positions: int64, ascending positions among the reused ones; those of earlier steps need not be repeated.
        observe_query: Sum the attention that the query (the last live rows) pays to each position.
        observe_key_deviation: Compute every position in the first layers and measure how far its key moved there.
        deviation_layer: The layer whose keys are compared then.
        sample: int64, ascending, those of `positions` with the drift of their run (`graft/drift.py`). Tokens that were chosen
            because they moved have not: their mean is not the run's. Empty if none has.
        afresh: Compute every position after the exact prefix, those of earlier steps too: a full prefill.
    """

    positions: NDArray[np.int64]
    observe_query: bool = False
    observe_key_deviation: bool = False
    deviation_layer: int = 1
    sample: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    afresh: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """The observations of a step.

    Attributes:
        logits: float32 (vocab_size,), next-token logits of the prompt as it stands; None where the engine samples elsewhere.
        attention_mass: float32 (num_tokens,), summed over query rows, heads and layers, on the CPU; None unless asked for.
        key_deviation: float32 (num_tokens,), squared distance between the key that was reused and the key that was
            computed, summed over heads and channels of one early layer; None unless asked for.
    """

    logits: Tensor | None
    attention_mass: NDArray[np.float32] | None
    key_deviation: NDArray[np.float32] | None = None


SelectionSteps = Generator[Recompute, Observation, None]
"""Yields at least one `Recompute`, receives an `Observation` for each; the last step's result is served."""


class Observable(StrEnum):
    """Observations that a policy may ask for and an engine may offer."""

    QUERY_ATTENTION = "query_attention"
    KEY_DEVIATION = "key_deviation"
    LOGITS = "logits"


class SelectionPolicy(ABC):
    """Chooses reused tokens to compute again, in as many steps as it needs.

    A policy decides and never touches slots: fixed choices take one step, query-aware ones look first, and nested budgets
    compare the logits of growing choices. Implementations are frozen dataclasses; fields are parameters.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 3  # from 3 on its choice may be computed after the first token
    """Raised when the same parameters choose other tokens than before, or these are computed at another time: calibrations of
    the old version are refused then."""
    observes: ClassVar[frozenset[Observable]] = frozenset()
    is_scattered: ClassVar[bool] = False
    """Whether it chooses single tokens amid reused ones. It cannot run where only whole chunks are computed."""

    @property
    @abstractmethod
    def recompute_ratio(self) -> float:
        """Share of reused tokens that is expected to be chosen; the planner's cost model uses it."""

    @abstractmethod
    def steps(self, context: SelectionContext) -> SelectionSteps:
        """Start choosing for one prompt."""
