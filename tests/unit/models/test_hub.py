"""Models of the hub: one question, five seconds, and one line that says what to do."""

from __future__ import annotations

import socket
import threading
from unittest.mock import MagicMock

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import RepositoryNotFoundError

from kvgraft.errors import ConfigError
from kvgraft.models import hub, require_on_hub


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    require_on_hub.cache_clear()
    yield
    require_on_hub.cache_clear()


@pytest.fixture
def answers(monkeypatch):
    """What the hub does when it is asked."""

    def set_to(action):
        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_, **__: action())

    return set_to


def fail():
    raise socket.gaierror(-2, "Name or service not known")


def test_an_unreachable_hub_names_both_remedies(answers):
    answers(fail)
    with pytest.raises(ConfigError, match="local directory, or set HF_HUB_OFFLINE=1") as caught:
        require_on_hub("some-org/no-model")
    assert str(caught.value).startswith("there is no folder some-org/no-model here, and the hub cannot be asked")
    assert "\n" not in str(caught.value)
    assert "Name or service not known" in str(caught.value)


def test_a_hub_that_hangs_is_not_awaited(answers, monkeypatch):
    monkeypatch.setattr(hub, "HUB_DEADLINE_S", 0.05)
    released = threading.Event()
    answers(released.wait)
    with pytest.raises(ConfigError, match="no answer in"):
        require_on_hub("some-org/no-model")
    released.set()


@pytest.mark.parametrize("is_offline", [True, False])
def test_what_the_cache_has_is_used_without_asking_again(answers, monkeypatch, is_offline):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "/cache/config.json")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    answers(fail)
    require_on_hub("some-org/model")
    assert constants.HF_HUB_OFFLINE


def test_offline_without_a_cached_model_is_refused_unasked(answers, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    answers(lambda: pytest.fail("it was asked"))
    with pytest.raises(
        ConfigError, match=r"no folder some-org/no-model here, .* not in the cache and HF_HUB_OFFLINE is set"
    ):
        require_on_hub("some-org/no-model")


def test_a_path_that_is_neither_here_nor_on_the_hub_is_called_both(answers):
    def refuse():
        raise RepositoryNotFoundError("404", response=MagicMock())

    answers(refuse)
    with pytest.raises(ConfigError, match="no folder models/nope here, and the hub has no model models/nope"):
        require_on_hub("models/nope")


def test_a_model_that_is_there_is_asked_for_once(answers):
    asked = []
    answers(lambda: asked.append(1))
    require_on_hub("some-org/model")
    require_on_hub("some-org/model")
    assert asked == [1]


def test_a_name_that_no_model_can_have_is_refused_unasked(answers):
    answers(lambda: pytest.fail("it was asked"))
    with pytest.raises(ConfigError, match="names no model"):
        require_on_hub("a/b/c")
