"""Findings of `kvgraft doctor --engine sglang`: versions, whether SGLang will load the plug-in, and live schedulers."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from kvgraft import __version__
from kvgraft.config import Resolved, SGLangConfig, resolve
from kvgraft.config.sglang import BACKEND
from kvgraft.errors import ConfigError
from kvgraft.integrations.sglang.refusals import SUPPORTED_ARCHITECTURES
from kvgraft.integrations.sglang.status import live_statuses, state_directory
from kvgraft.integrations.sglang.versions import (
    SUPPORTED,
    drift,
    installed_version,
    unsupported_version,
    untested_patch,
)
from kvgraft.integrations.versions import installed

_GROUP = "sglang.srt.plugins"
_WHITELIST = "SGLANG_PLUGINS"


def diagnose(model: str | None = None) -> dict[str, object]:
    """Return findings in the order in which they should be read.

    `shifted_reuse` is `accepted`, or `refused: ` and the first reason that speaks against it. A running scheduler's own word
    comes last, after the reasons that show from outside.

    Args:
        model: Directory of a model; its configuration is looked at. None for none.
    """
    sglang = installed_version()
    resolved, config_problem = _config()
    live = live_statuses(state_directory(resolved.config.state_dir))
    plugin_problem = _plugin_problem()
    reasons = [
        unsupported_version(sglang),
        plugin_problem,
        config_problem,
        _drift() if unsupported_version(sglang) is None else None,
        None if model is None else _model_problem(Path(model)),
        *(status.get("refusal") for status in live),
    ]
    reason = next((reason for reason in reasons if reason), None)
    return {
        "kvgraft": __version__,
        "python": platform.python_version(),
        "torch": installed("torch") or "not installed",
        "sglang": _sglang(sglang),
        "sglang_supported": ", ".join(SUPPORTED),
        "plugin": plugin_problem or f"registered: SGLang loads it for --radix-cache-backend {BACKEND}",
        "settings": config_problem or "; ".join(resolved.warnings) or "good",
        "backend": "; ".join(map(_words, live)) or "not live: no scheduler of this user runs with it",
        "model": "-" if model is None else _model_problem(Path(model)) or f"{model}: served with reuse",
        "shifted_reuse": "accepted" if reason is None else f"refused: {reason}",
    }


def _config() -> tuple[Resolved[SGLangConfig], str | None]:
    try:
        return resolve(SGLangConfig), None
    except (ConfigError, ImportError) as error:
        return Resolved(SGLangConfig(), {}), str(error)


def _plugin_problem() -> str | None:
    names = {point.name for point in entry_points(group=_GROUP)}
    if BACKEND not in names:
        return f"no entry point {BACKEND} in {_GROUP}: install kvgraft into SGLang's environment"
    allowed = os.environ.get(_WHITELIST, "")
    if allowed and BACKEND not in {name.strip() for name in allowed.split(",")}:
        return f"{_WHITELIST}={allowed} keeps SGLang from loading it; add {BACKEND}"
    return None


def _sglang(found: str | None) -> str:
    if found is None:
        return "not installed"
    patch = untested_patch(found)
    return found if patch is None else f"{found} ({patch})"


def _drift() -> str | None:
    problems = drift()
    return f"SGLang has changed: {'; '.join(problems)}" if problems else None


def _model_problem(directory: Path) -> str | None:
    """Judge by the configuration; the rest is only known once the model is loaded."""
    try:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{directory / 'config.json'} cannot be read: {error}"
    architecture = next(iter(config.get("architectures") or []), "?")
    if architecture not in SUPPORTED_ARCHITECTURES:
        return f"architecture {architecture} has not been checked"
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return "sliding-window layers"
    return None


def _words(status: dict[str, object]) -> str:
    state = f"without reuse: {status['refusal']}" if status.get("refusal") else "live"
    return f"{state} in process {status['pid']} (rank {status['tp_rank']}, {status['model']})"
