"""Choose what copies computed text out of the engine's cache: by where that lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.integrations.vllm.worker.host_reader import HostReader
from kvgraft.memory.host_memory import HOST_MEMORY

if TYPE_CHECKING:
    import torch

    from kvgraft.integrations.vllm.worker.host_reader import TextReader
    from kvgraft.memory.host_memory import HostMemory


def text_reader(device: torch.device, memory: HostMemory = HOST_MEMORY) -> TextReader:
    """Return the reader for K/V on `device`, which leaves text in `memory` if it comes from a GPU."""
    if device.type != "cuda":
        return HostReader()
    from kvgraft.integrations.vllm.worker.staged_reader import CudaCopies, StagedReader

    return StagedReader(CudaCopies(device), memory=memory)
