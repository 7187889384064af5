"""Where states of a prompt are recorded."""

from __future__ import annotations

import pytest

from kvgraft.errors import ConfigError
from kvgraft.prefix import BranchingPoints, EndOfPrompt, EveryTokens, RecordingPrompt, affordable_states


def test_at_the_end():
    assert EndOfPrompt().positions(RecordingPrompt(prompt_len=100)) == [99]
    assert EndOfPrompt().positions(RecordingPrompt(prompt_len=100, alignment=64)) == [64]
    assert EndOfPrompt().positions(RecordingPrompt(prompt_len=100, prefix_len=64, alignment=64)) == []
    assert EndOfPrompt().positions(RecordingPrompt(prompt_len=63, alignment=64)) == []
    assert EndOfPrompt().positions(RecordingPrompt(prompt_len=64, alignment=64)) == []
    assert EndOfPrompt().positions(RecordingPrompt(prompt_len=128, alignment=64)) == [64]
    assert EndOfPrompt().positions(RecordingPrompt(prompt_len=1)) == []


def test_at_branching_points():
    assert BranchingPoints().positions(RecordingPrompt(prompt_len=100, branching_len=40)) == [40, 99]
    assert BranchingPoints().positions(RecordingPrompt(prompt_len=100, prefix_len=40, branching_len=40)) == [99]
    assert BranchingPoints().positions(RecordingPrompt(prompt_len=100)) == [99]
    assert BranchingPoints().positions(RecordingPrompt(prompt_len=100, prefix_len=99, branching_len=99)) == []
    assert BranchingPoints().positions(RecordingPrompt(prompt_len=100, branching_len=64, alignment=64)) == [64]
    assert BranchingPoints().positions(RecordingPrompt(prompt_len=100, prefix_len=39, branching_len=40)) == [99]
    assert BranchingPoints().positions(RecordingPrompt(prompt_len=100, prefix_len=38, branching_len=40)) == [40, 99]
    assert BranchingPoints(max_states=1).positions(RecordingPrompt(prompt_len=100, branching_len=40)) == [40]


def test_at_every_so_many_tokens():
    assert EveryTokens(30).positions(RecordingPrompt(prompt_len=100)) == [30, 60, 90, 99]
    assert EveryTokens(30).positions(RecordingPrompt(prompt_len=100, prefix_len=60)) == [90, 99]
    assert EveryTokens(30).positions(RecordingPrompt(prompt_len=90)) == [30, 60, 89]
    assert EveryTokens(30).positions(RecordingPrompt(prompt_len=100, alignment=16)) == [32, 64, 96]
    assert EveryTokens(30, max_states=2).positions(RecordingPrompt(prompt_len=100)) == [90, 99]


@pytest.mark.parametrize("policy", [EndOfPrompt(0), BranchingPoints(0), EveryTokens(10, 0)])
def test_nothing_is_affordable_without_a_budget(policy):
    assert policy.positions(RecordingPrompt(prompt_len=100, branching_len=40)) == []


def test_a_budget_in_bytes():
    assert affordable_states(1000, 300) == 3
    assert affordable_states(0, 300) == 0
    for budget_bytes, state_bytes in ((1, 0), (-1, 1)):
        with pytest.raises(ConfigError, match="give at least 0 and at least 1"):
            affordable_states(budget_bytes, state_bytes)


def test_an_interval_has_tokens():
    with pytest.raises(ConfigError, match="interval must be at least 1, not 0"):
        EveryTokens(0)
