"""Tests of the connector inside a real vLLM; `make test-vllm` runs them in an environment of their own."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvgraft.donors import DonorCatalogue
from kvgraft.types import Fidelity

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "standins")]  # engines.py and models.py; stand-ins of other tests too

from triton_on_cpu import VARIABLE, use_runner_v2  # noqa: E402 - one of ours

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py", "contract/*"]
else:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "2"),
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    if os.environ.get(VARIABLE):
        use_runner_v2(os.environ[VARIABLE])


def pytest_addoption(parser):
    parser.addoption("--walks", default="8", help="random walks of each kind in test_pending_blocks.py")


def pytest_configure(config):
    if importlib.util.find_spec("vllm") is not None:
        config.addinivalue_line("filterwarnings", "default")  # vLLM and its dependencies warn of their own accord


@pytest.fixture
def no_exact_fronts(monkeypatch):
    """Lookups take what donor and prompt begin with for moved text: it is exact then and treated like any graft."""

    def find_moved(self, query, find=DonorCatalogue.find):
        return [replace(match, fidelity=Fidelity.SHIFTED) for match in find(self, query)]

    monkeypatch.setattr(DonorCatalogue, "find", find_moved)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")
