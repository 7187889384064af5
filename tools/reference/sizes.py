"""Tables of docs/sizes.md: bytes per token by model, and what stores were measured to read."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvgraft.engine.model.layers import ModelLayers
from kvgraft.memory.pool import LayerShape
from kvgraft.windows import SlidingWindow

if TYPE_CHECKING:
    from pathlib import Path

_BLOCK = re.compile(r"<!-- begin:(\w+) -->\n.*?<!-- end:\1 -->", re.DOTALL)
_GIB = 1 << 30


class Model(NamedTuple):
    """What `config.json` of a model says of its K/V."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    full_every: int = 1
    """Every so many layers one sees the whole prompt; the others have a sliding window."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in all layers."""
        windows = [None if (i + 1) % self.full_every == 0 else SlidingWindow(1024) for i in range(self.layers)]
        shapes = (LayerShape(self.kv_heads, self.head_dim),) * self.layers
        return sum(ModelLayers(shapes, tuple(windows)).bytes_per_token(self.dtype))


MODELS = (
    Model("SmolLM2-135M, float32", 30, 3, 64, torch.float32),
    Model("SmolLM2-135M", 30, 3, 64),
    Model("Qwen2.5-7B", 28, 4, 128),
    Model("Llama-3.1-8B", 32, 8, 128),
    Model("Mistral-7B-v0.3", 32, 8, 128),
    Model("Qwen3-8B", 36, 8, 128),
    Model("Qwen3-30B-A3B", 48, 4, 128),
    Model("Qwen3-32B", 64, 8, 128),
    Model("Llama-3.1-70B", 80, 8, 128),
    Model("Gemma-3-4B (5 of 6 layers have a window)", 34, 4, 256, full_every=6),
    Model("Phi-3-mini-4k", 32, 32, 96),
)


def sizes_page(page: str, results: Path) -> str:
    """Return the page with its tables written anew.

    Args:
        page: Markdown with markers.
        results: Folder of records.
    """
    tables = {"models": _models(), "stores": _stores(results)}
    return _BLOCK.sub(lambda found: f"<!-- begin:{found[1]} -->\n\n{tables[found[1]]}\n<!-- end:{found[1]} -->", page)


def _models() -> str:
    lines = ["| model | layers x K/V heads x head size | K/V of a token | tokens in 1 GiB |", "|---|---|---|---|"]
    for model in MODELS:
        size = model.bytes_per_token
        shape = f"{model.layers} x {model.kv_heads} x {model.head_dim}"
        lines.append(f"| {model.name} | {shape} | {size / 1024:g} KiB | {_GIB // size:,} |")
    return "\n".join(lines) + "\n"


def _stores(results: Path) -> str:
    lines = ["| store | span, tokens | read | bandwidth |", "|---|---|---|---|"]
    for record in ("store-bandwidth", "store-remote"):
        stores = json.loads((results / f"{record}.json").read_text(encoding="utf-8"))["result"]["stores"]
        for name, runs in stores.items():
            run = next(run for run in runs if run["rows"].startswith("SmolLM2"))
            span = run["spans"][-1]
            rate = span["tokens"] * run["bytes_per_token"] / span["tier_wall_ms"] * 1000 / _GIB
            lines.append(f"| {name} | {span['tokens']:,} | {span['tier_wall_ms']:,.0f} ms | {rate:.1f} GiB/s |")
    return "\n".join(lines) + "\n"
