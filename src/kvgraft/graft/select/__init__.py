"""Selection policies: which reused tokens to compute again. One file each, loaded when it is used; `policy_names` lists them.

| name | rule | source |
|---|---|---|
| `none` | nothing | - |
| `random` | a share, drawn by the prompt's tokens | - |
| `first_k` | the first k tokens of each run | EPIC, https://arxiv.org/abs/2410.15332 |
| `kv_deviation` | largest change of the key in an early layer | CacheBlend, https://arxiv.org/abs/2405.16444 |
| `query_attention` | what the query looks at | ProphetKV, https://arxiv.org/abs/2602.02579 |
| `query_seam` | query attention x a prior that falls with the distance from the seam | docs/graft.md |
| `adaptive` | `query_seam`, doubled until the first token stops to change | docs/graft.md |

Others are registered, or come with installed packages. Benchmarks have one more, which knows a full prefill
(`bench/fidelity/oracle.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.errors import ConfigError, IntegrationError, one_line
from kvgraft.factories import NamedFactories, imported
from kvgraft.graft.select.base import (
    Observable,
    Observation,
    Recompute,
    SelectionContext,
    SelectionPolicy,
    SelectionSteps,
)
from kvgraft.graft.select.context import selection_context
from kvgraft.graft.select.first_k import FirstK
from kvgraft.graft.select.guard import PolicySteps, expected_rows, expected_share, fault, looks_at_query
from kvgraft.graft.select.none import NoRecompute
from kvgraft.graft.select.ratio import RankingPolicy, RatioPolicy
from kvgraft.graft.select.repeats import says_much_twice
from kvgraft.on_use import names_on_use

if TYPE_CHECKING:
    from kvgraft.graft.select.adaptive import Adaptive
    from kvgraft.graft.select.kv_deviation import KVDeviation
    from kvgraft.graft.select.query_attention import QueryAttention
    from kvgraft.graft.select.query_seam import QuerySeam
    from kvgraft.graft.select.random_share import RandomShare

SELECTION_GROUP = "kvgraft.selection_policies"
"""Entry points of packages that bring policies."""
_POLICIES: NamedFactories[type[SelectionPolicy]] = NamedFactories(
    "selection policy",
    SELECTION_GROUP,
    "register_selection_policy",
    {
        "none": NoRecompute,
        "random": "kvgraft.graft.select.random_share:RandomShare",
        "first_k": FirstK,
        "kv_deviation": "kvgraft.graft.select.kv_deviation:KVDeviation",
        "query_attention": "kvgraft.graft.select.query_attention:QueryAttention",
        "query_seam": "kvgraft.graft.select.query_seam:QuerySeam",
        "adaptive": "kvgraft.graft.select.adaptive:Adaptive",
    },
)


def policy_names() -> tuple[str, ...]:
    """Return the names of built-in policies, and of those that were registered or found in an installed package so far."""
    return _POLICIES.names


def register_selection_policy(name: str, policy: type[SelectionPolicy]) -> None:
    """Make the class `policy` known under `name`.

    Raises:
        ConfigError: The name is empty, blank, has a colon or is taken, or `policy` is no class of policies.
    """
    if ":" in name:
        raise ConfigError(f"a selection policy needs a name without a colon, not {name!r}: module:Class names a class")
    _POLICIES.register(name, _policy_class(name, policy, ConfigError))


def policy_class(name: str, *, may_import: bool = True) -> type[SelectionPolicy]:
    """Return the class of policies that `name` means.

    Args:
        name: Of a built-in policy, a registered one or one of an installed package (entry points of the group
            `kvgraft.selection_policies`), or `module:Class`.
        may_import: Whether `module:Class` is known, which imports any module that can be found: for what the owner of the
            process says, never for what a client says.

    Raises:
        ConfigError: There is none; names the closest.
        IntegrationError: It cannot be imported, or is no class of policies.
    """
    if ":" not in name:
        return _policy_class(name, _POLICIES.find(name), IntegrationError)
    if not may_import:
        raise ConfigError(f"unknown selection policy {name!r}; requests choose by name: {', '.join(policy_names())}")
    return _policy_class(name, imported("selection policy", name), IntegrationError)


def selection_policy(name: str, *, may_import: bool = True, **parameters: float) -> SelectionPolicy:
    """Build the policy that `name` means, as `policy_class` finds it.

    Raises:
        ConfigError: The name or a parameter is unknown.
        IntegrationError: It cannot be imported or built, or its attributes are not those of a policy.
    """
    kind = policy_class(name, may_import=may_import)
    try:
        policy = kind(**parameters)
    except ConfigError:
        raise
    except TypeError as error:
        raise ConfigError(f"selection policy {name!r}: {error}") from error
    except Exception as error:
        raise IntegrationError(f"selection policy {name!r} cannot be built: {one_line(error)}") from error
    wrong = fault(policy)
    if wrong is not None:
        raise IntegrationError(f"selection policy {name!r}: {wrong}; correct its class {kind.__qualname__}")
    return policy


def _policy_class(
    name: str, found: object, failure: type[ConfigError] | type[IntegrationError]
) -> type[SelectionPolicy]:
    if not (isinstance(found, type) and issubclass(found, SelectionPolicy)):
        raise failure(f"selection policy {name!r} is no class that extends kvgraft.graft.select.SelectionPolicy")
    return found


__all__ = [
    "SELECTION_GROUP",
    "Adaptive",
    "FirstK",
    "KVDeviation",
    "NoRecompute",
    "Observable",
    "Observation",
    "PolicySteps",
    "QueryAttention",
    "QuerySeam",
    "RandomShare",
    "RankingPolicy",
    "RatioPolicy",
    "Recompute",
    "SelectionContext",
    "SelectionPolicy",
    "SelectionSteps",
    "expected_rows",
    "expected_share",
    "fault",
    "looks_at_query",
    "policy_class",
    "policy_names",
    "register_selection_policy",
    "says_much_twice",
    "selection_context",
    "selection_policy",
]

__getattr__ = names_on_use(
    __name__,
    {
        "Adaptive": "kvgraft.graft.select.adaptive",
        "KVDeviation": "kvgraft.graft.select.kv_deviation",
        "QueryAttention": "kvgraft.graft.select.query_attention",
        "QuerySeam": "kvgraft.graft.select.query_seam",
        "RandomShare": "kvgraft.graft.select.random_share",
    },
)
