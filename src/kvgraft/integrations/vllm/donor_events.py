"""Donors as vLLM's KV events, for routers that know donors (`kvgraft.reuse.donor_events`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed import kv_events

from kvgraft.errors import ConfigError
from kvgraft.events import BlockStored
from kvgraft.reuse.announcer import DonorAnnouncer
from kvgraft.types import Namespace

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent

    from kvgraft.donors import DonorCatalogue
    from kvgraft.events import KVEvent


def announce(
    catalogue: DonorCatalogue, fingerprint: str, vllm_config: VllmConfig, publish: Callable[[KVCacheEvent], None]
) -> None:
    """Announce all donors that come and go from now on.

    Raises:
        ConfigError: vLLM publishes no events.
    """
    events = vllm_config.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        raise ConfigError(
            "announce_donors announces donors among vLLM's KV events; start it with "
            '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq"}\''
        )
    catalogue.watch(DonorAnnouncer(lambda event: publish(as_vllms(event)), Namespace(fingerprint), sends_fronts=True))


def as_vllms(event: KVEvent) -> KVCacheEvent:
    """Return the event as an object of vLLM's, without fields that this vLLM lacks."""
    kind: Any = getattr(kv_events, type(event).__name__)
    fields: dict[str, Any] = {"medium": None}
    for name in kind.__struct_fields__:
        if hasattr(event, name):
            value = getattr(event, name)
            fields[name] = list(value) if isinstance(value, tuple) else value
    if isinstance(event, BlockStored):
        fields.setdefault("lora_id", None)
    made: KVCacheEvent = kind(**{name: value for name, value in fields.items() if name in kind.__struct_fields__})
    return made
