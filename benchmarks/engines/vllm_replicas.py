"""Stock vLLM servers with `GraftConnector` that announce their donors, for `benchmarks/routing.py --engine vllm`."""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_server import COUNTED, ServerSettings, VLLMServer
from vllm_ttft import CONNECTOR

from replicas import PATIENCE_S, Replicas, post

if TYPE_CHECKING:
    from replicas import Server

BLOCK_TOKENS = 32
"""The least that vLLM's attention on a CPU takes."""
_HOST_BYTES = "2GiB"
_ENVIRON = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # `/reset_prefix_cache`
}
_KINDS = {"prefix": "exact", "segment": "shifted"}


class VLLMReplicas(Replicas):
    """vLLM, several times, in float32 on both cores each: one of them computes at a time.

    Args:
        venv: Environment with vLLM and kvgraft.
        model: Directory of the model.
        count: How many.
        first_port: Of three per server.
        share: They share a store, a directory that `reset` empties.
    """

    def __init__(self, venv: Path, model: str, count: int, first_port: int, *, share: bool = False) -> None:
        super().__init__(model, count, first_port, share=share)
        self._venv = venv

    def fields(self, reuse: str, index: int) -> dict[str, object]:
        """With reuse off, in a namespace of its own: vLLM's prefix cache would serve it otherwise."""
        asked: dict[str, object] = {"kv_transfer_params": {"kvgraft": reuse}}
        return asked | ({"cache_salt": f"alone-{index}"} if reuse == "off" else {})

    def reused(self) -> dict[str, float] | None:
        """Tokens reused so far: streams do not say it, metrics do, one engine step behind."""
        totals = {"exact": 0.0, "shifted": 0.0}
        for url in self.urls:
            post(url + "/v1/completions", {"prompt": [3, 4, 5], "max_tokens": 2, **self.fields("off", 0)})
        time.sleep(1.0)
        for url in self.urls:
            metrics = urllib.request.urlopen(url + "/metrics", timeout=PATIENCE_S).read().decode()
            for kind, value in COUNTED.findall(metrics):
                totals[_KINDS[kind]] += float(value)
        return totals

    def _forget(self, url: str) -> None:
        post(url + "/reset_prefix_cache?reset_external=true")

    def _begun(self, number: int) -> Server:
        ports, store = self._ports[number], self.store()
        options: dict[str, object] = {"announce_donors": True, "host_bytes": _HOST_BYTES, "lookup_deadline_ms": 1000}
        settings = ServerSettings(
            self._venv,
            Path(self._model),
            ports.http,
            {**CONNECTOR, "kv_connector_extra_config": options | ({"store": store} if store else {})},
            dtype="float32",
            block_size=BLOCK_TOKENS,
            environ=_ENVIRON,
            kv_events={
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{ports.events}",
                "replay_endpoint": f"tcp://*:{ports.replay}",
            },
        )
        return VLLMServer(settings).__enter__()
