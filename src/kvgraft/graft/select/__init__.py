"""Selection policies: which reused tokens to compute again. One file each; `SELECTION_POLICIES` lists them.

| name | rule | source |
|---|---|---|
| `none` | nothing | - |
| `random` | a share, drawn by the prompt's tokens | - |
| `first_k` | the first k tokens of each run | EPIC, https://arxiv.org/abs/2410.15332 |
| `kv_deviation` | largest change of the key in an early layer | CacheBlend, https://arxiv.org/abs/2405.16444 |
| `query_attention` | what the query looks at | ProphetKV, https://arxiv.org/abs/2602.02579 |
| `query_seam` | query attention x a prior that falls with the distance from the seam | docs/graft.md |
| `adaptive` | `query_seam`, doubled until the first token stops to change | docs/graft.md |

`Oracle` is not among them: it needs what only a full prefill knows, for benchmarks.
"""

from __future__ import annotations

from kvgraft.errors import ConfigError
from kvgraft.graft.select.adaptive import Adaptive
from kvgraft.graft.select.base import (
    Observable,
    Observation,
    Recompute,
    SelectionContext,
    SelectionPolicy,
    SelectionSteps,
)
from kvgraft.graft.select.first_k import FirstK
from kvgraft.graft.select.kv_deviation import KVDeviation
from kvgraft.graft.select.none import NoRecompute
from kvgraft.graft.select.oracle import Oracle
from kvgraft.graft.select.query_attention import QueryAttention
from kvgraft.graft.select.query_seam import QuerySeam
from kvgraft.graft.select.random_share import RandomShare
from kvgraft.graft.select.ratio import RankingPolicy, RatioPolicy

SELECTION_POLICIES: dict[str, type[SelectionPolicy]] = {
    "none": NoRecompute,
    "random": RandomShare,
    "first_k": FirstK,
    "kv_deviation": KVDeviation,
    "query_attention": QueryAttention,
    "query_seam": QuerySeam,
    "adaptive": Adaptive,
}


def selection_policy(name: str, **parameters: float) -> SelectionPolicy:
    """Build the policy called `name`; raises `ConfigError` for an unknown name or parameter."""
    policy = SELECTION_POLICIES.get(name)
    if policy is None:
        raise ConfigError(f"unknown selection policy {name!r}; choose one of {', '.join(SELECTION_POLICIES)}")
    try:
        return policy(**parameters)
    except TypeError as error:
        raise ConfigError(f"selection policy {name!r}: {error}") from error


__all__ = [
    "SELECTION_POLICIES",
    "Adaptive",
    "FirstK",
    "KVDeviation",
    "NoRecompute",
    "Observable",
    "Observation",
    "Oracle",
    "QueryAttention",
    "QuerySeam",
    "RandomShare",
    "RankingPolicy",
    "RatioPolicy",
    "Recompute",
    "SelectionContext",
    "SelectionPolicy",
    "SelectionSteps",
    "selection_policy",
]
