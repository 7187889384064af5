"""What vLLM's two model runners do differently for a request whose K/V could not be made."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def takes_running_back(vllm_config: VllmConfig) -> bool:
    """Return whether a request that runs can be set back to an earlier position by blocks that failed to load.

    vLLM's scheduler does so in any case. Model Runner V2 keeps the position of a running request on the device, where it
    stays as it was: the next tokens would be computed at wrong positions. A request that waits for its load is not yet
    known to the runner. Source: https://github.com/vllm-project/vllm/issues/49250.
    """
    return not getattr(vllm_config, "use_v2_model_runner", False)
