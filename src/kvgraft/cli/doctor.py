"""`kvgraft doctor`: what is installed, and what a model's self-check proves."""

from __future__ import annotations

import json
import platform
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from kvgraft import __version__
from kvgraft.cli.model_options import add_model_options, engine_config, load_llm

if TYPE_CHECKING:
    import argparse

    from kvgraft.engine import LLM

_PACKAGES = ("numpy", "torch", "transformers", "tokenizers", "safetensors")
_ENGINES = ("embedded", "vllm", "sglang")


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="check the installation and a model",
        description="Print versions, load a model and run its self-check. Exit code 1 if shifted reuse is refused.",
    )
    parser.add_argument(
        "--engine",
        choices=_ENGINES,
        default="embedded",
        help="kvgraft's own engine, or an adapter to another one, and then run in its environment (default embedded)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check and report."""
    if args.engine == "embedded":
        found = _embedded(args)
    else:
        # Not the default of --model: an engine is started for a model that was asked for, and the bundled one is ours.
        found = import_module(f"kvgraft.integrations.{args.engine}.doctor").diagnose(
            getattr(args, "setting_model", None)
        )
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        width = max(map(len, found))
        for name, value in found.items():
            print(f"{name:{width}s}  {_words(value)}")
    return 1 if str(found["shifted_reuse"]).startswith("refused") else 0


def _embedded(args: argparse.Namespace) -> dict[str, object]:
    llm = load_llm(engine_config(args), shows_stages=not args.json)
    import torch

    check = llm.self_check
    pairings = {
        ("none" if spec is None else f"{spec.pairing} over {spec.rotary_dim} channels")
        for spec in llm.adapter.rope or ()
    }
    return {
        "kvgraft": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device",
        "model": llm.loaded.name,
        "model_type": llm.loaded.model.config.model_type,
        "fingerprint": llm.loaded.fingerprint,
        "dtype": str(llm.loaded.model.dtype).removeprefix("torch."),
        "device": str(llm.loaded.model.device),
        "tokenizer": _tokenizer(llm),
        "layers": llm.adapter.num_layers,
        "kv_bytes_per_token": llm.adapter.pool.bytes_per_token,
        "num_slots": llm.adapter.pool.num_slots,
        **_states(llm),
        "attention": llm.adapter.attention.reason,
        "sparse_forward_error": check.forward_error,
        "rope": ", ".join(sorted(pairings)) or "-",
        "rope_error": check.rope_error,
        "shifted_reuse": "refused: " + check.refusal if check.refusal else "accepted",
    }


def _states(llm: LLM) -> dict[str, object]:
    """Return what layers keep instead of K/V; nothing for a model of attention layers alone."""
    states, layers = llm.adapter.states, llm.adapter.layers
    if states is None:
        return {}
    return {
        "state_layers": len(layers.mixers),
        "bytes_per_state": states.bytes_per_state,
        "num_states": states.num_states,
    }


def _tokenizer(llm: LLM) -> str:
    """Return the result of the probe of the tokenizer; one that fails it is not loaded."""
    from kvgraft.engine.model.tokenizer_probe import probe_tokenizer

    loaded = llm.loaded
    if loaded.tokenizer is None:
        return "none; prompts are token ids"
    return probe_tokenizer(loaded.name, loaded.tokenizer, loaded.vocab_size)


def _words(value: object) -> object:
    return "; ".join(map(str, value)) if isinstance(value, list) else value


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
