"""An answer that was given beforehand, as it was served; `dictated` serves it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kvgraft.types import GraftReport


@dataclass(frozen=True, slots=True, eq=False)
class DictatedAnswer:
    """An answer with what it was drawn from.

    Attributes:
        token_ids: The tokens that were dictated, and the greedy ones after them.
        logits: float32 (len(token_ids), vocab_size); row i predicts `token_ids[i]`.
        report: Of the request, as its owner would get it.
        times_s: Seconds from the lookup to each token.
        cpu_times_s: The same on the clock of the process, which counts its work alone.
    """

    token_ids: tuple[int, ...]
    logits: Tensor
    report: GraftReport
    times_s: tuple[float, ...]
    cpu_times_s: tuple[float, ...]
