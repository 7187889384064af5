"""The doctor without an engine: what is missing is named, and a live process's own word counts."""

from __future__ import annotations

import json
import os

import pytest

from kvgraft.integrations.sglang import doctor
from kvgraft.integrations.sglang.status import live_statuses, write_status
from kvgraft.integrations.sglang.versions import unsupported_version, untested_patch


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.setenv("KVGRAFT_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def supported(monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda: "0.5.23")
    monkeypatch.setattr(doctor, "drift", list)
    monkeypatch.setattr(doctor, "_plugin_problem", lambda: None)


def write_config(path, **fields):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(fields))
    return str(path)


def test_without_sglang_reuse_is_refused(monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda: None)
    found = doctor.diagnose()
    assert found["shifted_reuse"] == "refused: SGLang is not installed"
    assert found["backend"].startswith("not live")


@pytest.mark.parametrize(
    ("version", "served"),
    [
        ("0.5.22", True),
        ("0.5.23", True),
        ("0.5.23+cpu", True),
        ("0.5.23.post1", True),
        ("0.5.23rc1", False),
        ("0.5.21", False),
        ("0.6.0", False),
    ],
)
def test_versions(version, served):
    assert (unsupported_version(version) is None) == served


def test_patch_release_is_served_with_a_warning(supported, monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda: "0.5.23.post1+cpu")
    found = doctor.diagnose()
    assert found["shifted_reuse"] == "accepted"
    assert found["sglang"] == "0.5.23.post1+cpu (a patch release of 0.5.23, whose interfaces it has; not tested itself)"
    assert untested_patch("0.5.23+cpu") is None


def test_settings_that_nobody_reads_are_named(supported, monkeypatch):
    monkeypatch.setenv("KVGRAFT_MIN_RUNS", "32")
    reason = "KVGRAFT_MIN_RUNS is no setting; did you mean KVGRAFT_MIN_RUN?"
    found = doctor.diagnose()
    assert (found["settings"], found["shifted_reuse"]) == (reason, f"refused: {reason}")


def test_model_is_judged_by_its_configuration(supported, tmp_path):
    good = write_config(tmp_path / "good", architectures=["Qwen3ForCausalLM"])
    assert doctor.diagnose(good)["shifted_reuse"] == "accepted"
    other = write_config(tmp_path / "other", architectures=["DeepseekV3ForCausalLM"])
    assert doctor.diagnose(other)["shifted_reuse"] == "refused: architecture DeepseekV3ForCausalLM has not been checked"
    window = write_config(tmp_path / "window", architectures=["MistralForCausalLM"], sliding_window=4096)
    assert "sliding-window" in doctor.diagnose(window)["shifted_reuse"]
    assert "cannot be read" in doctor.diagnose(str(tmp_path / "absent"))["shifted_reuse"]


def test_live_process_is_shown_with_its_own_word(supported, tmp_path):
    write_status(tmp_path / "state", {"tp_rank": 0, "model": "m", "refusal": None})
    assert doctor.diagnose()["backend"] == f"live in process {os.getpid()} (rank 0, m)"
    assert doctor.diagnose()["shifted_reuse"] == "accepted"
    write_status(tmp_path / "state", {"tp_rank": 0, "model": "m", "refusal": "sliding-window layers"})
    assert doctor.diagnose()["shifted_reuse"] == "refused: sliding-window layers"


def test_files_of_processes_that_ended_are_removed(tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    (state / "1.json").write_text(json.dumps({"pid": 2**22 + 1}))
    (state / "2.json").write_text("not json")
    assert live_statuses(state) == []
    assert list(state.iterdir()) == []


def test_whitelist_that_leaves_the_plugin_out_is_named(monkeypatch):
    class Point:
        name = "kvgraft"

    monkeypatch.setattr(doctor, "entry_points", lambda group: [Point()])
    monkeypatch.setenv("SGLANG_PLUGINS", "other, another")
    assert "add kvgraft" in doctor.diagnose()["plugin"]
    monkeypatch.setenv("SGLANG_PLUGINS", "other, kvgraft")
    assert doctor.diagnose()["plugin"].startswith("registered")


def test_wrong_setting_is_named(supported, monkeypatch):
    monkeypatch.setenv("KVGRAFT_MIN_RUN", "1")
    assert doctor.diagnose()["shifted_reuse"].startswith("refused: KVGRAFT_MIN_RUN: min_run must be at least 16")
