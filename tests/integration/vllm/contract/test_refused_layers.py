"""Which of vLLM's kinds of layers are grafted: exactly two, whatever vLLM derives from them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

from kvgraft.integrations.vllm.refusals import refused_spec

PLAIN = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
DERIVED = [
    kind
    for kind in vars(kv_cache_interface).values()
    if isinstance(kind, type)
    and issubclass(kind, FullAttentionSpec | SlidingWindowSpec)
    and kind not in {FullAttentionSpec, SlidingWindowSpec}
]


@pytest.mark.parametrize(
    "spec",
    [
        FullAttentionSpec(**PLAIN),
        FullAttentionSpec(**PLAIN, sliding_window=64),
        SlidingWindowSpec(**PLAIN, sliding_window=64),
    ],
)
def test_full_and_sliding_attention_are_grafted(spec):
    assert refused_spec(spec) is None


@pytest.mark.parametrize("kind", DERIVED, ids=lambda kind: kind.__name__)
def test_layers_derived_from_these_are_refused_by_name(kind):
    """R-SWA, static sinks, MLA with a window: a subclass is not a promise to attend alike."""
    spec = object.__new__(kind)
    assert refused_spec(spec) == f"layers of kind {kind.__name__} are not supported"


def test_vllm_still_derives_layers_from_these():
    assert {"MLAAttentionSpec", "SinkFullAttentionSpec"} <= {kind.__name__ for kind in DERIVED}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (ChunkedLocalAttentionSpec(**PLAIN, attention_chunk_size=64), "kind ChunkedLocalAttentionSpec"),
        (FullAttentionSpec(**PLAIN, attention_chunk_size=64), "chunked attention"),
        (FullAttentionSpec(**PLAIN, non_causal=True), "later tokens"),
    ],
)
def test_llama4s_chunks_and_layers_that_look_ahead_are_refused(spec, words):
    assert words in refused_spec(spec)


def test_fields_that_decide_are_vllms():
    assert issubclass(AttentionSpec, KVCacheSpec)
    assert {"attention_chunk_size", "non_causal", "sliding_window"} <= {
        f.name for f in dataclasses.fields(FullAttentionSpec)
    }
