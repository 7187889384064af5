"""The order in which Model Runner V2 calls a connector, on an engine that runs V1: V2 needs Triton, which a CPU has not.

vLLM's own `ActiveKVConnector` makes the calls. Before a forward pass it binds and, for synchronous loads alone, begins them;
the other loads, `wait_for_save` and all results wait until tokens are sampled.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest import MonkeyPatch  # noqa: PT013 - a type

PLACES = tuple(
    f"kvgraft.integrations.vllm.{name}" for name in ("engine_facts", "multi_connector", "worker.graft_worker")
)


def call_as_v2(patch: MonkeyPatch) -> list[str]:
    """Have engines that start from now on call connectors as V2 does; returns what was called, in order."""
    calls: list[str] = []
    open_steps: list[tuple[ActiveKVConnector, KVConnectorOutput, set[str]]] = []
    sample = GPUModelRunner.sample_tokens

    @contextmanager
    def step(scheduler_output, defer_finalize=False) -> Iterator[KVConnectorOutput]:
        assert not defer_finalize
        driver, output = _driver(calls), KVConnectorOutput()
        driver.pre_forward(scheduler_output)
        yield output
        calls.append("forward")
        driver.finish_forward()
        open_steps.append((driver, output, scheduler_output.finished_req_ids))

    def sample_tokens(self, grammar_output):
        found = sample(self, grammar_output)
        calls.append("sample")
        while open_steps:
            driver, output, finished = open_steps.pop()
            result = driver.post_forward(finished)
            for field in fields(output):
                setattr(output, field.name, getattr(result, field.name))
        return found

    def no_forward(scheduler_output, vllm_config):
        del vllm_config
        return _driver(calls).no_forward(scheduler_output)

    patch.setattr(KVConnectorModelRunnerMixin, "_get_kv_connector_output", staticmethod(step))
    patch.setattr(KVConnectorModelRunnerMixin, "kv_connector_no_forward", staticmethod(no_forward))
    patch.setattr(GPUModelRunner, "sample_tokens", sample_tokens)
    for place in PLACES:
        patch.setattr(f"{place}.takes_running_back", lambda vllm_config: False)
    return calls


def _driver(calls: list[str]) -> ActiveKVConnector:
    """Vllm's driver over the connector that is there; its constructor would register caches again."""
    driver = ActiveKVConnector.__new__(ActiveKVConnector)
    driver.kv_connector = _Watched(get_kv_transfer_group(), calls)
    driver.vllm_config = driver.kv_connector._vllm_config
    driver._pending_load_kwargs, driver._disabled = None, False
    return driver


class _Watched:
    """A connector whose calls are noted."""

    def __init__(self, connector, calls):
        self._connector, self._calls = connector, calls

    def __getattr__(self, name):
        found = getattr(self._connector, name)
        if name in {"start_load_kv", "wait_for_save"}:
            self._calls.append(name)
        return found
