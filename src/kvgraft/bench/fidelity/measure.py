"""Measure one request: full prefill by the model itself, then every setting against the same donors. Gives plain figures.

Figures are numbers and names only: prompts, documents and answers stay out of what is written to files.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.bench.fidelity.answers import METRICS, contains, denies, is_stale
from kvgraft.bench.fidelity.deviation import informed
from kvgraft.bench.fidelity.distance import distance_class
from kvgraft.bench.fidelity.subject import stock_attention
from kvgraft.engine import SamplingParams
from kvgraft.fidelity import answer_nll, divergence, stock_reference
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.bench.fidelity.request import FidelityRequest
    from kvgraft.bench.fidelity.sample import SampledRequest
    from kvgraft.bench.fidelity.settings import Setting
    from kvgraft.bench.fidelity.subject import Subject
    from kvgraft.engine import LLM, DictatedAnswer, Probe
    from kvgraft.fidelity import Divergence, StockReference
    from kvgraft.types import GraftReport, TokenArray

CONTINUATION_TOKENS = 32
"""Of greedy decoding, compared and teacher-forced; the end-of-text token does not end them."""

Figures = dict[str, Any]
"""By name, of types that JSON has."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRequest:
    """A request with its tokens, those of a right answer (maybe none), and the model's own full prefill as the reference."""

    request: FidelityRequest
    metric: str
    prompt: TokenArray
    gold: TokenArray
    reference: StockReference


class Instrument:
    """Measures requests of any suite with one model.

    Args:
        llm: Its cache is used and emptied between blocks.
        subject: Its prompts and answers.
        settings: What is compared, cheapest first.
    """

    def __init__(self, llm: LLM, subject: Subject, settings: Sequence[Setting]) -> None:
        self._llm = llm
        self._subject = subject
        self._settings = settings

    def read(self, prompt: str) -> None:
        """Make `prompt` a donor, computed with nothing reused."""
        self._llm.generate(self._subject.encode(prompt), SamplingParams(1), ReuseMode.OFF)

    def ask(self, request: FidelityRequest, metric: str, prompt: str | None = None) -> PreparedRequest:
        """Have the model's own forward pass answer.

        Args:
            request: The request, with its right answers.
            metric: How the suite scores answers.
            prompt: Another text to ask, without right answers.
        """
        tokens = self._subject.encode(request.prompt if prompt is None else prompt)
        gold = self._subject.gold(request.answers if prompt is None else ())
        with self._llm.adapter.stock(stock_attention(self._llm)) as model:
            reference = stock_reference(model, tokens, CONTINUATION_TOKENS, gold)
        return PreparedRequest(request, metric, tokens, gold, reference)

    def measure(self, step: SampledRequest, asked: PreparedRequest) -> Figures:
        """Compare every setting; where the cheapest grafts nothing, the others would not either and are left out."""
        outcomes: dict[str, Figures] = {}
        settings = informed(self._settings, self._llm, asked.prompt)
        for setting in settings:
            outcomes[setting.label] = self._compare(asked, setting)
            if not outcomes[setting.label]["is_grafted"]:
                break
        reference = asked.reference.token_ids.tolist()
        off = self.scores(asked, reference)
        if len(asked.gold):
            off["gold_nll"] = answer_nll(asked.reference.gold_logits, asked.gold.tolist())
        return {
            "index": step.index,
            "rid": step.request.rid,
            "group": step.request.group,
            "num_tokens": len(asked.prompt),
            "off": off,
            "settings": outcomes,
        }

    def control(self, asked: PreparedRequest, reuse: ReuseMode) -> Figures:
        """Compare under the cheapest setting, or with exact prefixes only; no answers are scored."""
        cheapest = self._settings[0]
        with self._llm.probe(
            asked.prompt,
            CONTINUATION_TOKENS,
            reuse,
            selection=cheapest.policy,
            correction=cheapest.correction,
            repair=cheapest.repair,
        ) as probe:
            return figures_of(divergence(asked.reference.logits, probe.logits(asked.reference.token_ids))) | shares(
                probe.report
            )

    def _compare(self, asked: PreparedRequest, setting: Setting) -> Figures:
        """Score the reference's continuation, decode where it is left, and score the right answer."""
        started = time.perf_counter()
        figures = self._served(asked, setting) if setting.heals else self._probed(asked, setting)
        figures["seconds"] = round(time.perf_counter() - started, 3)
        return figures

    def _probed(self, asked: PreparedRequest, setting: Setting) -> Figures:
        num_tokens = max(CONTINUATION_TOKENS, len(asked.gold))
        with self._llm.probe(
            asked.prompt,
            num_tokens,
            selection=setting.policy,
            correction=setting.correction,
            repair=setting.repair,
        ) as probe:
            logits = probe.logits(asked.reference.token_ids)
            found = divergence(asked.reference.logits, logits)
            figures = _reported(found, probe.report)
            return figures | self._second_continuation(probe, asked, found, logits.argmax(-1).tolist())

    def _served(self, asked: PreparedRequest, setting: Setting) -> Figures:
        """Serve the reference's continuation step by step, then the setting's own answer; right answers are not scored."""
        reference = asked.reference.token_ids.tolist()
        served = self._dictate(asked, setting, reference, ignore_eos=True)
        found = divergence(asked.reference.logits, served.logits)
        answer = reference
        if self._parts_ways(asked, found):
            answer = list(self._dictate(asked, setting, reference[: found.equal_tokens]).token_ids)
        return _reported(found, served.report) | self.scores(asked, answer)

    def _dictate(
        self, asked: PreparedRequest, setting: Setting, beginning: list[int], *, ignore_eos: bool = False
    ) -> DictatedAnswer:
        return self._llm.dictate(
            asked.prompt,
            beginning,
            SamplingParams(CONTINUATION_TOKENS, ignore_eos=ignore_eos),
            selection=setting.policy,
            correction=setting.correction,
            repair=setting.repair,
        )

    def _parts_ways(self, asked: PreparedRequest, found: Divergence) -> bool:
        """Return whether the setting's own answer, which is to be scored, is another than the reference's."""
        return bool(asked.request.answers) and found.equal_tokens < self._subject.answer_len(
            asked.reference.token_ids.tolist()
        )

    def _second_continuation(
        self, probe: Probe, asked: PreparedRequest, found: Divergence, greedy: list[int]
    ) -> Figures:
        """Return the figures of a second continuation of the same prompt."""
        reference = asked.reference.token_ids.tolist()
        answer = reference
        if self._parts_ways(asked, found):
            answer = self._decode(probe, reference[: found.equal_tokens], greedy[found.equal_tokens])
        figures = self.scores(asked, answer)
        if len(asked.gold):
            figures["gold_nll"] = answer_nll(probe.logits(asked.gold), asked.gold.tolist())
        return figures

    def _decode(self, probe: Probe, tokens: list[int], newest: int) -> list[int]:
        """Go on greedily after `tokens`, which have been fed, and `newest`."""
        tokens = [*tokens, newest]
        while len(tokens) < CONTINUATION_TOKENS and tokens[-1] not in self._llm.eos_token_ids:
            logits = probe.feed(len(tokens) - 1, np.asarray(tokens[-1:]))
            tokens.append(int(logits[-1].argmax()))
        return tokens

    def scores(self, asked: PreparedRequest, answer: Sequence[int]) -> Figures:
        """Return the task score of an answer; nothing where the suite knows none."""
        request = asked.request
        if not request.answers or not len(asked.gold):
            return {}
        text = self._subject.text(answer)
        scores: Figures = {
            "task": METRICS[asked.metric](text, request.answers),
            "contains": contains(text, request.answers),
            "denies": denies(text),
        }
        if request.stale:
            scores["stale"] = is_stale(text, request.answers, request.stale)
        return scores


def figures_of(found: Divergence) -> Figures:
    """Name the figures of one comparison."""
    return {
        "mean_kl": found.mean_kl,
        "mean_js": found.mean_js,
        "first_kl": found.first_kl,
        "first_flip": float(found.first_flip),
        "top1": found.top1,
        "greedy_equal": float(found.greedy_equal),
        "first_divergence": float(found.equal_tokens),
        "token_kl": [float(f"{kl:.4g}") for kl in found.token_kl],
    }


def _reported(found: Divergence, report: GraftReport) -> Figures:
    distance = distance_class(report.spans, report.exact_tokens)
    return figures_of(found) | shares(report) | {"distance": distance}


def shares(report: GraftReport) -> Figures:
    """Name what was reused for a prompt."""
    known = report.recomputed_tokens + report.shifted_tokens
    return {
        "is_grafted": bool(report.spans),
        "prompt_tokens": report.num_tokens,
        "exact_tokens": report.exact_tokens,
        "continued_tokens": report.continued_tokens,
        "shifted_tokens": report.shifted_tokens,
        "recomputed_share": report.recomputed_tokens / known if known else 0.0,
        "flops_share": report.computed_flops / report.full_flops if report.full_flops else 1.0,
    }
