"""Layouts of a token's K/V in a layer's paged cache: one codec per layout, and the check that proves it."""

from __future__ import annotations

from kvgraft.integrations.vllm.codec.base import KVCodec
from kvgraft.integrations.vllm.codec.choose import choose_codec
from kvgraft.integrations.vllm.codec.scratch import scratch_like

__all__ = ["KVCodec", "choose_codec", "scratch_like"]
