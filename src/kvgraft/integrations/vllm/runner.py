"""Whether vLLM computes itself what could not be made for a request that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def takes_running_back(vllm_config: VllmConfig) -> bool:
    """Return whether a request that runs can be set back to an earlier position by blocks that failed to load.

    vLLM's scheduler does so in any case, and in two cases, both its defaults on a GPU, the answer is wrong:

    - Model Runner V2 keeps the position of a running request on the device, where it stays as it was: the next tokens would
      be computed at wrong positions. Source: https://github.com/vllm-project/vllm/issues/49250.
    - Asynchronous scheduling has scheduled the next token before the failure is known, over K/V that were never made, and
      gives it to the client.

    A request that waits for its load is not yet known to the runner, and has no step under way.
    """
    is_v2 = getattr(vllm_config, "use_v2_model_runner", False)
    return not (is_v2 or vllm_config.scheduler_config.async_scheduling)
