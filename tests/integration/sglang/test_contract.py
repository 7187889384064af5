"""What the adapter relies on in the installed SGLang is there, and drift is noticed."""

from __future__ import annotations

import pytest

from kvgraft.integrations.sglang import versions
from kvgraft.integrations.sglang.doctor import diagnose
from kvgraft.integrations.sglang.versions import Relied

# SGLang warns while it is imported on a CPU.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def test_installed_version_is_supported():
    assert versions.unsupported_version(versions.installed_version()) is None


def test_every_interface_is_as_relied_on():
    assert versions.drift() == []


@pytest.mark.parametrize(
    ("relied", "problem"),
    [
        (Relied("sglang.srt.mem_cache.registry:absent", ()), "absent"),
        (Relied("sglang.srt.absent:f", ()), "sglang.srt.absent"),
        (
            Relied("sglang.srt.mem_cache.registry:register_radix_cache_backend", ("factory", "name")),
            "takes name, factory",
        ),
        (Relied("sglang.srt.mem_cache.registry:register_radix_cache_backend", ("name",)), "new parameter factory"),
    ],
)
def test_drift_is_noticed(monkeypatch, relied, problem):
    monkeypatch.setattr(versions, "FUNCTIONS", (relied,))
    (line,) = versions.drift()
    assert problem in line


def test_renamed_field_is_noticed(monkeypatch):
    monkeypatch.setattr(versions, "FIELDS", {"sglang.srt.mem_cache.base_prefix_cache:MatchResult": ("device_indices",)})
    assert versions.drift() == ["sglang.srt.mem_cache.base_prefix_cache:MatchResult has no field device_indices"]


def test_plugin_is_registered_and_the_doctor_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("KVGRAFT_STATE_DIR", str(tmp_path))
    found = diagnose()
    assert found["plugin"].startswith("registered")
    assert found["shifted_reuse"] == "accepted"
    assert found["backend"].startswith("not live")
