"""The metrics of vLLM that our dashboard asks for are those that it declares. Its source is read, nothing is started."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tests.deploy.engine_metrics import VLLM, mistakes

SOURCE = Path(find_spec("vllm").submodule_search_locations[0]) / "v1" / "metrics" / "loggers.py"


def test_metrics_of_the_dashboard_are_declared_as_it_reads_them():
    source = SOURCE.read_text()
    assert 'labelnames = ["model_name", "engine"]' in source
    assert not mistakes(VLLM, source, "vllm:")
