"""A vLLM engine in this process with the connector in it, and what tests ask of it."""

from __future__ import annotations

import gc
import math
import random
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models import VOCABULARY, save_tiny
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

BLOCK = 32
PATIENT = {"lookup_deadline_ms": 1e9, "repair_below_margin": 0}
"""No test depends on how fast the machine is: lookups never pass their deadline, except where that is the subject. Tiny
models are sure of no token: no first token waits for its repair, except where that is."""


OURS = {
    "kv_connector": "GraftConnector",
    "kv_connector_module_path": "kvgraft.integrations.vllm",
    "kv_role": "kv_both",
}
TOKEN_STORE = {"kv_connector": "TokenStore", "kv_connector_module_path": "token_store", "kv_role": "kv_both"}


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    num_cached: int
    report: dict[str, Any]

    @property
    def shifted(self) -> int:
        return self.report["shifted_tokens"]

    def assert_like(self, other: Answer, *, tolerance: float = 1e-4) -> None:
        """The same tokens, and the same probabilities of those that both list, up to the first near tie."""
        for position, (mine, theirs) in enumerate(zip(self.logprobs, other.logprobs, strict=True)):
            for token in mine.keys() & theirs.keys():
                assert math.isclose(mine[token], theirs[token], abs_tol=tolerance), (position, token)
            assert len(mine.keys() & theirs.keys()) >= 3
            best, second = sorted(theirs.values(), reverse=True)[:2]
            if best - second < 1e-3:
                return  # rounding may choose the other one, and what follows differs then
            assert self.tokens[position] == other.tokens[position]


class Engine:
    def __init__(self, llm: LLM, family: str) -> None:
        self.llm = llm
        self.family = family
        core = llm.llm_engine.engine_core.engine_core
        self.vllm_scheduler = core.scheduler
        self.scheduler = ours(core.scheduler.connector).scheduler

    @property
    def worker(self):
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return ours(get_kv_transfer_group()).worker

    def ask(self, prompt: Sequence[int], mode: str | None = None, *, max_tokens: int = 6, **request: Any) -> Answer:
        return self.ask_many([prompt], [mode], max_tokens=max_tokens, **request)[0]

    def ask_many(
        self, prompts, modes, *, max_tokens: int = 6, repair: str | None = None, **request: Any
    ) -> list[Answer]:
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt), **request} for prompt in prompts],
            [parameters(mode, max_tokens, repair) for mode in modes],
            use_tqdm=False,
        )
        return [answer_of(output) for output in outputs]

    def cold(self, prompt: Sequence[int], *, max_tokens: int = 6) -> Answer:
        """A full prefill, whatever was asked before."""
        self.llm.reset_prefix_cache()
        answer = self.ask(prompt, "off", max_tokens=max_tokens)
        assert answer.num_cached == 0
        self.llm.reset_prefix_cache()
        return answer

    def donate(self, *prompts: Sequence[int]) -> None:
        for prompt in prompts:
            self.ask(prompt, "exact", max_tokens=1)
        self.llm.reset_prefix_cache()

    def forget_donors(self) -> None:
        """Drop all donors, as under pressure."""
        for donor in list(self.scheduler.registry.catalogue):
            self.scheduler.registry.forget(donor.donor_id)
        self.llm.reset_prefix_cache()

    def check(self) -> None:
        """Nothing is left behind by requests that ended."""
        self.scheduler.check()
        assert self.scheduler.num_states == 0
        assert self.scheduler.registry.reserved_tokens == 0
        pool = self.vllm_scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # block 0 is never given out


def multi(*connectors, **settings):
    """vLLM's own."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors), **settings},
    }


def beside(*connectors, **settings):
    """Ours, with the same connectors in it."""
    module = {"kv_connector": "GraftMultiConnector", "kv_connector_module_path": "kvgraft.integrations.vllm"}
    return {**multi(*connectors, **{"saves_by_metadata": ["TokenStore"], **settings}), **module}


def ours(connector: Any) -> Any:
    """Our connector: the engine's, or one of several."""
    children = getattr(connector, "sub_connectors", [connector])
    return next(child for child in children if type(child).__name__ == "GraftConnector")


def parameters(
    mode: str | None, max_tokens: int, repair: str | None = None, *, forced: int | None = None
) -> SamplingParams:
    """Greedy; with a `forced` token all tokens are that one, and logprobs are the model's nevertheless."""
    asked = {"kvgraft": mode, "kvgraft_repair": repair}
    given = {name: value for name, value in asked.items() if value is not None}
    extra = {"kv_transfer_params": given} if given else None
    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=5,
        detokenize=False,
        extra_args=extra,
        logit_bias=None if forced is None else {forced: 100.0},
    )


def answer_of(output: Any) -> Answer:
    completion = output.outputs[0]
    return Answer(
        tuple(completion.token_ids),
        tuple({token: entry.logprob for token, entry in step.items()} for step in completion.logprobs or ()),
        output.num_cached_tokens or 0,
        (output.kv_transfer_params or {}).get("kvgraft", {}),
    )


@contextmanager
def engine(
    folder: Path,
    family: str = "qwen3",
    *,
    options: dict[str, Any] | None = None,
    connector: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    **engine_options: Any,
) -> Iterator[Engine]:
    """An engine of a tiny model; `options` are the connector's, and `connector` puts its configuration into another one."""
    settings: dict[str, Any] = {
        "block_size": BLOCK,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 8,
        "max_model_len": 2048,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
    }
    llm = LLM(
        model=save_tiny(family, folder),
        enforce_eager=True,
        kv_transfer_config=KVTransferConfig(
            **connector({**OURS, "kv_connector_extra_config": {**PATIENT, **(options or {})}})
        ),
        **{**settings, **engine_options},
    )
    try:
        yield Engine(llm, family)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(length)]
