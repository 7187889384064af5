"""The metrics of SGLang that our dashboard asks for are those that it declares. Its source is read, nothing is started."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.deploy.engine_metrics import SGLANG, mistakes

pytestmark = pytest.mark.engine

SOURCE = Path(find_spec("sglang").submodule_search_locations[0]) / "srt" / "observability" / "metrics_collector.py"


def test_metrics_of_the_dashboard_are_declared_as_it_reads_them():
    source = SOURCE.read_text()
    assert source.count('"model_name": get_serving().served_model_name') >= 2
    assert not mistakes(SGLANG, source, "sglang:")
