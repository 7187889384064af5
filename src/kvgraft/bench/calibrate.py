"""Run a user's own prompts at every notch of a policy, hold each answer against the model's own, and pick a notch.

Where the policy's choice is computed after the first token, an answer has two parts with risks of their own, and one that
waits for it a third; a notch is certified if all are.

The reference is `stock_answer`: transformers' forward pass, which shares no K/V with what it judges. Every notch begins
with an empty cache and serves all prompts in order of arrival, so that its donors are those that it would have
left behind itself.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft import __version__
from kvgraft.engine import SamplingParams
from kvgraft.engine.model.loading import eos_token_ids
from kvgraft.engine.requests.risk import risk_binding
from kvgraft.errors import ConfigError
from kvgraft.fidelity import stock_answer
from kvgraft.fidelity.control import (
    PARTS,
    AnswerPart,
    Calibration,
    LossSample,
    NotchResult,
    PartResult,
    fixed_sequence,
)
from kvgraft.fidelity.control.notches import FULL, notches_of
from kvgraft.types import Fidelity, RepairTime, ReuseMode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from kvgraft.bench.packs import PackSession
    from kvgraft.engine import LLM
    from kvgraft.engine.idle.scoring import Score
    from kvgraft.fidelity.control import Loss
    from kvgraft.fidelity.control.notches import Notch
    from kvgraft.types import GraftReport, TokenArray


@dataclass(frozen=True, slots=True)
class AskedRisk:
    """A mean `loss` of at most `epsilon`, with a probability of being wrong about it of at most `delta`."""

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
    """Losses and reuse of one notch on the prompts.

    Attributes:
        losses: Of grafted requests, by part of their answers; none of a part that no answer had.
        recomputed: Reused tokens that were computed again.
        reused: Tokens that donors had.
    """

    losses: dict[AnswerPart, list[float]] = field(default_factory=dict)
    recomputed: int = 0
    reused: int = 0

    @classmethod
    def of(cls, notch: Notch) -> NotchSample:
        """Begin with no request of any part that answers at `notch` can have."""
        return cls({part: [] for time in _times(notch) for part in PARTS[time]})

    def add(self, report: GraftReport, losses: Mapping[AnswerPart, float]) -> None:
        """Take in a request."""
        for part, loss in losses.items():
            self.losses[part].append(loss)
        self.recomputed += report.recomputed_tokens
        self.reused += report.recomputed_tokens + report.shifted_tokens


def tokenized(
    llm: LLM, sessions: Sequence[PackSession], num_tokens: int, encode: Callable[[str], TokenArray] | None = None
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


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Full prefill's greedy answer to a prompt, up to the first token that ends it.

    Attributes:
        token_ids: int64, at least one.
        evidence: Of a loss, of these tokens.
    """

    token_ids: TokenArray
    evidence: NDArray[Any]


def references(llm: LLM, prompts: Prompts, loss: Loss, advance: Callable[[], object]) -> list[Reference]:
    """Return full prefill's answer to every prompt that is asked, as far as `loss` looks.

    Raises:
        ConfigError: The model has no attention of transformers' own, or scores are not what is served.
    """
    if llm.config.repair_rows and loss.length(AnswerPart) > 2:
        raise ConfigError(
            f"loss {loss} looks at tokens after the second one, which repair_rows goes on to repair, and a calibration does "
            "not measure that; use first_token or kl:KAPPA, or leave repair_rows out"
        )
    found, ends = [], list(eos_token_ids(llm.loaded))
    with llm.adapter.stock("sdpa") as model:
        for _, asked in prompts.sessions:
            for prompt in asked:
                answer = stock_answer(model, prompt, loss.length(AnswerPart))
                count = 1 + int(np.append(np.isin(answer.token_ids, ends), True).argmax())
                evidence = loss.evidence(answer.logits[:count].numpy(force=True))
                found.append(Reference(answer.token_ids[:count], evidence))
                advance()
    return found


def sample_notches(
    llm: LLM,
    prompts: Prompts,
    expected: Sequence[Reference],
    asked: AskedRisk,
    *,
    takes_all: bool,
    advance: Callable[[], object],
) -> dict[str, NotchSample]:
    """Serve all prompts at one notch after another, to the first that is not certified: no bolder one can be after it.

    Args:
        llm: Its policy has the notches.
        prompts: What is asked.
        expected: Full prefill's answers to them.
        asked: What a notch must show.
        takes_all: Go on to the boldest one nevertheless, to see what it would lose.
        advance: Called once per prompt and notch.
    """
    samples: dict[str, NotchSample] = {}
    for notch in notches_of(llm.policy, RepairTime(llm.config.repair)):
        samples[notch.name] = sample_notch(llm, notch, prompts, expected, asked.loss, advance=advance)
        results = summed_up(samples, asked)
        if not takes_all and results and not results[-1].is_certified:
            break
    return samples


def sample_notch(
    llm: LLM,
    notch: Notch,
    prompts: Prompts,
    expected: Sequence[Reference],
    loss: Loss,
    *,
    advance: Callable[[], object],
) -> NotchSample:
    """Serve all prompts at one notch; those count of which something approximate is reused: of others no risk is stated.

    At "full" nothing is reused: what is lost there is rounding, and all requests count.
    """
    sample, answers = NotchSample.of(notch), iter(expected)
    for cached, asked in prompts.sessions:
        llm.reset()
        for prompt in cached:
            llm.generate(prompt, SamplingParams(1), _reuse(notch), selection=notch.policy)
        for prompt in asked:
            full = next(answers)
            report, losses = _served(llm, prompt, notch, full, loss)
            if notch.policy is None or any(span.fidelity is not Fidelity.EXACT for span in report.spans):
                sample.add(report, losses)
            advance()
    llm.reset()
    return sample


def _served(
    llm: LLM, prompt: TokenArray, notch: Notch, full: Reference, loss: Loss
) -> tuple[GraftReport, dict[AnswerPart, float]]:
    """Serve a prompt greedily, which leaves donors for later ones. Returns the report and the loss by part of the answer.

    At a notch that repairs after the first token some requests wait for the repair nevertheless, so both are scored. Scores
    leave no trace, and come first.
    """
    scores = {time: _scored(llm, prompt, notch, full, time) for time in _times(notch)}
    logits = {time: score.logits[: len(full.token_ids)] for time, score in scores.items()}
    losses = {
        part: loss.of(full.evidence, loss.evidence(rows.numpy(force=True)), part)
        for time, rows in logits.items()
        for part in PARTS[time]
    }
    llm.generate(prompt, SamplingParams(loss.num_tokens), _reuse(notch), selection=notch.policy)
    return scores[RepairTime.BEFORE].report, {part: found for part, found in losses.items() if found is not None}


def _times(notch: Notch) -> tuple[RepairTime, ...]:
    """Return the times at which requests at `notch` are repaired."""
    return (RepairTime.BEFORE,) if notch.repair is RepairTime.BEFORE else (RepairTime.BEFORE, RepairTime.AFTER)


def _scored(llm: LLM, prompt: TokenArray, notch: Notch, full: Reference, repair: RepairTime) -> Score:
    """Return what is served with a repair at that time along full prefill's answer; a second token follows if it has none.

    An answer of one token alone would wait for the repair.
    """
    asked = full.token_ids if len(full.token_ids) > 1 else np.repeat(full.token_ids, 2)
    return llm.score(prompt, asked, _reuse(notch), selection=notch.policy, repair=repair)


def _reuse(notch: Notch) -> ReuseMode:
    return ReuseMode.OFF if notch.policy is None else ReuseMode.GRAFT


def summed_up(samples: Mapping[str, NotchSample], asked: AskedRisk) -> tuple[NotchResult, ...]:
    """Test the notches after "full" in their order; return the result of each. A notch rejects what all its parts reject."""
    results = [
        NotchResult(name, _parts(sample, asked), False, sample.recomputed / max(1, sample.reused))
        for name, sample in samples.items()
        if name != FULL
    ]
    num_certified = fixed_sequence([result.worst.p_value for result in results], asked.delta)
    return tuple(replace(result, is_certified=index < num_certified) for index, result in enumerate(results))


def _parts(sample: NotchSample, asked: AskedRisk) -> tuple[PartResult, ...]:
    """Test each part of the answers at one notch."""
    known = {
        part: LossSample(len(losses), float(sum(losses)), asked.loss.is_binary)
        for part, losses in sample.losses.items()
    }
    return tuple(
        PartResult(part, losses.count, losses.loss_sum, losses.upper_limit(asked.delta), losses.p_value(asked.epsilon))
        for part, losses in sorted(known.items())
    )


def calibration_of(llm: LLM, results: tuple[NotchResult, ...], asked: AskedRisk, num_prompts: int) -> Calibration:
    """Return the calibration that a file holds."""
    certified = [result.notch for result in results if result.is_certified]
    names = tuple(notch.name for notch in notches_of(llm.policy, RepairTime(llm.config.repair)))
    return Calibration(
        binding=risk_binding(llm.config, llm.loaded, llm.policy),
        loss=str(asked.loss),
        epsilon=asked.epsilon,
        delta=asked.delta,
        notch=certified[-1] if certified else FULL,
        notches=names,
        prompts=num_prompts,
        results=results,
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        made_by={"kvgraft": __version__, "model": llm.loaded.name},
    )
