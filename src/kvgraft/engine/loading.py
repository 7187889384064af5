"""Load a decoder and its tokenizer from a directory or a hub id, and give it a fingerprint."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvgraft.config.setting import quoted
from kvgraft.errors import ConfigError, ModelError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SAMPLED_WEIGHTS = 64
"""Elements of each weight tensor that enter the fingerprint; a fine-tune changes practically all of them."""


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


def load_model(name: str, *, dtype: str = "auto", device: str = "auto") -> LoadedModel:
    """Load `name`: the bundled `graft-tiny`, a Hugging Face directory, or a hub id.

    Raises:
        ConfigError: `name`, `dtype` or `device` cannot be used as given.
        ModelError: The directory is corrupt or holds a model that transformers cannot load as a decoder.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    source = _resolve(name)
    torch_dtype, torch_device = _dtype(dtype), _device(device)
    try:
        config = AutoConfig.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch_dtype, config=config)
    except Exception as error:
        raise ModelError(_load_failure(name, error)) from error
    torch.nn.Module.to(model, torch_device)
    tokenizer = _load_tokenizer(source)
    return adopt_model(name, model, tokenizer)


def adopt_model(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> LoadedModel:
    """Describe a model that is in memory already."""
    config = model.config.get_text_config(decoder=True)
    max_model_len = getattr(config, "max_position_embeddings", None) or 1 << 20
    return LoadedModel(name, model, tokenizer, fingerprint(model, tokenizer), int(max_model_len))


def embedding_size(model: PreTrainedModel) -> int:
    """Rows of the model's token embedding."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return len(weight)


def fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Digest what decides K/V: configuration, dtype, a sample of every weight tensor, and the tokenizer."""
    digest = hashlib.blake2b(digest_size=16, person=b"kvgraft.model")
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


def _resolve(name: str) -> str:
    from kvgraft.models import BUNDLED_MODEL, bundled_model_path

    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ConfigError(
            f"{quoted(name)} names no model; give a Hugging Face directory, a hub id or {BUNDLED_MODEL!r}"
        )
    if name == BUNDLED_MODEL:
        return str(bundled_model_path())
    path = Path(name)
    looks_local = path.is_absolute() or name.startswith((".", "~")) or path.exists()
    if not looks_local:
        return name
    path = path.expanduser()
    if not path.is_dir():
        raise ConfigError(
            f"model directory {name} does not exist; give a Hugging Face directory, a hub id or {BUNDLED_MODEL!r}"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(f"{name} has no config.json; give the directory that `save_pretrained` wrote")
    return str(path)


def _dtype(name: str) -> torch.dtype | str:
    if name == "auto":
        return "auto" if torch.cuda.is_available() else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {name!r}; choose auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}; choose auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device 'cuda' was asked for but torch sees none; use --device cpu or install a CUDA build of torch"
        )
    return device


def _load_tokenizer(source: str) -> PreTrainedTokenizerBase | None:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception:  # noqa: BLE001 - a directory without a tokenizer still serves token ids
        return None


def _load_failure(name: str, error: Exception) -> str:
    return (
        f"cannot load model {name}: {one_line(error).rstrip('.')}; check the directory or hub id, or try 'graft-tiny'"
    )
