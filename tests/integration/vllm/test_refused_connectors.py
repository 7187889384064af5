"""The engine does not start with connectors around ours that would show a store what a graft computed."""

from __future__ import annotations

import gc

import pytest
from models import save_tiny
from vllm import LLM
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from engines import BLOCK, OURS, TOKEN_STORE, beside, multi


@pytest.mark.parametrize(
    ("connector", "reason"),
    [
        (multi(OURS, TOKEN_STORE), "use GraftMultiConnector of kvgraft.integrations.vllm"),
        (multi(TOKEN_STORE, OURS), "use GraftMultiConnector of kvgraft.integrations.vllm"),
        (multi(TOKEN_STORE, multi(OURS, TOKEN_STORE)), "use GraftMultiConnector of kvgraft.integrations.vllm"),
        (multi(TOKEN_STORE, beside(OURS, TOKEN_STORE)), "use GraftMultiConnector of kvgraft.integrations.vllm"),
        (beside(OURS, TOKEN_STORE, saves_by_metadata=[]), "answer for it with 'saves_by_metadata': ['TokenStore']"),
    ],
    ids=["first", "second", "nested", "nested-ours", "unknown"],
)
def test_the_engine_does_not_start_with_connectors_that_cannot_stand_together(model_folder, connector, reason):
    does_not_start(model_folder, connector, reason)


def test_the_engine_does_not_start_with_an_option_that_takes_our_place(model_folder):
    """vLLM keeps our module and puts the name of a connector of its own in it."""
    does_not_start(model_folder, OURS, "--kv-offloading-size takes the place of kvgraft's", kv_offloading_size=1)


def does_not_start(model_folder, connector, reason, **options):
    try:
        with pytest.raises(Exception, match=r".") as raised:
            LLM(
                model=save_tiny("llama", model_folder),
                dtype="float32",
                skip_tokenizer_init=True,
                enforce_eager=True,
                block_size=BLOCK,
                max_model_len=512,
                kv_transfer_config=KVTransferConfig(**connector),
                **options,
            )
        assert "\n" not in str(raised.value)
        assert reason in str(raised.value)
    finally:
        ensure_kv_transfer_shutdown()
        gc.collect()
        cleanup_dist_env_and_memory()
