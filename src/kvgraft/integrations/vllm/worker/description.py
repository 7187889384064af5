"""What a rank found out about its engine, for `kvgraft doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.integrations.vllm.worker.layers import LayerGroup
    from kvgraft.integrations.vllm.worker.sparse_pass import RankModel


def description_of(
    groups: Sequence[LayerGroup], rank: RankModel | None, *, selection: str, refusal: str
) -> dict[str, object]:
    """Describe a rank.

    Args:
        groups: Its layers; empty where the engine was refused before they were looked at.
        rank: What the self-check has proved, or None.
        selection: Of the policy that took the place of the configured one, or empty.
        refusal: Why nothing is grafted, or empty.
    """
    layers = [layer for group in groups for layer in group.layers]
    rope = rank.rope if rank is not None else ()
    found: dict[str, object] = {
        "attention_backends": sorted({layer.module.get_attn_backend().get_name() for layer in layers}),
        "kv_layouts": sorted({layer.codec.name for layer in layers}),
        "kv_dtype": ", ".join(sorted({str(layer.dtype).removeprefix("torch.") for layer in layers})),
        "kv_cache_groups": [
            f"{len(group.layers)} layers, blocks of {group.block_size}"
            + (f", window {group.window}" if group.window else "")
            for group in groups
        ],
        "rope": sorted(
            {"none" if spec is None else f"{spec.pairing} over {spec.rotary_dim} channels" for spec in rope}
        ),
    }
    passed = "passed" if rank is not None else "waits for the first forward pass"
    found["selection"] = selection
    return {name: value for name, value in found.items() if value} | {"self_check": refusal or passed}
