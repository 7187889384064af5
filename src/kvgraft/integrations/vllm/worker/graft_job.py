"""One graft on one rank: reused K/V in, gaps and chosen tokens computed, pass by pass."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import IntegrationError, PolicyError
from kvgraft.graft.drift_plan import DriftPlan
from kvgraft.graft.first_token import reason_if_unsure
from kvgraft.graft.select import NoRecompute, Observable, Observation
from kvgraft.graft.steps import GraftSteps, PlannedPass, Scope
from kvgraft.integrations.vllm.worker.group_kv import GroupKV, PagedKV
from kvgraft.integrations.vllm.worker.passes import (
    AllLayersPass,
    GraftedPrompt,
)
from kvgraft.integrations.vllm.worker.query_look import QueryLook
from kvgraft.integrations.vllm.worker.ranks import all_ranks, summed_over_ranks
from kvgraft.integrations.vllm.worker.spans import DonorSpans
from kvgraft.reuse.failures import miss_of
from kvgraft.reuse.outcome import GraftOutcome
from kvgraft.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvgraft.graft.drift import DriftCorrection
    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.integrations.vllm.messages import BlockIds, Graft, TextId
    from kvgraft.integrations.vllm.worker.donor_store import DonorStore
    from kvgraft.integrations.vllm.worker.passes import GraftPass
    from kvgraft.integrations.vllm.worker.sparse_pass import RankModel
    from kvgraft.memory.block import KVBlock
    from kvgraft.types import Match

logger = logging.getLogger(__name__)


class GraftJob:
    """Takes one graft to its outcome: `begin`, then `step` until `outcome` is set.

    A command that `repairs_after` is complete once reused K/V lie in their places and gaps are computed, as if no policy
    chose anything. Then `repair`, and `step` until `outcome` is set once more.

    All ranks take the same steps: these follow from the command and, where keys or attention are observed, from sums over
    ranks; K/V from a store are handed in (`arrive`) when all ranks have them. A rank that cannot read a donor makes all of
    them compute the positions instead, as a full prefill does.
    """

    def __init__(
        self,
        command: Graft,
        rank: RankModel,
        donors: DonorStore,
        policy: SelectionPolicy,
        *,
        correction: DriftCorrection | None,
        max_rows: int,
        below_margin: float = 0.0,
    ) -> None:
        self.command = command
        self.outcome: GraftOutcome | None = None
        self._rank = rank
        self._donors = donors
        self._max_rows = min(max_rows, rank.most_rows)
        is_chosen_from = command.plan.has_shifted and not command.is_substituted
        # Its last token is computed once more by vLLM, which draws the next one.
        self._computes_question = (
            is_chosen_from
            and Observable.QUERY_ATTENTION in policy.observes
            and command.end == command.plan.num_tokens - 1
        )
        end = command.plan.num_tokens if self._computes_question else command.end
        self._homes = _homes(command, rank, max_rows, end)
        self._steps = GraftSteps(
            command.plan,
            policy if is_chosen_from else NoRecompute(),
            token_ids=command.token_ids,
            correction=None if command.is_substituted else correction,
            scope=_scope(self._homes, rank.most_runs, end=end),
        )
        self._awaited = frozenset(command.stored)
        self.is_blocked = False
        self._kept_texts = {text_id: (start, stop) for text_id, start, stop in command.captures}
        self._captured: GraftPass | None = None
        self._look: QueryLook | None = None
        self._below_margin = below_margin if self._computes_question else 0.0
        self._unsure = self._fell_back = ""
        self._is_policy_error = self._is_repairing = False
        self._inject_s = self._compute_s = 0.0

    def begin(self) -> None:
        """Read the donors and decide the first pass; every rank must come here in the same step.

        Where a rank cannot, or the policy fails, all of them compute everything.
        """
        started = time.perf_counter()
        command = self.command
        try:
            prompt = self._prompt_of(command.spans, command.source_starts)
            first = self._first()
        except Exception as error:
            logger.exception("graft of request %s cannot begin; it is computed", command.request_id)
            miss = miss_of(error)
            self._fell_back, self._is_policy_error = miss.detail, miss.reason is MissReason.POLICY_ERROR
        if all_ranks(not self._fell_back):
            self._prompt = prompt
            self._begin_pass(first)
        else:
            self.compute_everything(self._fell_back or "another rank could not begin")
        self._inject_s += time.perf_counter() - started

    def _first(self) -> PlannedPass:
        """Plan the first pass, which looks at the question where it computes it; else the repair does."""
        planned = self._steps.answer() if self.command.repairs_after else self._steps.first()
        return replace(planned, observe_query=planned.observe_query and self._computes_question)

    @property
    def waits_for_repair(self) -> bool:
        """Whether what the policy chooses is still to be computed, once the graft is complete."""
        return self.command.repairs_after and not (self._is_repairing or self._unsure or self._fell_back)

    def repair(self, block_ids: BlockIds) -> None:
        """Begin to compute what the policy chooses, in blocks with the K/V of the whole prompt.

        All ranks must come here in the same step. Nothing of donors is needed: what they gave lies in the blocks.
        """
        self._is_repairing, self.outcome = True, None
        self._kept_texts = {}
        self._homes = [
            PagedKV.of(group, np.asarray(ids, np.int32), start=self.command.plan.num_tokens)
            for group, ids in zip(self._rank.groups, block_ids, strict=True)
        ]
        self._prompt = self._prompt_of(())
        if not self._choose():
            self._finish()

    def compute_everything(self, reason: str) -> None:
        """Begin afresh and copy nothing: every position is computed, over any K/V in its place."""
        command = self.command
        self._fell_back, self.outcome = reason, None
        if command.plan.prefix_len and any(home.group.window for home in self._homes):
            # The windows before the exact prefix's end were to come from donors: nothing can be computed here.
            raise IntegrationError(reason)
        self._prompt = self._prompt_of(())
        planned = self._steps.give_up()
        if self._is_repairing:  # what lies before the first span is exact, and others may read it
            rows = planned.rows[planned.rows >= command.plan.spans[0].target_start]
            planned = PlannedPass(rows, DriftPlan(len(rows)))
        self._begin_pass(planned)

    def _give_up_reuse(self, failure: PolicyError | None) -> None:
        """Discard what passes have computed: the policy failed after its first step, on this rank or another."""
        logger.error("graft of request %s goes no further; it is computed", self.command.request_id, exc_info=failure)
        for home in self._homes:
            home.restart()
        for text_id in self._kept_texts:
            self._donors.discard(text_id)  # what was kept of it had attended to copies
        self._captured, self._is_policy_error = None, True
        self.compute_everything(str(failure or "the selection policy failed on another rank"))

    @property
    def computes_everything(self) -> bool:
        """Whether nothing is copied, as donors could not be read or the policy failed."""
        return bool(self._fell_back)

    def arrive(self, parts: Sequence[tuple[int, KVBlock]]) -> int:
        """Take K/V of spans by number, which all ranks have now, into the request's blocks. Returns 0 computed rows."""
        started = time.perf_counter()
        for index, block in parts:
            self._prompt.spans.arrive(index, block)
        for home in self._homes:
            home.inject_early(self._prompt.spans)
        self._inject_s += time.perf_counter() - started
        return 0

    def discard(self, text_id: TextId) -> None:
        """Keep nothing of a text that will not become a donor; ignore other texts."""
        self._kept_texts.pop(text_id, None)

    def step(self, max_rows: int) -> int:
        """Compute up to `max_rows` rows and return how many; set `outcome` after the last of all.

        `is_blocked` is true while the next rows attend to K/V that have not arrived.
        """
        started = time.perf_counter()
        current = self._pass
        rows = np.empty(0, np.int64) if current.is_done else current.advance(min(max_rows, self._max_rows))
        if current is self._captured:
            self._keep(rows)
        if self._look is not None and not self.waits_for_repair:
            self._look.observe(self._homes)  # at once: windows keep their K/V for the present piece alone
        done, current.inject_s = current.inject_s, 0.0
        self._inject_s += done
        # What follows the last row of a pass may look at all that is reused.
        is_ended = current.is_done and self._prompt.spans.is_complete
        self.is_blocked = not (is_ended or len(rows))
        is_over = is_ended and not self._next_pass(current)
        self._compute_s += time.perf_counter() - started - done
        if is_over:
            self._finish()
        return len(rows)

    def _begin_pass(self, planned: PlannedPass, observed: GraftPass | None = None) -> None:
        """Lay out this rank's part of a pass; the hidden states of `observed` continue through the later layers."""
        command, prompt, rows = self.command, self._prompt, planned.rows
        self._planned, self._look = planned, None
        if planned.deviation_layer:
            assert self._rank.stack is not None, "the self-check finds it where the policy observes keys"
            reused = np.setdiff1d(rows, command.plan.compute, assume_unique=True)
            from kvgraft.integrations.vllm.worker.key_deviation import KeyDeviationPass

            self._pass: GraftPass = KeyDeviationPass(prompt, rows, self._rank.stack, reused=reused)
            return
        if planned.observe_query:
            self._look = QueryLook(self._rank, self._homes, self._steps.query, command.plan.num_tokens)
        whole = None if observed is None else observed.continued(rows)
        if whole is None:
            whole = AllLayersPass(prompt, rows, planned.drift, self._look)
        else:
            self._planned = replace(planned, drift=DriftPlan(len(rows)))
        if self._captured is None:
            self._captured = whole  # all gaps are in the first pass
        elif len(rows):
            for home in self._homes:
                home.restart()
        self._pass = whole

    def _next_pass(self, last: GraftPass) -> bool:
        """Ask the policy for more; return False at its end. Where it fails on one rank, all of them compute everything."""
        self._steps.ran(self._planned)
        if self.waits_for_repair:
            return self._is_unsure(last) and self._choose()
        deviation, mass = last.deviation(), self._seen_mass()
        return self._go_on(lambda: self._steps.next(Observation(None, mass, deviation)), last)

    def _is_unsure(self, answered: GraftPass) -> bool:
        """Return whether the first token waits for the repair after all, as the question's last row has it; all ranks ask."""
        if not (self._below_margin and isinstance(answered, AllLayersPass)):
            return False
        logits = answered.logits()
        reason = "" if logits is None else reason_if_unsure(logits, self._below_margin)
        if all_ranks(not reason):
            return False
        self._unsure = reason or "another rank has the logits of the first token"
        return True

    def _choose(self) -> bool:
        """Begin to compute what the policy chooses, as the live rows are computed; return False if it chooses nothing."""
        mass = self._seen_mass()
        return self._go_on(lambda: self._steps.repair(Observation(None, mass, None)))

    def _seen_mass(self) -> NDArray[np.float32] | None:
        """Return what the question attends to, summed over ranks, if the last pass looked; all ranks must ask."""
        if self._look is None:
            return None
        self._look.observe(self._homes)
        return summed_over_ranks(self._look.mass).numpy()

    def _go_on(self, plan: Callable[[], PlannedPass | None], observed: GraftPass | None = None) -> bool:
        """Begin the pass that the policy wants; return False if it wants none."""
        planned, failure = None, None
        try:
            planned = plan()
        except PolicyError as error:
            failure = error
        if not all_ranks(failure is None):
            self._give_up_reuse(failure)
        elif planned is None:
            return False
        else:
            self._begin_pass(planned, observed)
        return True

    def _finish(self) -> None:
        started = time.perf_counter()
        for home in self._homes:
            home.finish(self._prompt.spans, self.command.end)
        self._inject_s += time.perf_counter() - started
        work = self._steps.work()
        self.outcome = GraftOutcome(
            work.recomputed_runs,
            self._inject_s * 1e3,
            self._compute_s * 1e3,
            self._fell_back,
            corrected_tokens=work.num_corrected,
            is_policy_error=self._is_policy_error,
            waited=self._unsure,
        )

        if self.waits_for_repair:
            self._prompt, self._captured = self._prompt_of(()), None  # donors may go meanwhile

    def _prompt_of(self, spans: Sequence[Match], source_starts: Sequence[int] = ()) -> GraftedPrompt:
        """Return the prompt with the K/V of `spans` read from donors."""
        rank = self._rank
        get = self._donors.get
        read = DonorSpans(get, spans, source_starts, rank.rope, rank.device, awaited=self._awaited)
        return GraftedPrompt(rank, self.command.token_ids, self._homes, read)

    def _keep(self, rows: NDArray[np.int64]) -> None:
        """Copy computed text that shall become donors."""
        for text_id, (start, stop) in self._kept_texts.items():
            kept = rows[(rows >= start) & (rows < stop)]
            if len(kept):
                self._donors.capture(text_id, self._homes, kept)


_NULL_BLOCK = 0
"""vLLM's block that no request has."""


def _homes(command: Graft, rank: RankModel, max_rows: int, end: int) -> list[GroupKV]:
    homes: list[GroupKV] = []
    for group, block_ids in zip(rank.groups, command.block_ids, strict=True):
        # The prompt's last token may have no block yet. Nothing reads its K/V after this job: vLLM computes it once more.
        num_missing = -(-end // (group.block_size * group.split)) - len(block_ids)
        blocks = np.asarray([*block_ids, *[_NULL_BLOCK] * num_missing], np.int32)
        if group.window:
            from kvgraft.integrations.vllm.worker.window_ring import WindowRing  # loaded for models with windows

            homes.append(WindowRing(group, blocks, max_rows=max_rows, start=command.plan.prefix_len))
        else:
            homes.append(PagedKV.of(group, blocks, start=command.plan.prefix_len))
    return homes


def _scope(homes: Sequence[GroupKV], most_runs: int | None, *, end: int) -> Scope:
    longest = [home.longest_piece for home in homes if home.longest_piece is not None]
    if most_runs is not None:  # what is corrected is computed in one piece, at worst every other token of it
        longest.append(2 * most_runs)
    return Scope(
        end=end,
        is_forgetful=any(home.group.window for home in homes),
        longest_run=min(longest, default=None),
    )
