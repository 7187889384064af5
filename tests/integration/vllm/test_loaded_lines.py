"""What vLLM loads of kvgraft: the figure may only fall."""

from __future__ import annotations

from tests.loaded_lines import loaded_lines

_DEFAULTS = """
import kvgraft.integrations.vllm.connector
from kvgraft.config import VLLMConfig
from kvgraft.integrations.vllm.selection import chosen_policy

chosen_policy(VLLMConfig())
"""


def test_no_more_lines_are_loaded():
    assert loaded_lines(_DEFAULTS) <= 17_940
