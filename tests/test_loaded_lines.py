"""What a process loads of kvgraft: these figures may only fall."""

from __future__ import annotations

import pytest
from tests.loaded_lines import loaded_lines

_GRAFT = """
from kvgraft import LLM, SamplingParams

document = " ".join(f"Clause {each}: item {each * 7919 % 1013} is kept in hall {each * 31 % 17}." for each in range(30))
llm = LLM("graft-tiny")
for head in ("Read this. ", "You are patient. Sum up what follows in a line. "):
    (answer,) = llm.generate([head + document], SamplingParams(4))
assert answer.report.shifted_tokens
"""


@pytest.mark.parametrize(
    ("program", "most"),
    [("import kvgraft.router", 6_980), (_GRAFT, 27_050)],
    ids=["router", "embedded engine, two requests"],
)
def test_no_more_lines_are_loaded(program, most):
    assert loaded_lines(program) <= most
