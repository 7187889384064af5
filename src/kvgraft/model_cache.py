"""The K/V cache of a transformers model under the name that its version has: `past_key_values`, `cache` since 5.24."""

from __future__ import annotations

from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

_NEW, _OLD = "cache", "past_key_values"


def cache_argument(model: PreTrainedModel, kv: Cache | None) -> dict[str, Cache | None]:
    """Return the keyword argument that gives `kv` to a forward pass of `model`."""
    return {_keyword(type(model).forward): kv}


def cache_of(output: Any) -> Any:  # noqa: ANN401 - of the class that the model returns
    """Return the cache that a forward pass has filled, or None; some models make one of a class of their own."""
    return output[_NEW] if _NEW in output else output.get(_OLD)


@cache
def _keyword(forward: Callable[..., object]) -> str:
    return _NEW if _NEW in signature(forward).parameters else _OLD
