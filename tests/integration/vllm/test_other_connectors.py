"""A second connector would keep what grafts computed and serve it as exact: the engine does not start beside one."""

from __future__ import annotations

import gc

import pytest
from models import save_tiny
from vllm import LLM
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

OURS = {
    "kv_connector": "GraftConnector",
    "kv_connector_module_path": "kvgraft.integrations.vllm",
    "kv_role": "kv_both",
}
THEIRS = {"kv_connector": "TokenStore", "kv_connector_module_path": "token_store", "kv_role": "kv_both"}


def multi(*connectors):
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


@pytest.mark.parametrize(
    "connector",
    [multi(OURS, THEIRS), multi(THEIRS, OURS), multi(THEIRS, multi(OURS, THEIRS))],
    ids=["first", "second", "nested"],
)
def test_the_engine_does_not_start_beside_another_connector(model_folder, connector):
    try:
        with pytest.raises(Exception, match="must be vLLM's only KV connector") as raised:
            LLM(
                model=save_tiny("llama", model_folder),
                dtype="float32",
                skip_tokenizer_init=True,
                enforce_eager=True,
                block_size=32,
                max_model_len=512,
                kv_transfer_config=KVTransferConfig(**connector),
            )
        assert "\n" not in str(raised.value)
        assert "take it out of MultiConnector" in str(raised.value)
    finally:
        ensure_kv_transfer_shutdown()
        gc.collect()
        cleanup_dist_env_and_memory()
