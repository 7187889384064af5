"""Models in one GGUF file: checks before and after transformers translates it, so that it is that model and no other.

transformers turns the file into a configuration, dequantised weights, a tokenizer and its chat template. It passes over what
it does not know: tensors without a place, scalings of positions, windows, the ids that end a text. Each of these would give
another model without a word, so they are compared here, and a file that is not reproduced whole is refused.
"""

from __future__ import annotations

import hashlib
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import isclose
from typing import TYPE_CHECKING, Any

import torch

from kvgraft.engine.model.gguf_header import read_header
from kvgraft.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel

    from kvgraft.engine.model.gguf_header import GGUFHeader, TensorEntry

_END_TOKENS = ("eos", "eot", "eom")
_NAMED_TENSORS = 3
_REMEDY = "use the model's Hugging Face directory"
_TRANSLATION = threading.Lock()


def require_gguf_packages() -> None:
    """Raise `ImportError` that names the extra unless what transformers needs for GGUF is installed."""
    for package in ("gguf", "accelerate"):
        try:
            import_module(package)
        except ImportError as error:
            raise ImportError(f"GGUF models need {package}: pip install 'kvgraft[gguf]'", name=package) from error


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A file with a model, whose header was read.

    Attributes:
        name: What the user called the model.
        path: Of the file.
        header: Its metadata, and where its tensors lie.
    """

    name: str
    path: Path
    header: GGUFHeader

    @classmethod
    def opened(cls, name: str, path: Path) -> GGUFFile:
        """Read the header of a file and check that the rest is there.

        Raises:
            ImportError: The extra `gguf` is not installed.
            ModelError: The file is no GGUF, truncated, a part of several, or has tensors of a type that nothing here reads.
        """
        header = read_header(name, path)
        require_gguf_packages()
        parts = header.values.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            raise ModelError(
                f"{name} is one of {parts} parts of a model; join them first, with llama-gguf-split --merge"
            )
        for tensor in header.tensors:
            end = tensor.offset + _num_bytes(name, tensor)
            if end > header.num_bytes:
                raise ModelError(
                    f"{name} is truncated: {header.num_bytes:,} bytes, and {tensor.name} ends at {end:,}; fetch it again"
                )
        return cls(name, path, header)

    @property
    def dtype(self) -> torch.dtype:
        """The checkpoint's own precision: that of its tensors besides float32 ones, bfloat16 if they are quantized."""
        from gguf import GGMLQuantizationType as Type

        kinds = {tensor.ggml_type for tensor in self.header.tensors} - {Type.F32}
        if not kinds:
            return torch.float32
        return torch.float16 if kinds == {Type.F16} else torch.bfloat16

    @property
    def has_tokenizer(self) -> bool:
        """Whether the file holds a vocabulary."""
        return bool(self.header.values.get("tokenizer.ggml.tokens"))

    @staticmethod
    def dequantised() -> Mapping[str, object]:
        """Return what makes transformers unpack all weights, rather than compute with packed ones where it has kernels."""
        from transformers import GgufConfig

        return {"quantization_config": GgufConfig(dequantize=True)}

    @staticmethod
    @contextmanager
    def translated_once() -> Iterator[None]:
        """Let transformers read a file's metadata once, quickly, and make its table of names once, without a progress bar.

        It does so again for the configuration, the weights and the tokenizer, and makes the table for every module of a
        model, though both follow from the file alone: SmolLM2-135M takes 18 s of processor time so and 3 s in here. Threads
        take turns.
        """
        import gguf
        from transformers import modeling_gguf_pytorch_utils as translation

        from kvgraft.engine.model.gguf_reader import QuickGGUFReader

        replaced = [
            (gguf, "GGUFReader", cache(QuickGGUFReader)),
            (gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
            (translation, "tqdm", lambda tensors, **_: tensors),
        ]
        with _TRANSLATION, ExitStack() as restored:
            for owner, attribute, replacement in replaced:
                restored.callback(setattr, owner, attribute, getattr(owner, attribute))
                setattr(owner, attribute, replacement)
            yield

    def finish(self, model: PreTrainedModel) -> None:
        """Check that `model` is what the file says, and set what ends its texts.

        The configuration loses the note that its weights were quantized: they no longer are, and it names the file.

        Raises:
            ModelError: The file holds tensors that the model has no place for, or positions that it treats in another way.
        """
        _require_every_tensor(self.name, model, self.header)
        config = model.config.get_text_config(decoder=True)
        _require_positions(self.name, config, self.header)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        ends = _end_token_ids(self.header)
        model.config.eos_token_id = ends
        if model.generation_config is not None:
            model.generation_config.eos_token_id = ends

    def digest(self) -> bytes:
        """Digest of every byte of the file, about 0.1 s for 100 MB."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16, person=b"kvgraft.gguf")).digest()


def _end_token_ids(header: GGUFHeader) -> list[int] | None:
    """Ids that end a text, a turn or a message by the file, ascending; None where it names none.

    transformers has the default of the model's class where its table of GGUF keys has no place for them.
    """
    found = (header.values.get(f"tokenizer.ggml.{end}_token_id") for end in _END_TOKENS)
    return sorted({int(token_id) for token_id in found if token_id is not None}) or None


def _num_bytes(name: str, tensor: TensorEntry) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.ggml_type)]
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"{name} holds {tensor.name} in GGML type {tensor.ggml_type}, which the package gguf does not know; {_REMEDY}"
        ) from error
    return int(tensor.elements // block_elements * block_bytes)


def _require_every_tensor(name: str, model: PreTrainedModel, header: GGUFHeader) -> None:
    """Refuse a file with tensors that hold more or fewer values than the model has parameters; shared ones count once."""
    held = sum(tensor.elements for tensor in header.tensors)
    due = sum(parameter.numel() for parameter in model.parameters())
    if held != due:
        unplaced = _unplaced(model, header)
        named = f" ({', '.join(unplaced[:_NAMED_TENSORS])} among them)" if unplaced else ""
        raise ModelError(
            f"{name} holds {held:,} values{named} and transformers has a place for {due:,}; {_REMEDY}, or another file"
        )


def _unplaced(model: PreTrainedModel, header: GGUFHeader) -> list[str]:
    """Tensors that no parameter is called after, as far as the package gguf knows names of this architecture."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architectures = [key for key, value in MODEL_ARCH_NAMES.items() if value == header.architecture]
    if not architectures:
        return []
    names = get_tensor_name_map(architectures[0], int(header.of_architecture("block_count") or 0))
    known = {names.get_name(key, (".weight", ".bias")) for key in model.state_dict()}
    return [tensor.name for tensor in header.tensors if tensor.name not in known]


def _require_positions(name: str, config: PreTrainedConfig, header: GGUFHeader) -> None:
    """Refuse a file if transformers has not taken over its rotation of positions or its window of attention."""
    parameters = list(_rope_parameters(getattr(config, "rope_parameters", None)))
    base = header.of_architecture("rope.freq_base")
    bases = [p.get("rope_theta", 0.0) for p in parameters]
    if isinstance(base, float) and bases and not any(isclose(base, found, rel_tol=1e-6) for found in bases):
        raise ModelError(
            f"{name} rotates positions with base {base:g}, which transformers does not take over; {_REMEDY}"
        )
    scaling = header.of_architecture("rope.scaling.type")
    if scaling not in (None, "none") and all(p.get("rope_type", "default") == "default" for p in parameters):
        raise ModelError(f"{name} scales positions ({scaling}), which transformers does not take over; {_REMEDY}")
    window = header.of_architecture("attention.sliding_window")
    if window and getattr(config, "sliding_window", None) != window:
        raise ModelError(f"{name} has a sliding window of {window}, which transformers does not take over; {_REMEDY}")


def _rope_parameters(found: object) -> Iterable[Mapping[str, Any]]:
    """Parameters of the rotation, one for all layers or one by kind of layer."""
    if not isinstance(found, dict):
        return []
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]
