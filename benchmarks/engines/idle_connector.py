"""A connector of vLLM that does nothing: what its seam costs by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class IdleConnector(KVConnectorBase_V1, SupportsHMA):
    """Finds nothing, loads nothing, keeps nothing."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Find nothing."""
        return 0, False

    def update_state_after_alloc(self, *_: object) -> None:
        """Do nothing."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Say nothing."""
        return KVConnectorMetadata()

    def request_finished_all_groups(self, *_: object) -> tuple[bool, dict[str, Any] | None]:
        """Free the blocks at once."""
        return False, None

    def start_load_kv(self, *_: object, **__: object) -> None:
        """Load nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing."""

    def save_kv_layer(self, *_: object, **__: object) -> None:
        """Keep nothing."""

    def wait_for_save(self) -> None:
        """Wait for nothing."""
