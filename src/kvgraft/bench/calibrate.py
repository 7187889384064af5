"""Run a user's own prompts at every notch of a policy, hold each answer against the model's own, and pick a notch.

The reference is `stock_answer`: transformers' forward pass, which shares no K/V with what it judges. Every notch begins
with an empty cache and serves all prompts in order of arrival, so that its donors are those that it would have
left behind itself.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft import __version__
from kvgraft.engine import SamplingParams
from kvgraft.engine.risk import risk_binding
from kvgraft.errors import ConfigError
from kvgraft.fidelity import stock_answer
from kvgraft.fidelity.control import Calibration, LossSample, NotchResult, fixed_sequence
from kvgraft.reuse.notches import FULL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from kvgraft.bench.packs import Session
    from kvgraft.engine import LLM
    from kvgraft.fidelity.control import Loss
    from kvgraft.reuse.notches import Notch
    from kvgraft.types import GraftReport, TokenArray


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to hold: a mean `loss` of at most `epsilon`, with a probability of being wrong about it of at most `delta`."""

    loss: Loss
    epsilon: float
    delta: float


@dataclass(frozen=True, slots=True)
class Prompts:
    """Tokenised sessions; each begins with an empty cache.

    Attributes:
        sessions: Per session the prompts that are there before, and those that are asked.
        num_too_long: Prompts left out because the model or the pool cannot take them.
    """

    sessions: tuple[tuple[tuple[TokenArray, ...], tuple[TokenArray, ...]], ...]
    num_too_long: int

    @property
    def count(self) -> int:
        """Prompts that are asked."""
        return sum(len(asked) for _, asked in self.sessions)


@dataclass(slots=True)
class NotchSample:
    """What one notch did on the prompts.

    Attributes:
        grafted: Losses of grafted requests.
        recomputed: Reused tokens that were computed again.
        reused: Tokens that donors had.
    """

    grafted: list[float] = field(default_factory=list)
    recomputed: int = 0
    reused: int = 0


def tokenized(
    llm: LLM, sessions: Sequence[Session], num_tokens: int, encode: Callable[[str], TokenArray] | None = None
) -> Prompts:
    """Tokenise what fits with `num_tokens` of output, by `encode` or as plain text.

    Raises:
        ConfigError: Nothing does.
    """
    encode = encode or llm.tokenize
    longest = min(llm.max_model_len, llm.usage().total) - num_tokens
    kept, too_long = [], 0
    for session in sessions:
        cached, asked = ([encode(prompt) for prompt in prompts] for prompts in (session.cached, session.requests))
        fitting = [tuple(prompt for prompt in prompts if len(prompt) <= longest) for prompts in (cached, asked)]
        too_long += len(asked) - len(fitting[1])
        kept.append((fitting[0], fitting[1]))
    prompts = Prompts(tuple(kept), too_long)
    if not prompts.count:
        raise ConfigError(
            f"no prompt has at most {longest} tokens, which is what fits; raise num_slots or max_model_len"
        )
    return prompts


def references(llm: LLM, prompts: Prompts, loss: Loss, advance: Callable[[], object]) -> list[NDArray[Any]]:
    """Return the evidence of `loss` in full prefill's greedy answer to every prompt that is asked.

    Raises:
        ConfigError: The model has no attention of transformers' own.
    """
    found = []
    with llm.adapter.stock("sdpa") as model:
        for _, asked in prompts.sessions:
            for prompt in asked:
                answer = stock_answer(model, prompt, loss.num_tokens)
                found.append(loss.evidence(answer.logits.numpy(force=True)))
                advance()
    return found


def sample_notch(
    llm: LLM,
    notch: Notch,
    prompts: Prompts,
    expected: Sequence[NDArray[Any]],
    loss: Loss,
    *,
    advance: Callable[[], object],
) -> NotchSample:
    """Serve all prompts at one notch. At "full" nothing is reused: what is lost there is rounding, and all requests count."""
    sample, answers = NotchSample(), iter(expected)
    reuse = "graft" if notch.policy is not None else "off"
    for cached, asked in prompts.sessions:
        llm.reset()
        for prompt in cached:
            llm.generate(prompt, SamplingParams(1), reuse, selection=notch.policy)
        for prompt in asked:
            full = next(answers)
            report, evidence = _served(llm, prompt, notch, loss)
            if report.spans or notch.policy is None:
                sample.grafted.append(loss.of(full, evidence))
                sample.recomputed += report.recomputed_tokens
                sample.reused += report.recomputed_tokens + report.shifted_tokens
            advance()
    llm.reset()
    return sample


def _served(llm: LLM, prompt: TokenArray, notch: Notch, loss: Loss) -> tuple[GraftReport, NDArray[Any]]:
    """Serve a prompt greedily, which leaves donors for later ones. Returns the report and the evidence of `loss`."""
    reuse = "graft" if notch.policy is not None else "off"
    logits = None
    if not loss.is_binary:  # tokens say nothing about distributions; scoring leaves no trace
        score = llm.score(prompt, [0], reuse, selection=notch.policy)
        logits = loss.evidence(score.logits.numpy(force=True))
    (output,) = llm.generate(prompt, SamplingParams(loss.num_tokens), reuse, selection=notch.policy)
    return output.report, np.asarray(output.token_ids, np.int64) if logits is None else logits


def summed_up(samples: Mapping[str, NotchSample], asked: Asked) -> tuple[NotchResult, ...]:
    """Test the notches behind "full" in their order; returns what is known of each."""
    known = {
        name: LossSample(len(sample.grafted), float(sum(sample.grafted)), asked.loss.is_binary)
        for name, sample in samples.items()
        if name != FULL
    }
    p_values = [sample.p_value(asked.epsilon) for sample in known.values()]
    num_certified = fixed_sequence(p_values, asked.delta)
    return tuple(
        NotchResult(
            notch=name,
            requests=sample.count,
            loss_sum=sample.loss_sum,
            upper_limit=sample.upper_limit(asked.delta),
            p_value=p_value,
            is_certified=index < num_certified,
            recomputed_share=samples[name].recomputed / max(1, samples[name].reused),
        )
        for index, ((name, sample), p_value) in enumerate(zip(known.items(), p_values, strict=True))
    )


def calibration_of(llm: LLM, results: tuple[NotchResult, ...], asked: Asked, num_prompts: int) -> Calibration:
    """Put together what a file holds."""
    certified = [result.notch for result in results if result.is_certified]
    return Calibration(
        binding=risk_binding(llm.config, llm.loaded, llm.policy),
        loss=str(asked.loss),
        epsilon=asked.epsilon,
        delta=asked.delta,
        notch=certified[-1] if certified else FULL,
        notches=(FULL, *(result.notch for result in results)),
        prompts=num_prompts,
        results=results,
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        made_by={"kvgraft": __version__, "model": llm.loaded.name},
    )
