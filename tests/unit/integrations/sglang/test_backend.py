"""What a server gets whose options do not go with forward passes of ours."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from kvgraft.config import SGLangConfig, resolve
from kvgraft.errors import ConfigError
from kvgraft.integrations.sglang.backend import _possible
from kvgraft.integrations.sglang.refusals import refused_recomputation


def settings(**environ):
    return resolve(SGLangConfig, environ={f"KVGRAFT_{name.upper()}": value for name, value in environ.items()})


def context(model=None, **options):
    runner = SimpleNamespace(model=model or SimpleNamespace(model=lambda *_: None))
    return SimpleNamespace(server_args=SimpleNamespace(**options), tp_worker=SimpleNamespace(model_runner=runner))


@pytest.mark.parametrize(
    "options", [{"enable_lora": True}, {"lora_paths": ["a"]}, {"enable_dp_attention": True}, {"enable_pdmux": True}]
)
def test_servers_that_exchange_parts_of_the_model_refuse_passes(options):
    assert refused_recomputation(context(**options)) is not None


def test_plain_servers_do_not():
    assert refused_recomputation(context(enable_lora=None, lora_paths=None)) is None
    assert "decoder" in refused_recomputation(context(SimpleNamespace()))


def test_defaults_give_way_and_the_log_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        config = _possible(settings(), "--enable-lora")
    assert (config.selection, config.correction) == ("first_k", "none")
    assert [record.message.count("--enable-lora; ") for record in caplog.records] == [1, 1]


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [({"selection": "query_seam"}, "use selection=first_k"), ({"correction": "drift"}, "use correction=none")],
)
def test_what_was_asked_for_is_refused_in_a_line_that_names_the_remedy(asked, remedy):
    with pytest.raises(ConfigError, match=f"--enable-lora; {remedy}$"):
        _possible(settings(**asked), "--enable-lora")


def test_settings_that_need_no_pass_stay(caplog):
    config = _possible(settings(selection="none"), "--enable-lora")
    assert config == settings(selection="none").config
    assert not caplog.records
    assert _possible(settings(), None) == settings().config
