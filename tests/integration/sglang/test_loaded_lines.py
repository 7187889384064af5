"""What SGLang loads of kvgraft: the figure may only fall."""

from __future__ import annotations

from tests.loaded_lines import loaded_lines

_DEFAULTS = """
import kvgraft.integrations.sglang.backend
from kvgraft.config.sglang import SGLangConfig
from kvgraft.reuse.policy import configured_policy

configured_policy(SGLangConfig().selection, first_k=1)
"""


def test_no_more_lines_are_loaded():
    assert loaded_lines(_DEFAULTS) <= 15_820
