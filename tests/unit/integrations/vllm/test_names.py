"""Names that vLLM asks the package for: its connectors, and those that options of vLLM put in their place."""

from __future__ import annotations

import pytest

from kvgraft.errors import IntegrationError
from kvgraft.integrations import vllm


@pytest.mark.parametrize("name", ["OffloadingConnector", "SimpleCPUOffloadConnector", "LMCacheMPConnector"])
def test_an_option_that_takes_our_place_is_refused_in_one_line(name):
    """vLLM makes an AttributeError of its own out of any AttributeError, and our line would stand above it."""
    with pytest.raises(IntegrationError, match="--kv-offloading-size") as caught:
        getattr(vllm, name)
    assert "\n" not in str(caught.value)
    assert "GraftMultiConnector" in str(caught.value)


def test_other_names_are_missing_as_in_any_module():
    assert not hasattr(vllm, "SomethingElse")
