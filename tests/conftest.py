"""Shared fixtures and settings: one thread, seeds, and how property tests draw their cases."""

from __future__ import annotations

import logging
import os

# Before torch is imported, and inherited by every server that a test starts: in a model this small two OpenMP threads
# mostly wait for one another, and beside any other busy process they wait ten times as long.
os.environ["OMP_NUM_THREADS"] = "1"

import contextlib
import ctypes
import gc
import hashlib
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from kvgraft.donors import set_process_secret
from kvgraft.testing.registries import isolated_registries

set_process_secret(bytes(32))  # which runs below 32 tokens a lookup finds depends on it

# glibc keeps what engines and their threads have freed, gigabytes over many tests; elsewhere there is nothing to set.
with contextlib.suppress(OSError, AttributeError):
    _libc = ctypes.CDLL("libc.so.6")
    _libc.mallopt(-8, 2)  # M_ARENA_MAX
    _libc.mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: longer blocks go back to the system as soon as they are freed

# No limit of time anywhere: a busy machine is no bug. A failing example is printed with what repeats it.
_COMMON = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("local", _COMMON)
settings.register_profile("ci", _COMMON, database=None)
_PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "local")
settings.load_profile(_PROFILE)


def _commit() -> str:
    command = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "no git"
    return found.stdout.strip() or "no commit"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """In the profile `ci` the commit decides which cases are drawn: new ones with every commit, the same in all its runs."""
    if _PROFILE == "ci" and config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = int.from_bytes(hashlib.sha256(_commit().encode()).digest()[:4], "big")


def pytest_report_header(config: pytest.Config) -> str:
    """Say how to draw the same cases again."""
    seed = config.getoption("--hypothesis-seed")
    if seed is None:
        return f"property tests: profile {_PROFILE}, drawn at random; what fails is printed and tried first in the next run"
    return f"property tests: profile {_PROFILE}; draw the same cases again with --hypothesis-seed={seed}"


def pytest_collection_finish() -> None:
    """What is loaded by now stays to the end: no collection of garbage looks at it again."""
    gc.freeze()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261121)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Make a test do the same in every run."""
    torch.manual_seed(0)


@pytest.fixture
def looks_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what a graft does or leaves behind, where tiny models and short texts would make none that pays."""
    monkeypatch.setattr("kvgraft.engine.kv.planning.QUERY_ROWS", 0)


@pytest.fixture(autouse=True)
def _registries():
    """What a test registers is forgotten behind it."""
    with isolated_registries():
        yield


@pytest.fixture(autouse=True)
def _logging():
    """Commands set up the logs of their process: later tests want their own handlers, and to hear the package again."""
    root, package = logging.getLogger(), logging.getLogger("kvgraft")
    handlers, levels = set(root.handlers), (root.level, package.level)
    yield
    for handler in set(root.handlers) - handlers:
        root.removeHandler(handler)  # it writes to the stderr of a test that is over
    root.setLevel(levels[0])
    package.setLevel(levels[1])
    logging.captureWarnings(capture=False)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A tiny model with the bundled model's tokenizer."""
    from transformers import AutoTokenizer

    from kvgraft.models import bundled_model_path
    from kvgraft.testing.tiny_models import tiny_model

    path = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)
