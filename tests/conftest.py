"""Shared fixtures: one thread setting, seeds, and a model small enough to build in every test."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import settings

settings.register_profile("kvgraft", deadline=None, derandomize=True)
settings.load_profile("kvgraft")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261121)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _log_level():
    """Commands quieten the package's logger for their process; the next test wants to hear it again."""
    package = logging.getLogger("kvgraft")
    level = package.level
    yield
    package.setLevel(level)
