"""Evidence on disk: it survives a restart exactly, and no file can stop a server that it was not written for."""

from __future__ import annotations

import json
import logging

import pytest

from kvgraft.errors import ConfigError
from kvgraft.fidelity.control import AnswerPart, RiskController, RiskTarget, load_state, save_state

TARGET = RiskTarget("first_token", 0.02, 0.05, ("full", "10 %", "none"))
BINDING = {"model": "abc", "policy": "query_seam v1"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "risk.json"


@pytest.fixture
def audited():
    controller = RiskController(TARGET, 2)
    for number in range(500):
        controller.audit("shifted", 2, float(number % 97 == 0) / 3, AnswerPart.FIRST)
        controller.audit("shifted", 2, 0.0, AnswerPart.LATER)
        controller.audit("composed", controller.notch("composed"), float(number < 3))
    return controller


def test_a_restart_changes_nothing(path, audited):
    save_state(path, audited, BINDING)
    again = load_state(path, TARGET, 2, BINDING)
    assert again.statements() == audited.statements()
    assert len({known.notch for parts in again.statements().values() for known in parts.values()}) == 2
    assert {part: known.audits for part, known in again.statements()["shifted"].items()} == {"first": 500, "later": 500}
    for loss in (0.0, 1.0, 0.3, *[1.0] * 30):
        for name, part in (
            ("shifted", AnswerPart.FIRST),
            ("shifted", AnswerPart.LATER),
            ("composed", AnswerPart.WHOLE),
        ):
            notch = audited.notch(name)
            assert again.notch(name) == notch
            assert again.audit(name, notch, loss, part) == audited.audit(name, notch, loss, part)


def test_without_a_file_nothing_is_known(path):
    assert load_state(path, TARGET, 2, BINDING).classes == {}


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("model", (TARGET, 2, BINDING | {"model": "def"})),
        ("policy", (TARGET, 2, BINDING | {"policy": "query_seam v2"})),
        ("loss", (RiskTarget("kl:1", 0.02, 0.05, TARGET.notches), 2, BINDING)),
        ("epsilon", (RiskTarget("first_token", 0.03, 0.05, TARGET.notches), 2, BINDING)),
        ("notches", (RiskTarget("first_token", 0.02, 0.05, ("full", "5 %", "none")), 2, BINDING)),
        ("start", (TARGET, 1, BINDING)),
    ],
)
def test_evidence_of_something_else_is_refused_and_kept(path, audited, what, other):
    save_state(path, audited, BINDING)
    before = path.read_text()
    with pytest.raises(ConfigError, match=f"audits of another {what}; give another path"):
        load_state(path, *other)
    assert path.read_text() == before


def corrupted(path):
    """Ways in which a file can be wrong."""
    good = json.loads(path.read_text())
    known = good["classes"]["shifted"]
    yield path.read_text()[: len(path.read_text()) // 2]
    yield "[" * 100_000
    yield from ("", "\x00\xff", "null", "[]", '{"version": 1}')
    yield json.dumps(good | {"version": 99})
    yield json.dumps(good | {"classes": []})
    yield json.dumps(good | {"classes": {"shifted": None}})
    for change in ({"notch": 3}, {"breaches": -1}, {"parts": []}, {"parts": {"first": None}}):
        yield json.dumps(good | {"classes": {"shifted": known | change}})
    evidence = known["parts"]["first"]
    yield json.dumps(good | {"version": 1, "classes": {"shifted": {"notch": 2, "breaches": 0} | evidence}})
    yield json.dumps(good | {"classes": {"shifted": known | {"parts": {"last": evidence}}}})
    changes = {
        "audits": True,
        "loss_sum": 1e9,
        "is_certified": 1,
        "certify": [0.0],
        "alarm": "x",
    }
    for key, value in changes.items():
        yield json.dumps(good | {"classes": {"shifted": known | {"parts": {"first": evidence | {key: value}}}}})
    certify = evidence | {"certify": [float("nan")] * 5}
    yield json.dumps(good | {"classes": {"shifted": known | {"parts": {"first": certify}}}})
    yield json.dumps(good | {"classes": {"shifted": {"notch": 1}}})


def test_a_corrupt_file_is_set_aside_with_one_line(path, audited, caplog):
    save_state(path, audited, BINDING)
    for text in list(corrupted(path)):
        path.write_text(text)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert load_state(path, TARGET, 2, BINDING).classes == {}, text
        (record,) = caplog.records
        assert "audits begin anew" in record.getMessage()
        assert "\n" not in record.getMessage()
        assert path.with_name("risk.json.corrupt").read_text() == text
        assert not path.exists()


def test_a_failed_write_leaves_the_old_file(path, audited, monkeypatch):
    save_state(path, audited, BINDING)
    before = path.read_text()

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_state(path, RiskController(TARGET, 2), BINDING)
    assert path.read_text() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]
