"""Options of commands that load a model, and their way into an `EngineConfig`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvgraft.config import EngineConfig

if TYPE_CHECKING:
    import argparse

    from kvgraft.engine import LLM

_SETTINGS = ("dtype", "device", "num_slots", "max_model_len", "selection", "recompute_ratio")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add `--model` and the engine settings that a command line needs; others come from `KVGRAFT_*`."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", default="graft-tiny", metavar="NAME", help="graft-tiny, a Hugging Face directory or a hub id"
    )
    group.add_argument("--dtype", help="auto, float32, bfloat16 or float16")
    group.add_argument("--device", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--num-slots", type=int, metavar="N", help="KV slots (tokens) on the device; default by memory")
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt plus output")
    group.add_argument(
        "--selection", metavar="POLICY", help="reused tokens to compute again: none, first_k, query_seam"
    )
    group.add_argument(
        "--recompute-ratio", type=float, metavar="R", help="share that query_seam computes again (default 0.05)"
    )


def engine_config(args: argparse.Namespace, **defaults: object) -> EngineConfig:
    """Settings by precedence: command line, then environment, then `defaults`, then the built-in ones."""
    given = {name: getattr(args, name) for name in _SETTINGS if getattr(args, name, None) is not None}
    return EngineConfig().updated(defaults).updated_from_env().updated(given)


def load_llm(args: argparse.Namespace, config: EngineConfig) -> LLM:
    """Load the model of the command line, quietly."""
    from kvgraft.engine import LLM

    _silence_libraries()
    return LLM(args.model, config)


def _silence_libraries() -> None:
    """Keep progress bars and warnings of libraries out of what commands print."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("kvgraft").setLevel(logging.ERROR)
