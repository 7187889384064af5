"""Model files that cannot be right, refused at a glance: libraries would first build them, or fill memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.errors import ModelError, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

GGUF_MAGIC = b"GGUF"
_MOST_LAYERS = 10_000
"""Ten times what the deepest decoders have; each costs memory as it is built, with weights or without."""
_SIZES = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
"""Names that configurations of decoders share."""


def require_sizes(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a configuration with sizes that no model has.

    Args:
        name: What the user called the model.
        config: As in config.json; the text part of one that sees counts, too.

    Raises:
        ModelError: A size is below 1, or there are absurdly many layers.
    """
    for size in _SIZES:
        value = config.get(size)
        if isinstance(value, int | float) and not value >= 1:
            raise ModelError(
                f"config.json of model {name} says {size} {value}, which must be at least 1; fetch it again"
            )
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int | float) and layers > _MOST_LAYERS:
        raise ModelError(
            f"config.json of model {name} says num_hidden_layers {layers}, and more than {_MOST_LAYERS} are not built; fetch "
            "it again"
        )
    text = config.get("text_config")
    if isinstance(text, dict):
        require_sizes(name, text)


def require_magic(name: str, path: Path) -> None:
    """Refuse a file that does not begin as GGUF files do.

    Args:
        name: What the user called it.
        path: Where it lies.

    Raises:
        ModelError: It is empty, another kind of file, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ModelError(f"cannot read {name}: {one_line(error)}; check the path and its permissions") from error
    if begin != GGUF_MAGIC:
        kind = f"begins with {begin!r}" if begin else "is empty"
        raise ModelError(f"{name} is no GGUF file: it {kind}; give a file that begins with {GGUF_MAGIC!r}")
