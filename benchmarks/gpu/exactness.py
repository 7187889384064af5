"""Is what the engine computes on this device what the model computes by itself there?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from kvgraft.bench.ttft import ONE_TOKEN, Draws
from kvgraft.engine import LLM
from kvgraft.fidelity import divergence, stock_answer, stock_logits
from kvgraft.graft.rope_proof import TOLERANCE, relative_error
from kvgraft.graft.select import NoRecompute, Recompute, SelectionPolicy

from .subject import one_layer

if TYPE_CHECKING:
    from torch import Tensor

    from kvgraft.fidelity import StockAnswer
    from kvgraft.graft.select import SelectionContext, SelectionSteps
    from kvgraft.types import TokenArray

_FLOOR_FACTOR = 2.0
"""Two ways of the model's own may differ by more than the tolerance where weights are random and layers are many."""


@dataclass(frozen=True)
class Everything(SelectionPolicy):
    """Computes all reused tokens again, in the pass that computes the gaps: what a full prefill gives."""

    name: ClassVar[str] = "everything"

    @property
    def recompute_ratio(self) -> float:
        """None in the planner's books: it would find that nothing is gained, and it is right."""
        return 0.0

    def steps(self, context: SelectionContext) -> SelectionSteps:
        """Take one step with all positions."""
        yield Recompute(context.reused)


@dataclass(frozen=True, slots=True)
class ExactnessSizes:
    """Tokens of the prompt, of them before the document, and of the answer."""

    prompt: int = 1500
    shift: int = 200
    answer: int = 16


def measure_exactness(llm: LLM, sizes: ExactnessSizes, *, seed: int) -> dict[str, Any]:
    """Compare logits over the model's own greedy answer: reuse off, an exact prefix, all recomputed, and one layer moved.

    `error` is the largest difference of a logit over the largest logit; `floor` is that of two attentions of the model's
    own. In a model of one layer, keys that were moved and nothing else must give its own logits.

    Raises:
        ConfigError: The prompt does not fit.
    """
    check, tolerance = llm.self_check, TOLERANCE[llm.loaded.model.dtype]
    prompt = Draws(llm, (seed, 1)).tokens(sizes.prompt)
    with llm.adapter.stock("sdpa") as model:
        own = stock_answer(model, prompt, sizes.answer)
    with llm.adapter.stock("eager") as model:
        floor = relative_error(stock_logits(model, prompt, own.token_ids), own.logits)
    bound = max(tolerance, _FLOOR_FACTOR * floor)
    ways = {
        "off": _compared(llm.score(prompt, own.token_ids, "off").logits, own),
        "exact": _compared(_after_prefix(llm, prompt, own.token_ids), own),
        "recomputed": _compared(_grafted(llm, prompt, own.token_ids, sizes.shift, Everything()), own),
        "moved_in_one_layer": _one_layer(llm, prompt, sizes, seed),
    }
    return {
        "self_check": {"forward_error": check.forward_error, "rope_error": check.rope_error, "refusal": check.refusal},
        "prompt_tokens": sizes.prompt,
        "answer_tokens": sizes.answer,
        "tolerance": tolerance,
        "floor": floor,
        "ways": ways,
        "is_exact": check.refusal is None and all(way["error"] <= bound for way in ways.values()),
    }


def _compared(logits: Tensor, own: StockAnswer) -> dict[str, Any]:
    found = divergence(own.logits, logits)
    return {
        "error": relative_error(logits, own.logits),
        "mean_kl": found.mean_kl,
        "equal_tokens": found.equal_tokens,
    }


def _after_prefix(llm: LLM, prompt: TokenArray, answer: TokenArray) -> Tensor:
    """Score after a prefix that was read."""
    llm.reset()
    llm.generate(prompt[: len(prompt) // 2], ONE_TOKEN, "off")
    score = llm.score(prompt, answer, "exact")
    assert score.report.exact_tokens, "nothing was reused"
    return score.logits


def _grafted(llm: LLM, prompt: TokenArray, answer: TokenArray, shift: int, policy: SelectionPolicy) -> Tensor:
    """Score with the document known at position 0; reuse that did not take place shows as an error of the part."""
    llm.reset()
    llm.generate(prompt[shift:], ONE_TOKEN, "off")
    score = llm.score(prompt, answer, "graft", selection=policy, correction="none", repair="before")
    assert score.report.shifted_tokens or score.report.recomputed_tokens, f"nothing was grafted: {score.report.miss}"
    return score.logits


def _one_layer(llm: LLM, prompt: TokenArray, sizes: ExactnessSizes, seed: int) -> dict[str, Any]:
    config = replace(llm.config, num_slots=4 * sizes.prompt, max_model_len=0)
    small = LLM(one_layer(llm.loaded, seed), config)
    try:
        with small.adapter.stock("sdpa") as model:
            own = stock_answer(model, prompt, sizes.answer)
        return _compared(_grafted(small, prompt, own.token_ids, sizes.shift, NoRecompute()), own)
    finally:
        small.close()
