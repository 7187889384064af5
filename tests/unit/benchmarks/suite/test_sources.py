"""Data sets of the tables: which rows there are on this machine, and which requests each has."""

from __future__ import annotations

import json

import pytest
from benchmarks.suite.datasets import DatasetsSettings
from benchmarks.suite.quality import QualitySettings
from benchmarks.suite.sources import DATASETS, chosen_datasets, load_dataset

from kvgraft.errors import ConfigError


def named(name):
    (found,) = [each for each in DATASETS if each.name == name]
    return found


@pytest.fixture
def data(tmp_path):
    documents = [{"doc": name, "text": f"text of {name}"} for name in "ab"]
    requests = [
        {"rid": rid, "group": group, "parts": [{"doc": "a"}, {"doc": "b"}], "answers": ["right"]}
        for rid, group in enumerate(["xquad", "hotpot8", "hotpot9"])
    ]
    rows = [
        {"input": f"{dataset} {row} {template}", "dataset": dataset, "row": row, "answers": f"answer {row}"}
        for dataset in ("samsum", "cnn_dailymail")
        for row in (1, 2)
        for template in "xy"
    ]
    for name, lines in {"rag.docs": documents, "rag.requests": requests, "xtemplate": rows}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(tmp_path)


def test_rows_are_chosen_by_name_pack_or_family():
    assert [each.name for each in chosen_datasets(["rag"])] == ["rag: XQuAD", "rag: HotpotQA"]
    assert [each.name for each in chosen_datasets(["agents"])] == [
        each.name for each in DATASETS if each.pack.startswith("agent_")
    ]
    assert [each.name for each in chosen_datasets(["ShareGPT"])] == ["ShareGPT"]
    assert chosen_datasets([]) == DATASETS


def test_a_row_that_is_none_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"no data set 'rags'; choose of .*rag: XQuAD"):
        chosen_datasets(["rag", "rags"])


def test_packs_that_are_not_there_are_named_and_the_built_in_ones_are_there(tmp_path, data):
    nothing = DatasetsSettings(data=str(tmp_path / "none"))
    assert [each.name for each in nothing.present] == ["builtin", "builtin:rag"]
    assert len(nothing.absent) == len(DATASETS) - 2
    assert "rag: XQuAD" not in DatasetsSettings(data=data).absent
    assert QualitySettings(data=data).present == ("builtin", "rag")
    assert QualitySettings(data=data).absent == ("adversarial", "lines", "tools")


def test_a_pack_of_two_sources_is_two_rows(data):
    assert [each.rid for each in load_dataset(named("rag: XQuAD"), data).requests] == ["0"]
    assert [each.group for each in load_dataset(named("rag: HotpotQA"), data).requests] == ["hotpot8", "hotpot9"]


def test_templates_of_one_row_belong_together(data):
    requests = load_dataset(named("xtemplate: SAMSum"), data).requests
    assert [each.keys for each in requests] == [("samsum 1",), ("samsum 1",), ("samsum 2",), ("samsum 2",)]
    assert requests[2].answers == ("answer 2",)


def test_another_pack_of_that_name_is_refused(tmp_path):
    (tmp_path / "xtemplate.jsonl").write_text('{"input": "text"}\n')
    with pytest.raises(ConfigError, match="no request of a group that begins with 'samsum'"):
        load_dataset(named("xtemplate: SAMSum"), str(tmp_path))
