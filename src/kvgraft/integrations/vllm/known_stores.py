"""Connectors that may stand beside ours: those that save what their metadata name, and look at nothing else.

Stores are kept from approximate K/V by the steps that their scheduler's half is shown. A store with a worker's half that
looks at the batch itself (the forward context, the attention metadata of `save_kv_layer`) would save more than its
metadata name, and no interface shows whether a class does. Classes that were read and tried are listed here; for another
one the operator has to answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KNOWN = frozenset({"LMCacheMPConnector"})
"""Names of connectors that were tried beside ours (tests/integration/vllm/test_lmcache.py)."""

OURS = "GraftConnector"
ANSWERED_FOR = "saves_by_metadata"
"""Setting that names further classes."""

_MULTIPLE = ("MultiConnector", "GraftMultiConnector")
_UNTRIED = {
    "lmcache.mp.transfer_intermediate_tensors": "it sends tensors of the whole batch",
    "lmcache.mp.lazy_offload": "it saves blocks later, by what vLLM's pool says of them then",
}


def check_stores(extra_config: Mapping[str, Any]) -> None:
    """Verify `kv_connector_extra_config` of a `GraftMultiConnector`.

    Raises:
        ConfigError: It does not name our connector once and others beside it, or names one that is not known to save by its
            metadata.
    """
    connectors: Sequence[Mapping[str, Any]] = extra_config.get("connectors") or ()
    names = [str(connector.get("kv_connector")) for connector in connectors]
    if names.count(OURS) != 1 or len(names) < 2:
        raise ConfigError(
            f"GraftMultiConnector takes 'connectors': {OURS} once and at least one store, not {names or 'none'}; "
            f"{OURS} alone needs no GraftMultiConnector"
        )
    answered_for = extra_config.get(ANSWERED_FOR) or ()
    for name, connector in zip(names, connectors, strict=True):
        if name == OURS:
            continue
        if name in _MULTIPLE:
            raise ConfigError(f"{name} cannot stand inside GraftMultiConnector; name its connectors directly")
        if name not in KNOWN and name not in answered_for:
            raise ConfigError(
                f"{name} is not known to save only what its metadata name, and could keep what grafts computed; take it out, "
                f"or answer for it with '{ANSWERED_FOR}': ['{name}'] in kv_connector_extra_config"
            )
        for setting, reason in _UNTRIED.items():
            if (connector.get("kv_connector_extra_config") or {}).get(setting):
                raise ConfigError(f"{name} cannot stand beside grafts with {setting}: {reason}; take the setting out")
