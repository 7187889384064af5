"""Table T6: the perplexity ratio by which reuse is advertised, and what it hides.

The ratio compares the perplexity that a model gives its own output with reuse with that of its own output without: it asks
whether the model is sure of what it says, not whether that is right. Beside it stand, of the same requests, the distance from
full prefill, first tokens that flip, scores, and stale answers, for every way to reuse K/V and for a baseline that takes the
K/V of a similar text for the prompt's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvgraft.bench.fidelity.measure import CONTINUATION_TOKENS, Figures, Instrument, PreparedRequest, figures_of, shares
from kvgraft.bench.fidelity.noise import NoiseFloor
from kvgraft.bench.fidelity.request import Part
from kvgraft.bench.fidelity.rows import reused_tokens
from kvgraft.bench.fidelity.settings import default_setting, parse_settings
from kvgraft.bench.fidelity.split import TEST
from kvgraft.bench.fidelity.subject import Subject, stock_attention
from kvgraft.bench.fidelity.suites import has_suite, load_suite
from kvgraft.engine import SamplingParams
from kvgraft.fidelity import answer_nll, divergence
from kvgraft.types import ReuseMode

from .measured import MeasuredTable
from .methods import ALL_SUITES, EXACT, OFF, SUBSTITUTED, VERIFIED
from .read_prompts import ReadPrompt, StockPrompt, common_beginning, substitute
from .settings import PACKS, TableSettings, minutes_option, option
from .statistics import array_mean, fidelity_figures, mean, ratio_of_perplexities, with_interval
from .walk import drawn, pending_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from kvgraft.bench.fidelity.request import FidelityRequest
    from kvgraft.bench.fidelity.settings import Setting
    from kvgraft.bench.journal import Journal
    from kvgraft.engine import LLM
    from kvgraft.types import TokenArray

    Record = Mapping[str, Any]
    Row = dict[str, Any]

SUITES = ("builtin", "rag", "adversarial", "lines", "tools")
POLICIES = ("none", "first_k:16", "kv_deviation:0.1", "query_attention:0.1", "query_seam:0.1", "adaptive", "default")


@dataclass(frozen=True)
class QualitySettings(TableSettings):
    """Suites, and settings of reuse."""

    suites: tuple[str, ...] = option(SUITES, "builtin and names of packs")
    data: str = option(PACKS, "folder of packs; those that are not there are left out")
    policies: tuple[str, ...] = option(POLICIES, "NAME[:RATIO][+CORRECTION] or default")
    limit: int = option(12, "requests per suite", least=1)
    noise_floor: int = option(4, "requests per suite that get controls", least=0)
    max_prompt_tokens: int = option(4608, "longer prompts are not measured", least=1)
    minutes: float = minutes_option()

    @property
    def present(self) -> tuple[str, ...]:
        """Suites that can be measured here."""
        return tuple(name for name in self.suites if has_suite(name, self.data))

    @property
    def absent(self) -> tuple[str, ...]:
        """Rows that need a pack that is not on this machine."""
        return tuple(name for name in self.suites if not has_suite(name, self.data))

    @property
    def num_steps(self) -> int:
        """Requests of all suites."""
        return len(self.present) * self.limit


def measure(llm: LLM, settings: QualitySettings, journal: Journal, advance: Callable[[], object]) -> list[Row]:
    """Return a row per suite and method, and per method over all suites; `advance` is called once per request."""
    subject = Subject(llm, settings.max_prompt_tokens)
    methods = Methods(llm, subject, parse_settings(settings.policies, [], default_setting(llm)))
    walks = [
        drawn(load_suite(name, settings.data), subject, side=TEST, limit=settings.limit, seed=settings.seed).all_read()
        for name in settings.present
    ]
    controlled = {walk.suite.name: frozenset(walk.indices[: settings.noise_floor]) for walk in walks}
    steps = pending_steps(walks, llm, methods.instrument, journal, advance, minutes=settings.minutes)
    for suite, step, read in steps:
        has_controls = step.index in controlled[suite.name]
        figures = methods.measure(step.request, suite.metric, read, has_controls=has_controls)
        journal.add({"suite": suite.name, "index": step.index, "methods": figures})
    found: dict[str, list[Record]] = {walk.suite.name: list(journal.under(walk.suite.name)) for walk in walks}
    if len(found) > 1:
        found[ALL_SUITES] = [record for records in found.values() for record in records]
    return [
        _row(suite, label, records, settings.seed)
        for suite, records in found.items()
        for label in methods.labels
        if any(label in record["methods"] for record in records)
    ]


class Methods:
    """Every way to come by the K/V of a prompt, asked alike.

    Args:
        llm: Its cache has what was read; the measured request leaves its own text in it.
        subject: Its prompts and answers.
        settings: Ways to reuse, cheapest first.
    """

    def __init__(self, llm: LLM, subject: Subject, settings: Sequence[Setting]) -> None:
        self.instrument = Instrument(llm, subject, settings)
        self._llm = llm
        self._subject = subject
        self._settings = settings
        self._noise = NoiseFloor(llm)

    @property
    def labels(self) -> tuple[str, ...]:
        """Of all methods, in the order of the table."""
        return (OFF, self._noise.name, EXACT, *(each.label for each in self._settings), VERIFIED, SUBSTITUTED)

    def measure(
        self, request: FidelityRequest, metric: str, read: Sequence[str], *, has_controls: bool
    ) -> dict[str, Figures]:
        """Answer one request by every method; returns figures by label.

        Args:
            request: What is asked.
            metric: How its answer is scored.
            read: Prompts that were read before.
            has_controls: Whether another number format, exact prefixes and `verified` answer it, too: the floor of
                errors, and what must have none.
        """
        asked = self.instrument.ask(request, metric)
        found = {OFF: self._own(asked)}
        with self._llm.adapter.stock(stock_attention(self._llm)) as model:
            donor = self._donor(asked, read)
            substituted = self._compare(asked, StockPrompt(model, asked.prompt, donor))
        found[SUBSTITUTED] = substituted | {"reused_share": len(donor) / len(asked.prompt)}
        found |= self._reusing(asked)
        # Last: a verified request leaves the prompt itself in the cache.
        return found | (self._controls(asked) if has_controls else {})

    def _controls(self, asked: PreparedRequest) -> dict[str, Figures]:
        """Methods whose error is known before: that of another number format, and none."""
        with self._llm.adapter.stock(stock_attention(self._llm)) as model:
            noise = self._compare(asked, StockPrompt(self._noise.other(model), asked.prompt))
        with self._llm.probe(asked.prompt, CONTINUATION_TOKENS, ReuseMode.EXACT) as probe:
            exact = self._compare(asked, probe) | _reused(shares(probe.report))
        return {self._noise.name: noise, EXACT: exact, VERIFIED: self._verified(asked)}

    def _reusing(self, asked: PreparedRequest) -> dict[str, Figures]:
        """Every setting; where the cheapest grafts nothing, the others would not either and have its figures."""
        found: dict[str, Figures] = {}
        for setting in self._settings:
            with self._llm.probe(
                asked.prompt,
                CONTINUATION_TOKENS,
                selection=setting.policy,
                correction=setting.correction,
                repair=setting.repair,
            ) as probe:
                found[setting.label] = self._compare(asked, probe) | _reused(shares(probe.report))
                is_grafted = bool(probe.report.spans)
            if not is_grafted:
                return {each.label: found[setting.label] for each in self._settings}
        return found

    def _own(self, asked: PreparedRequest) -> Figures:
        """Full prefill beside itself."""
        reference = asked.reference
        answer = reference.token_ids[: self._subject.answer_len(reference.token_ids.tolist())].tolist()
        same = divergence(reference.logits, reference.logits)
        nll = answer_nll(reference.logits[: len(answer)], answer)
        return figures_of(same) | {"own_nll": nll, "reused_share": 0.0} | self.instrument.scores(asked, answer)

    def _compare(self, asked: PreparedRequest, read: ReadPrompt) -> Figures:
        """Score the reference's continuation and the method's own greedy answer."""
        logits = read.logits(asked.reference.token_ids)
        found = divergence(asked.reference.logits, logits)
        answer, nll = self._answer(asked, read, found.equal_tokens, logits)
        return figures_of(found) | {"own_nll": nll} | self.instrument.scores(asked, answer)

    def _answer(self, asked: PreparedRequest, read: ReadPrompt, equal: int, logits: Tensor) -> tuple[list[int], float]:
        """The method's greedy answer up to its end, and its negative log-likelihood per token under the method itself.

        The first `equal` tokens are the reference's, which `logits` predict.
        """
        ends = self._llm.eos_token_ids
        answer = asked.reference.token_ids[:equal].tolist()
        rows = [logits[:equal]]
        if equal < CONTINUATION_TOKENS and not ends.intersection(answer):
            rows.append(logits[equal : equal + 1])
            answer.append(int(rows[-1].argmax()))
            while len(answer) < CONTINUATION_TOKENS and answer[-1] not in ends:
                rows.append(read.feed(len(answer) - 1, np.asarray(answer[-1:])))
                answer.append(int(rows[-1].argmax()))
        said = answer[: self._subject.answer_len(answer)]
        return said, answer_nll(torch.cat(rows)[: len(said)], said)

    def _verified(self, asked: PreparedRequest) -> Figures:
        """Serve the request: only tokens and their log-probabilities leave a server, so there is no divergence."""
        sampling = SamplingParams(CONTINUATION_TOKENS, logprobs=0)
        parts = list(self._llm.stream(asked.prompt, sampling, ReuseMode.VERIFIED))
        output = parts[-1].output
        assert output is not None
        said = [part.logprobs for part in parts if part.logprobs is not None and not part.is_provisional]
        answer = list(output.token_ids)
        right = asked.reference.token_ids[: self._subject.answer_len(asked.reference.token_ids.tolist())].tolist()
        return {
            "own_nll": -sum(each.logprob for each in said) / len(said),
            "first_flip": float(answer[0] != right[0]),
            "greedy_equal": float(answer == right),
            **_reused(shares(output.report)),
            **self.instrument.scores(asked, answer),
        }

    def _donor(self, asked: PreparedRequest, read: Sequence[str]) -> TokenArray:
        """Return the tokens of the K/V that the baseline takes for the beginning of the prompt."""
        return substitute(asked.prompt, self._question_at(asked), [self._subject.encode(text) for text in read])

    def _question_at(self, asked: PreparedRequest) -> int:
        """Where the last part of the prompt begins, in tokens; the last token of a prompt of one part."""
        parts = asked.request.parts
        if len(parts) < 2:
            return len(asked.prompt) - 1
        other = replace(asked.request, parts=(*parts[:-1], Part("\x00")))
        return min(common_beginning(asked.prompt, self._subject.encode(other.prompt)), len(asked.prompt) - 1)


def _reused(found: Figures) -> Figures:
    """The share of a prompt that was not computed."""
    return {"reused_share": reused_tokens(found) / found["prompt_tokens"]}


def _row(suite: str, label: str, records: Sequence[Record], seed: int) -> Row:
    """Figures of a method over the requests that it was asked, intervals over requests."""
    pairs = [(record["methods"][label], record["methods"][OFF]) for record in records if label in record["methods"]]
    nll = [[figures["own_nll"] for figures in side] for side in zip(*pairs, strict=True)]

    def column(name: str) -> list[float]:
        return [figures[name] for figures, _ in pairs if name in figures]

    def difference(name: str) -> list[float]:
        return [figures[name] - off[name] for figures, off in pairs if name in off]

    return {
        "suite": suite,
        "method": label,
        "requests": len(pairs),
        "reused_share": mean(column("reused_share")),
        **with_interval("perplexity_ratio", ratio_of_perplexities, nll, seed),
        **fidelity_figures([figures for figures, _ in pairs], seed),
        "scored": len(column("task")),
        "score": mean(column("task")),
        **with_interval("score_difference", array_mean, [difference("task")], seed),
        "contains_share": mean(column("contains")),
        **with_interval("contains_difference", array_mean, [difference("contains")], seed),
        "denies_share": mean(column("denies")),
        "stale_asked": len(column("stale")),
        "stale_share": mean(column("stale")),
    }


TABLE = MeasuredTable(
    "quality",
    "The perplexity ratio, and what it hides",
    "Answer the same requests with nothing reused, in another number format, with exact prefixes, under every policy, "
    "verified, and from the K/V of a similar text; give the perplexity of each method's own output beside KL, first flips, "
    "scores and stale answers. Packs that are not in --data are left out and named.",
    QualitySettings,
    ("suite", "index"),
    measure,
)
