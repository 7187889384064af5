"""Attach a `SemanticPrefixProvider`: on a miss it may name a stored prompt whose K/V stand in. Off unless configured.

What it proposes is copied into slots of the request like any other donor's K/V, at the same positions, is reported as
`substituted` and never published. Source of the contract: `kvgraft.prefix.semantic`.
"""

from __future__ import annotations

import importlib
import logging
from array import array
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kvgraft.donors import Donor
from kvgraft.errors import ConfigError
from kvgraft.integrations.sglang.donors.texts import Origin, TreeKV, TreeText
from kvgraft.integrations.sglang.planning.spans import Span
from kvgraft.prefix.semantic import SemanticPrefixProvider, SemanticPrefixResult
from kvgraft.types import DonorId, Fidelity

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from kvgraft.integrations.sglang.donors.tree import DonorTree
    from kvgraft.types import Namespace

logger = logging.getLogger(__name__)

_UNCATALOGUED = DonorId(-1)

Answer = TypeVar("Answer")


def load_provider(name: str, model_config: object) -> SemanticPrefixProvider:
    """Build the provider called `module:Class` and initialise it.

    Raises:
        ConfigError: It cannot be imported or is no provider.
    """
    module_name, _, class_name = name.partition(":")
    try:
        provider = getattr(importlib.import_module(module_name), class_name)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"semantic_provider {name!r} cannot be loaded: {error}") from error
    if not isinstance(provider, SemanticPrefixProvider):
        raise ConfigError(f"semantic_provider {name!r} is no kvgraft.prefix.SemanticPrefixProvider")
    provider.on_init(model_config)
    return provider


class SemanticSource:
    """Asks a provider on a thread of its own; errors and overruns are logged and count as no answer.

    One call runs at a time. While a stalled one still runs nobody is asked, so a stuck provider costs one deadline.
    """

    def __init__(self, provider: SemanticPrefixProvider, tree: DonorTree, page_size: int, deadline_s: float) -> None:
        self._provider = provider
        self._tree = tree
        self._page_size = page_size
        self._deadline_s = deadline_s
        self._pool = ThreadPoolExecutor(1, "kvgraft-semantic")
        self._running: Future[Any] | None = None

    def spans(self, req: Any, namespace: Namespace, tokens: array[int], end: int) -> tuple[Span, ...]:  # noqa: ANN401
        """Ask for a stand-in for a prompt that matches nothing; returns at most one span, at position 0."""
        proposal = self._call(lambda: self._provider.on_prefix_miss(rid=req.rid, token_ids=_numbers(tokens)))
        if proposal is None:
            return ()
        donor = _donor(req, namespace, proposal)
        kv = donor.kv
        assert isinstance(kv, TreeKV)
        length = min(end, donor.num_tokens, proposal.num_cached_tokens or donor.num_tokens)
        length = min(length, self._tree.resident(kv.text, length).length) // self._page_size * self._page_size
        return (Span(0, length, donor, 0, fidelity=Fidelity.SUBSTITUTED),) if length else ()

    def cached(self, rid: str, tokens: array[int]) -> None:
        """Tell the provider what a finished request has stored."""
        self._call(lambda: self._provider.on_request_cached(rid=rid, token_ids=_numbers(tokens)))

    def _call(self, call: Callable[[], Answer]) -> Answer | None:
        if self._running is not None and not self._running.done():
            return None
        future = self._pool.submit(call)
        self._running = future
        try:
            return future.result(self._deadline_s)
        except FutureTimeoutError:
            logger.warning("the semantic provider took longer than %s s; nothing is substituted", self._deadline_s)
        except Exception:
            logger.exception("the semantic provider failed; nothing is substituted")
        return None


def _donor(req: Any, namespace: Namespace, proposal: SemanticPrefixResult) -> Donor:  # noqa: ANN401
    numbers = np.asarray(proposal.alternate_token_ids, np.int64)
    text = TreeText(
        array("q", numbers.tobytes()), namespace, req.extra_key, req.cache_salt, 0, 0, Origin(proposal.source_id)
    )
    return Donor(_UNCATALOGUED, namespace, numbers.astype(np.int32), TreeKV(text, 0))


def _numbers(tokens: array[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Copy tokens for the provider's thread; read-only."""
    numbers = np.frombuffer(tokens[:], np.int64)
    numbers.flags.writeable = False
    return numbers
