"""Policies of other packages: how they are found, what is refused of them, and what clients may name."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from kvgraft import factories
from kvgraft.config import EngineConfig, ServerConfig, SGLangConfig, VLLMConfig, resolve
from kvgraft.errors import ConfigError, IntegrationError, PolicyError
from kvgraft.graft.select import (
    SELECTION_GROUP,
    NoRecompute,
    Observable,
    RandomShare,
    SelectionPolicy,
    register_selection_policy,
    selection_policy,
)
from kvgraft.graft.select.base import SelectionContext
from kvgraft.graft.select.guard import PolicySteps, policy_error
from kvgraft.http.errors import APIError
from kvgraft.http.fields import Fields
from kvgraft.integrations.sglang.planning.planner import chosen_policy as sglang_policy
from kvgraft.integrations.vllm.selection import chosen_policy as vllm_policy
from kvgraft.reuse import selection_names as names_of_policies
from kvgraft.reuse.policy import configured_policy
from kvgraft.reuse.selection_names import selection_names
from kvgraft.server.options import parse_options

HERE = __name__.rpartition(".")[2]


class Share(RandomShare):
    """Takes the configured share, as a `RatioPolicy`."""

    name = "share"


@dataclass(frozen=True)
class Sees(NoRecompute):
    name = "sees"
    observes = frozenset({Observable.LOGITS})


class Nameless(SelectionPolicy):
    recompute_ratio = 0.0

    def steps(self, context):
        """None."""


class Unbuildable(NoRecompute):
    name = "unbuildable"

    def __init__(self):
        raise RuntimeError("no licence")


@pytest.fixture
def module(monkeypatch):
    """This module under a name that can be imported."""
    monkeypatch.setitem(sys.modules, "my_policies", sys.modules[__name__])
    return "my_policies"


@pytest.fixture
def installed(monkeypatch, module):
    entries = {"share": "Share", "sees": "Sees", "nameless": "Nameless", "gone": "Gone", "text": "HERE"}
    found = [EntryPoint(name, f"{module}:{value}", SELECTION_GROUP) for name, value in entries.items()]
    monkeypatch.setattr(factories, "entry_points", lambda group: found if group == SELECTION_GROUP else [])
    names_of_policies._installed_names.cache_clear()
    yield
    names_of_policies._installed_names.cache_clear()


def build(name, **options):
    return configured_policy(name, first_k=16, recompute_ratio=0.3, **options)


@pytest.mark.usefixtures("installed")
def test_an_entry_point_is_a_setting_of_every_engine_by_its_name():
    for kind in (EngineConfig, ServerConfig, VLLMConfig, SGLangConfig):
        assert kind(selection="share").selection == "share"
    assert resolve(ServerConfig, {"selection": "share"}, environ={}).config.selection == "share"
    assert build("share") == Share(0.3)
    assert vllm_policy(VLLMConfig(selection="share")) == sglang_policy(SGLangConfig(selection="share")) == Share(0.1)


def test_a_registered_class_and_module_class_are_found(module):
    register_selection_policy("mine", Share)
    for name in ("mine", f"{module}:Share"):
        assert build(EngineConfig(selection=name).selection) == Share(0.3)


@pytest.mark.usefixtures("installed")
def test_what_an_engine_cannot_show_is_refused():
    assert build("sees") == Sees()
    for chosen, config in (
        (vllm_policy, VLLMConfig(selection="sees")),
        (sglang_policy, SGLangConfig(selection="sees")),
    ):
        with pytest.raises(
            ConfigError, match="has to see logits, which this engine does not show; choose none, random"
        ):
            chosen(config)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("shaer", ConfigError, "did you mean 'share'"),
        ("gone", IntegrationError, "cannot be loaded"),
        ("text", IntegrationError, "is no class that extends"),
        ("nameless", IntegrationError, "name cannot be read"),
        ("no_such_module:Class", IntegrationError, "ModuleNotFoundError.*PYTHONPATH"),
        ("my_policies:Missing", IntegrationError, "has no attribute"),
        ("my_policies:Unbuildable", IntegrationError, "no licence"),
    ],
)
def test_what_is_no_policy_is_refused_in_one_line(name, error, message):
    with pytest.raises(error, match=message) as caught:
        build(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "query_seam", "a:b"])
def test_names_that_cannot_be_registered(name):
    with pytest.raises(ConfigError):
        register_selection_policy(name, Share)
    with pytest.raises(ConfigError, match="no class that extends"):
        register_selection_policy("mine", list)


@pytest.mark.parametrize("name", ["query_seem", "nonsense", "a:", ":B", "a b:C", "../x:Y"])
def test_a_setting_that_nobody_offers_is_refused_where_it_is_read(name):
    with pytest.raises(ConfigError, match=r"unknown selection .* choose none, random, .* module:Class"):
        EngineConfig(selection=name)


def test_a_misspelt_setting_names_the_closest():
    with pytest.raises(ConfigError, match="did you mean 'query_seam'"):
        EngineConfig(selection="query_seem")


@pytest.mark.usefixtures("installed")
def test_clients_name_what_is_installed_or_built_in_and_import_nothing(module):
    def asked(selection):
        fields = Fields({"kvgraft": {"selection": selection}})
        return parse_options(fields, max_tokens=1, logprobs=None, default_reuse="graft").request.selection

    assert {"share", "none", "query_seam"} <= set(selection_names())
    assert [asked(name) for name in ("share", "none", "query_seam")] == ["share", "none", "query_seam"]
    for name in (f"{module}:Share", "nonsense", "os:path"):
        with pytest.raises(APIError, match="must be one of"):
            asked(name)
        with pytest.raises(ConfigError, match="unknown selection policy"):
            configured_policy(name, first_k=1, may_import=False)
    assert isinstance(selection_policy(f"{module}:Share", may_import=True), Share)


def test_installed_packages_are_looked_through_once(monkeypatch, installed):
    first = selection_names()
    monkeypatch.setattr(factories, "entry_points", lambda group: pytest.fail(f"{group} is looked through again"))
    assert selection_names() == first


def test_a_policy_that_has_no_name_to_tell_is_called_by_its_class():
    class Shy(NoRecompute):
        @property
        def name(self):
            raise RuntimeError("who asks?")

    assert str(policy_error(Shy(), "it failed")) == "selection policy Shy: it failed"
    assert str(policy_error(Share(0.1), "it failed")) == "selection policy share: it failed"


def test_observes_that_cannot_be_read_any_more_is_an_error_of_the_policy():
    class Blind(NoRecompute):
        @property
        def observes(self):
            raise KeyError("no eyes")

    context = SelectionContext(*(np.arange(4) for _ in dataclasses.fields(SelectionContext)))
    with pytest.raises(PolicyError, match="none: KeyError: 'no eyes'"):
        PolicySteps(Blind(), dataclasses.replace(context, num_tokens=4)).first()
