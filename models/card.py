"""Write the model card of `graft-tiny` from the figures that training recorded.

python models/card.py src/kvgraft/models/graft-tiny
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_TEMPLATE = """\
# graft-tiny

A small language model that ships with kvgraft so that its demo, tests and benchmarks run a real model without a download.

- Llama architecture: 6 layers, width 256, 8 query and 4 KV heads of 32, SwiGLU 704, RMSNorm, RoPE (theta 100,000), tied
  embeddings, {parameters:,} parameters, bf16 safetensors, byte-level BPE of 4,096 tokens.
- Trained at contexts up to {longest:,} tokens. The configuration admits 16,384 so that benchmarks can use longer prompts;
  its text there is not to be judged.
- Trained by `models/train.py` (seed {seed}, torch {torch}) on {training_tokens:,} tokens of the Python standard library's
  own sources, {tokens_seen:,} tokens seen, 35 % of them RAG-shaped prompts over its functions. Modules listed in
  `kvgraft.demo.documents.HELD_OUT`, with their tests, were never seen.
- It completes Python that looks right and copies from its context. It is no assistant; do not rely on its answers.

## Held-out loss

Mean cross-entropy (nats per token) of the last 64 tokens of 96 windows of held-out modules, with the whole context and
with only the 64 tokens in front of each target. The difference is what the context is worth.

| context | whole context | last 64 tokens only | gain |
|---|---|---|---|
{held_out}

## Loss curve

Training loss, smoothed over about 10 steps of 8,192 tokens; the jumps are where the context grows.

| step | context | loss |
|---|---|---|
{curve}

## License

Apache-2.0, as kvgraft. The training text is the Python standard library (PSF license).
"""
_CURVE_ROWS = 8


def model_card(record: dict[str, Any]) -> str:
    """Return the card as Markdown."""
    held_out = [
        f"| {r['context']:,} | {r['loss']:.3f} | {r['loss_last_64']:.3f} | {r['gain']:.3f} |"
        for r in record["held_out"]
    ]
    points = record["loss_curve"]
    shown = [points[round(i * (len(points) - 1) / (_CURVE_ROWS - 1))] for i in range(_CURVE_ROWS)]
    curve = [f"| {p['step']:,} | {p['context']:,} | {p['loss']:.3f} |" for p in shown]
    longest = max(phase["context"] for phase in record["phases"])
    return _TEMPLATE.format(**record | {"held_out": "\n".join(held_out), "curve": "\n".join(curve), "longest": longest})


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "README.md").write_text(model_card(json.loads((folder / "training.json").read_text())))
