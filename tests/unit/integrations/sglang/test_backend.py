"""What a server gets whose options do not go with forward passes of ours."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from kvgraft.config import SGLangConfig, resolve
from kvgraft.errors import ConfigError
from kvgraft.graft.rope import RopePairing, RopeSpec
from kvgraft.integrations.sglang.backend import _fingerprint, _possible, _remark_on_chunks, _weights
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


@pytest.mark.parametrize(
    ("size", "tp_rank", "num_lines"), [(-1, 0, 1), (0, 0, 1), (-1, 1, 0), (8192, 0, 0), (None, 0, 0)]
)
def test_start_says_once_what_is_not_copied_without_chunks(caplog, size, tp_rank, num_lines):
    ctx = context(chunked_prefill_size=size)
    ctx.tp_rank = tp_rank
    with caplog.at_level(logging.WARNING):
        _remark_on_chunks(ctx)
    assert sum("nothing after a new head" in record.message for record in caplog.records) == num_lines


ROPE = [RopeSpec(torch.ones(4), RopePairing.HALF)]
CONFIG = {
    "_name_or_path": "/models/a",
    "transformers_version": "5.0",
    "rms_norm_eps": 1e-6,
    "id2label": {0: "a"},
    "text_config": {"_name_or_path": "/models/a/text", "sliding_window": None},
}


def model(dtype="bfloat16", quantization=None, **changed):
    config = SimpleNamespace(to_dict=lambda: {**CONFIG, **changed})
    weights = {"weight": torch.ones(2)}
    runner = SimpleNamespace(model=SimpleNamespace(state_dict=lambda: weights))
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config, dtype=dtype, quantization=quantization),
        tp_worker=SimpleNamespace(model_runner=runner),
    )


def names(ctx, rope=ROPE):
    """The namespaces' part and the space's, of the same weights."""
    fingerprint = _fingerprint(ctx, rope)
    return fingerprint, _weights(ctx, fingerprint)


@pytest.mark.parametrize(
    "other",
    [
        {"rms_norm_eps": 1e-5},
        {"text_config": {"sliding_window": 512}},
        {"attention_multiplier": 0.1},
        {"dtype": "float16"},
        {"quantization": "fp8"},
    ],
)
def test_same_weights_that_compute_otherwise_share_nothing(other):
    assert all(mine != others for mine, others in zip(names(model()), names(model(**other)), strict=True))


def test_same_weights_with_other_angles_share_nothing():
    turned = [RopeSpec(torch.full((4,), 0.5), RopePairing.HALF)]
    assert all(mine != others for mine, others in zip(names(model()), names(model(), turned), strict=True))


def test_where_a_model_lies_does_not_count():
    moved = {"_name_or_path": "/b", "transformers_version": "5.1", "text_config": {"sliding_window": None}}
    assert names(model(**moved)) == names(model())
