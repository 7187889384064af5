from __future__ import annotations

import pytest

from kvgraft.config import VLLMConfig
from kvgraft.reuse.asked import asked_mode
from kvgraft.types import ReuseMode


@pytest.mark.parametrize("mode", [mode for mode in ReuseMode if mode is not ReuseMode.VERIFIED])
def test_modes_are_what_they_are_called(mode):
    assert asked_mode(str(mode), "field") == (mode, "")


def test_verified_reuses_exact_prefixes_alone_in_engines_without_drafts():
    """As a request's mode and as the configured one: grafting would make the answer approximate."""
    assert asked_mode("verified", "field") == (ReuseMode.EXACT, "")
    assert asked_mode(VLLMConfig(mode="verified").mode, "field") == (ReuseMode.EXACT, "")


@pytest.mark.parametrize("given", ["grafted", "", None, 5, ["graft"]])
def test_a_wrong_word_reuses_nothing_and_is_told(given):
    mode, wrong = asked_mode(given, "field")
    assert mode is ReuseMode.OFF
    assert "must be off, exact, graft, substitute, verified" in wrong
