"""Load a decoder and its tokenizer from a directory, a hub id or a GGUF file, and give it a fingerprint."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvgraft.config import quoted
from kvgraft.engine.model.tokenizer_probe import probe_tokenizer
from kvgraft.errors import ConfigError, ModelError, is_out_of_memory, one_line
from kvgraft.models import configuration_of, find_checkpoint, load_failure, require_on_hub, require_sizes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvgraft.engine.model.gguf import GGUFFile
    from kvgraft.models import Checkpoint
    from kvgraft.types import TokenArray

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SAMPLED_WEIGHTS = 64
"""Elements of each weight tensor that enter the fingerprint; a fine-tune changes practically all of them."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
_OTHER_SENSES = ("vision_model.", "vision_tower.", "multi_modal_projector.")
"""Tensors of models that see, of which the text decoder is loaded alone (Llama 4); requests with images are refused."""
_NAMED_KEYS, _LONGEST_KEY = 3, 120


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A decoder ready to be adapted.

    Attributes:
        name: What the user called it.
        model: In evaluation mode, on its device.
        tokenizer: Its tokenizer, or None where the directory has none (token ids only).
        fingerprint: Digest of weights, dtype, configuration and tokenizer; part of every namespace.
        max_model_len: Longest sequence that the configuration allows.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    fingerprint: str
    max_model_len: int

    @property
    def vocab_size(self) -> int:
        """Token ids that the embedding knows."""
        return embedding_size(self.model)

    def decode(self, token_ids: TokenArray) -> str:
        """Return the text of tokens.

        Raises:
            ConfigError: There is no tokenizer.
        """
        if self.tokenizer is None:
            raise ConfigError(f"{self.name} has no tokenizer; put its tokenizer.json beside it")
        return str(self.tokenizer.decode(token_ids))


def load_model(name: str, *, dtype: str = "auto", device: str = "auto") -> LoadedModel:
    """Load `name`: `graft-tiny`, `smollm2-135m`, a Hugging Face directory, a hub id, or a GGUF file, dequantised to `dtype`.

    Raises:
        ImportError: It is a GGUF file and the extra `gguf` is not installed.
        ConfigError: `name`, `dtype` or `device` cannot be used as given.
        ModelError: The directory or file is corrupt, or holds a model that transformers cannot load as a decoder, or
            other weights than its configuration says.
    """
    checkpoint = find_checkpoint(name)
    if configuration_of(checkpoint) is None and checkpoint.gguf is None:
        require_on_hub(checkpoint.source)
    gguf = _opened_gguf(checkpoint)
    torch_dtype, torch_device = _dtype(dtype, gguf), _device(device)
    with _without_log(), nullcontext() if gguf is None else gguf.translated_once():
        model = _load_decoder(checkpoint, gguf, torch_dtype)
        tokenizer = _load_tokenizer(checkpoint, gguf)
    try:
        torch.nn.Module.to(model, torch_device)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise ModelError(_load_failure(checkpoint, error)) from error
        raise ModelError(f"model {name} cannot be moved to {torch_device}: {one_line(error)}") from error
    if tokenizer is not None:
        probe_tokenizer(name, tokenizer, embedding_size(model))
    return adopt_model(name, model, tokenizer, b"" if gguf is None else gguf.digest())


def adopt_model(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, content: bytes = b""
) -> LoadedModel:
    """Describe a model that is in memory already; `content` is what else its fingerprint covers."""
    config = model.config.get_text_config(decoder=True)
    max_model_len = getattr(config, "max_position_embeddings", None) or 1 << 20
    return LoadedModel(name, model, tokenizer, fingerprint(model, tokenizer, content), int(max_model_len))


def embedding_size(model: PreTrainedModel) -> int:
    """Rows of the model's token embedding."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return len(weight)


def eos_token_ids(loaded: LoadedModel) -> frozenset[int]:
    """Tokens that end a text, as the model's generation settings name them, otherwise its tokenizer; none if neither does."""
    generation = loaded.model.generation_config
    configured = generation.eos_token_id if generation else None
    if configured is None and loaded.tokenizer is not None:
        configured = loaded.tokenizer.eos_token_id
    if configured is None:
        return frozenset()
    named = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in named if token < loaded.vocab_size)


def fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, content: bytes = b"") -> str:
    """Digest what decides K/V: configuration, dtype, a sample of every weight tensor, and the tokenizer.

    Args:
        model: In the precision that it runs in.
        tokenizer: None if it has none.
        content: Digest of the file that all of it comes from, where there is one: every byte counts then.
    """
    digest = hashlib.blake2b(content, digest_size=16, person=b"kvgraft.model")
    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_") and k != "transformers_version"}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for weight_name, weight in model.named_parameters():
        flat = weight.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLED_WEIGHTS)
        digest.update(f"{weight_name}{tuple(weight.shape)}{weight.dtype}".encode())
        digest.update(flat[::step].float().cpu().numpy().tobytes())
    if tokenizer is not None:
        digest.update(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode())
    return digest.hexdigest()


def _opened_gguf(checkpoint: Checkpoint) -> GGUFFile | None:
    """Open the file that a checkpoint is, if it is one; nothing of GGUF is imported for others."""
    if checkpoint.gguf is None:
        return None
    from kvgraft.engine.model.gguf import GGUFFile

    return GGUFFile.opened(checkpoint.name, checkpoint.gguf)


def _load_decoder(checkpoint: Checkpoint, gguf: GGUFFile | None, dtype: torch.dtype | str) -> PreTrainedModel:
    """Load configuration and weights; weights that the checkpoint does not hold are refused."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    name = checkpoint.name
    loaded: Any
    try:
        config = AutoConfig.from_pretrained(checkpoint.source, **checkpoint.arguments)
    except Exception as error:
        raise ModelError(_load_failure(checkpoint, error)) from error
    require_sizes(name, config.to_dict())
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"model {name} has type {quoted(config.model_type)}, for which transformers has no causal language model; "
            "choose a text decoder"
        )
    try:
        # Mismatches are let through here only to be named: weights that transformers would make up are refused.
        loaded = AutoModelForCausalLM.from_pretrained(
            checkpoint.source,
            dtype=dtype,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **checkpoint.arguments,
            **({} if gguf is None else gguf.dequantised()),
        )
    except Exception as error:
        raise ModelError(_load_failure(checkpoint, error)) from error
    model: PreTrainedModel
    model, info = loaded
    _require_weights(name, info, _OTHER_SENSES if config.get_text_config(decoder=True) is not config else ())
    if gguf is not None:
        gguf.finish(model)
    return model


def _dtype(name: str, gguf: GGUFFile | None) -> torch.dtype | str:
    if name == "auto":
        own = "auto" if gguf is None else gguf.dtype
        return own if torch.cuda.is_available() else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {name!r}; choose auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"unknown device {quoted(name)}; choose auto, cpu or cuda") from error
    if device.type not in {"cpu", "cuda"}:
        raise ConfigError(f"device {quoted(name)} is not supported; choose auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device {quoted(name)} was asked for but torch sees none; use --device cpu or install a CUDA build of torch"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {quoted(name)} was asked for but torch sees {torch.cuda.device_count()} of them")
    return device


def _require_weights(name: str, info: Mapping[str, Collection[Any]], left_out: tuple[str, ...]) -> None:
    """Refuse a model with weights that its checkpoint does not hold, or not in that shape: transformers makes them up.

    Tied embeddings and buffers that a model computes for itself are not among them.

    Args:
        name: What the user called the model.
        info: transformers' account of what it loaded.
        left_out: Beginnings of the names of tensors that the decoder of a larger model has no place for.

    Raises:
        ModelError: There are such weights, or weights that the model has no place for.
    """
    reshaped = [f"{key} {tuple(found)} instead of {tuple(due)}" for key, found, due in info["mismatched_keys"]]
    problems = [
        f"{len(keys)} tensors {kind} ({_some(keys)})"
        for kind, keys in (
            ("are missing", info["missing_keys"]),
            ("are unexpected", [key for key in info["unexpected_keys"] if not key.startswith(left_out)]),
            ("have another shape", reshaped),
            ("could not be read", info["error_msgs"]),
        )
        if keys
    ]
    if problems:
        raise ModelError(
            f"the weights of model {name} do not fit its configuration: {'; '.join(problems)}; fetch the checkpoint "
            "again, or correct the configuration"
        )


def _some(keys: Collection[str]) -> str:
    first = [" ".join(key.split())[:_LONGEST_KEY] for key in sorted(keys)[:_NAMED_KEYS]]
    return ", ".join(first) + (", ..." if len(keys) > _NAMED_KEYS else "")


@contextmanager
def _without_log() -> Iterator[None]:
    """Keep transformers from logging a table of what it loaded; `_require_weights` says what is wrong in one line."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _load_tokenizer(checkpoint: Checkpoint, gguf: GGUFFile | None) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model, None if it has none.

    Raises:
        ModelError: It has one that cannot be used.
    """
    from transformers import AutoTokenizer

    if gguf is not None and not gguf.has_tokenizer:
        return None
    if Path(checkpoint.source).is_dir() and gguf is None and not _has_tokenizer_files(checkpoint.source):
        return None  # transformers would make an empty one for some families
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint.source, **checkpoint.arguments)
    except Exception as error:
        if gguf is None and not _has_tokenizer_files(checkpoint.source):
            return None
        raise ModelError(
            f"cannot load the tokenizer of model {checkpoint.name}: {load_failure(checkpoint.name, error)}; fetch its files "
            "again, or remove them to serve token ids"
        ) from error
    return tokenizer


def _has_tokenizer_files(source: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    if Path(source).is_dir():
        return any((Path(source) / file).exists() for file in _TOKENIZER_FILES)
    return any(isinstance(try_to_load_from_cache(source, file), str) for file in _TOKENIZER_FILES)


def _load_failure(checkpoint: Checkpoint, error: Exception) -> str:
    if is_out_of_memory(error):
        return (
            f"the weights of model {checkpoint.name} do not fit into memory; choose a smaller model, or dtype bfloat16"
        )
    remedy = "check the directory or hub id" if checkpoint.gguf is None else "use the model's Hugging Face directory"
    return f"cannot load model {checkpoint.name}: {load_failure(checkpoint.name, error)}; {remedy}, or try 'graft-tiny'"
