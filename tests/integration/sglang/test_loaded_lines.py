"""What SGLang loads of kvgraft: the figure may only fall."""

from __future__ import annotations

from tests.loaded_lines import loaded_lines


def test_no_more_lines_are_loaded():
    assert loaded_lines("import kvgraft.integrations.sglang.backend") <= 15_970
