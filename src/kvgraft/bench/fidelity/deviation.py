"""Deviation of reused K/V from those of a full prefill, token by token. For the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.bench.fidelity.oracle import Oracle
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvgraft.bench.fidelity.settings import Setting
    from kvgraft.engine import LLM, Probe
    from kvgraft.types import TokenArray


def informed(settings: Sequence[Setting], llm: LLM, prompt: TokenArray) -> list[Setting]:
    """Return `settings` with every oracle among them measured on `prompt`; costs a full prefill if there is one."""
    if not any(isinstance(setting.policy, Oracle) for setting in settings):
        return list(settings)
    known = deviation(llm, prompt)
    return [
        replace(setting, policy=replace(setting.policy, deviation=known))
        if isinstance(setting.policy, Oracle)
        else setting
        for setting in settings
    ]


def deviation(llm: LLM, prompt: TokenArray) -> NDArray[np.float64]:
    """Return the distance of reused from computed K/V of every token of `prompt`, (num_tokens,), without unit.

    Distances of keys and of values are taken in every layer in units of their mean norm there, and summed.
    """
    with llm.probe(prompt, 1, selection="none", correction="none") as probe:
        reused = _all_kv(llm, probe)
    total = torch.zeros(len(prompt), dtype=torch.float64)
    with llm.probe(prompt, 1, ReuseMode.OFF) as probe:
        for layer, exact in enumerate(_all_kv(llm, probe)):
            for before, after in zip(reused[layer], exact, strict=True):
                total += (before - after).norm(dim=1) / after.norm(dim=1).mean()
    return np.asarray(total)


def _all_kv(llm: LLM, probe: Probe) -> list[list[torch.Tensor]]:
    """Return copies per layer of keys and values, (num_tokens, heads * head_dim), on the CPU."""
    return [[each.flatten(1).double().cpu() for each in probe.kv(layer)] for layer in range(llm.adapter.num_layers)]
