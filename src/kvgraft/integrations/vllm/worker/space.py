"""The name of a rank's space in stores: everything that K/V depend on besides the text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from kvgraft.graft.weights import named_state, weights_digest
from kvgraft.integrations.vllm.worker.self_check import probe_kv
from kvgraft.memory.store.layout import Field, RowLayout
from kvgraft.memory.store.record import space_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.graft.rope import RopeSpec
    from kvgraft.integrations.vllm.worker.sparse_pass import RankModel


def row_layout(rank: RankModel) -> RowLayout:
    """Return the layout of a token's K/V in a stored row: layers group by group, as in every `KVBlock` of this rank."""
    fields = []
    for group in rank.groups:
        for layer in group.layers:
            one = Field(layer.spec.num_kv_heads, layer.spec.head_size, layer.dtype)
            fields += [one, one]
    return RowLayout(tuple(fields), json.dumps([_described(spec) for spec in rank.rope]))


@torch.inference_mode()
def weights_of(rank: RankModel) -> str:
    """Digest this rank's part of the model. All ranks must come here in the same step.

    The digest is over every element of the model's parameters and buffers, and over the K/V that it computes for a fixed
    text: on a CPU vLLM repacks the weights of linear layers out of sight, and they show in what they compute. Bits count,
    so engines with different arithmetic share nothing.

    Complexity: one pass over the weights, and a forward pass of some tokens.
    """
    probed = ((f"probe.{index}", tensor) for index, tensor in enumerate(probe_kv(rank)))
    return weights_digest([*named_state(rank.model), *probed])


def space_of(rank: RankModel, layout: RowLayout, weights: Sequence[str], number: int) -> str:
    """Name the space of a rank's K/V.

    Args:
        rank: The model.
        layout: Of its K/V.
        weights: Digests of all ranks' parts, in their order: what a rank computes depends on the parts of the others.
        number: Of the rank.
    """
    config = rank.vllm_config.model_config
    windows = json.dumps([[len(group.layers), group.window] for group in rank.groups])
    return space_name(
        "vllm",
        " ".join(weights),
        str(config.dtype),
        str(config.quantization),
        layout.description,
        windows,
        f"{number}/{len(weights)}",
    )


def _described(spec: RopeSpec | None) -> list[object] | None:
    return None if spec is None else [spec.pairing.value, weights_digest([("inv_freq", spec.inv_freq)])]
