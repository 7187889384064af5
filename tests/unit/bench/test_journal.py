"""What was measured survives a kill, and other arguments do not go on with it."""

from __future__ import annotations

import pytest

from kvgraft.bench.journal import Journal
from kvgraft.errors import ConfigError


def record(index, kl=0.5, suite="rag"):
    return {"suite": suite, "index": index, "settings": {"none": {"mean_kl": kl}}}


def test_a_run_goes_on_where_it_was(tmp_path):
    path = tmp_path / "f.requests.jsonl"
    journal = Journal(path, {"seed": 1})
    journal.add(record(4))
    journal.add(record(2))
    again = Journal(path, {"seed": 1})
    assert ("rag", 4) in again
    assert ("rag", 3) not in again
    assert ("lines", 4) not in again
    assert [each["index"] for each in again.under("rag")] == [2, 4]
    again.add(record(3))
    assert len(Journal(path, {"seed": 1})) == 3


@pytest.mark.parametrize("cut", [1, 20, 30])
def test_a_torn_last_line_is_measured_again(tmp_path, cut):
    path = tmp_path / "f.requests.jsonl"
    journal = Journal(path, {})
    journal.add(record(1))
    journal.add(record(2))
    path.write_bytes(path.read_bytes()[:-cut])
    again = Journal(path, {})
    assert (("rag", 1) in again, ("rag", 2) in again) == (True, False)
    again.add(record(2, kl=0.25))
    assert [each["settings"]["none"]["mean_kl"] for each in Journal(path, {}).under("rag")] == [0.5, 0.25]


def test_other_arguments_are_refused_by_name(tmp_path):
    path = tmp_path / "f.requests.jsonl"
    Journal(path, {"seed": 1, "limit": 3, "model": "m"}).add(record(1))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"other arguments \(limit, seed\).*another file") as caught:
        Journal(path, {"seed": 2, "limit": 4, "model": "m"})
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["[1]\n", "no json\n", '{"rows": []}\n', '{"arguments": {}}\nnonsense\n'])
def test_files_that_are_none_are_refused(tmp_path, content):
    path = tmp_path / "f.requests.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError):
        Journal(path, {})
    assert path.read_text() == content


def test_without_a_file_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    journal = Journal(None, {})
    journal.add(record(1))
    assert ("rag", 1) in journal
    assert not list(tmp_path.iterdir())


def test_records_are_found_by_all_fields_of_the_key(tmp_path):
    path, key = tmp_path / "f.jsonl", ("row", "variant", "round")
    journal = Journal(path, {}, key)
    for variant in ("off", "graft"):
        for number in (1, 0):
            journal.add({"row": "1024", "variant": variant, "round": number, "ttft_ms": number})
    again = Journal(path, {}, key)
    assert again.get("1024", "off", 1) == {"row": "1024", "variant": "off", "round": 1, "ttft_ms": 1}
    assert again.get("1024", "exact", 1) is None
    assert [each["round"] for each in again.under("1024", "off")] == [0, 1]
    assert [each["variant"] for each in again.under("1024")] == ["graft", "graft", "off", "off"]
