"""One graft on one rank: reused K/V in, gaps and chosen tokens computed, pass by pass."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import IntegrationError, PolicyError
from kvgraft.graft.drift_plan import DriftPlan
from kvgraft.graft.select import NoRecompute, Observation, PolicySteps, Recompute
from kvgraft.graft.sparse_prefill import QUERY_ROWS, marked_runs, selection_context
from kvgraft.integrations.vllm.messages import GraftOutcome
from kvgraft.integrations.vllm.worker.group_kv import GroupKV, PagedKV
from kvgraft.integrations.vllm.worker.passes import (
    AllLayersPass,
    GraftedPrompt,
    GraftPass,
    KeyDeviationPass,
    QueryPass,
)
from kvgraft.integrations.vllm.worker.query_look import QueryLook
from kvgraft.integrations.vllm.worker.ranks import all_ranks, summed_over_ranks, together
from kvgraft.integrations.vllm.worker.spans import DonorSpans
from kvgraft.integrations.vllm.worker.virtual_batch import BlockTable
from kvgraft.integrations.vllm.worker.window_ring import WindowRing
from kvgraft.memory.block import KVBlock
from kvgraft.reuse.failures import miss_of
from kvgraft.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvgraft.graft.drift import DriftCorrection
    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.integrations.vllm.messages import Graft, TextId
    from kvgraft.integrations.vllm.worker.donor_store import DonorStore
    from kvgraft.integrations.vllm.worker.sparse_pass import RankModel
    from kvgraft.types import Match

logger = logging.getLogger(__name__)


class GraftJob:
    """Takes one graft to its outcome: `begin`, then `step` until `outcome` is set.

    All ranks take the same steps: these follow from the command and, where keys or attention are observed, from sums over
    ranks; K/V from a store are handed in (`arrive`) when all ranks have them. A rank that cannot read a donor makes all of
    them compute the positions instead, which gives what a full prefill would.
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
    ) -> None:
        self.command = command
        self.outcome: GraftOutcome | None = None
        self._rank = rank
        self._donors = donors
        self._homes = _homes(command, rank, max_rows)
        self._max_rows = max_rows
        is_chosen_from = command.plan.is_approximate and not command.is_substituted
        self._policy = policy if is_chosen_from else NoRecompute()
        self._correction = None if command.is_substituted else correction
        self._context = selection_context(command.plan, command.token_ids)
        self._computed = np.zeros(command.end, np.bool_)
        self._corrected = np.zeros(command.end, np.bool_)
        self._has_begun = False
        self._awaited = frozenset(command.cold)
        self.is_blocked = False
        self._kept_texts = {text_id: (start, stop) for text_id, start, stop in command.captures}
        self._passes: list[GraftPass] = []
        self._captured: GraftPass | None = None
        self._look: QueryLook | None = None
        self._fell_back = ""
        self._is_policy_error = False
        self._inject_s = self._compute_s = 0.0

    def begin(self) -> None:
        """Read the donors and decide the first pass; every rank must come here in the same step.

        Where a rank cannot, or the policy fails, all of them compute everything.
        """
        started = time.perf_counter()
        command = self.command
        try:
            steps = PolicySteps(self._policy, self._context)
            spans = self._spans(command.spans, command.source_starts)
            first = steps.first()
        except Exception as error:
            logger.exception("graft of request %s cannot begin; it is computed", command.request_id)
            miss = miss_of(error)
            self._fell_back, self._is_policy_error = miss.detail, miss.reason is MissReason.POLICY_ERROR
        if all_ranks(not self._fell_back):
            self._prompt = GraftedPrompt(self._rank, command.token_ids, self._homes, spans)
            self._steps = steps
            self._begin_step(first)
        else:
            self._compute_everything(self._fell_back or "another rank could not begin")
        self._inject_s += time.perf_counter() - started

    def _compute_everything(self, reason: str) -> None:
        """Begin afresh and copy nothing: every position is computed, over whatever lies there."""
        command = self.command
        self._fell_back = reason
        if command.plan.exact_len and any(home.group.window for home in self._homes):
            # The windows in front of the exact prefix's end were to come from donors: nothing can be computed here.
            raise IntegrationError(reason)
        self._prompt = GraftedPrompt(self._rank, command.token_ids, self._homes, self._spans((), ()))
        self._steps = PolicySteps(NoRecompute(), self._context)
        self._begin_step(self._steps.first())

    def _give_up_reuse(self, failure: PolicyError | None) -> None:
        """The policy failed behind its first step, on this rank or another: what passes have computed counts for nothing."""
        logger.error("graft of request %s goes no further; it is computed", self.command.request_id, exc_info=failure)
        for home in self._homes:
            home.restart()
        for text_id in self._kept_texts:
            self._donors.discard(text_id)  # what was kept of it had attended to copies
        self._computed[:], self._corrected[:] = False, False
        self._has_begun, self._is_policy_error = False, True
        self._compute_everything(str(failure or "the selection policy failed on another rank"))

    @property
    def computes_everything(self) -> bool:
        """Whether donors could not be read, so that nothing is copied."""
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
        """Keep nothing of a text of which no donor is to be made any more; others are ignored."""
        self._kept_texts.pop(text_id, None)

    def step(self, max_rows: int) -> int:
        """Compute up to `max_rows` rows and return how many; sets `outcome` behind the last of all.

        `is_blocked` says that the next rows attend to K/V that are on their way.
        """
        started = time.perf_counter()
        current = self._passes[0]
        rows = np.empty(0, np.int64) if current.is_done else current.advance(min(max_rows, self._max_rows))
        if current is self._captured:
            self._keep(rows)
        done, current.inject_s = current.inject_s, 0.0
        self._inject_s += done
        # What follows the last row of a pass may look at all that is reused.
        is_ended = current.is_done and self._prompt.spans.is_complete
        self.is_blocked = not (is_ended or len(rows))
        if is_ended:
            del self._passes[0]
            for positions in current.corrected:
                self._corrected[positions] = True
        is_over = not self._passes and not self._next_step(current)
        self._compute_s += time.perf_counter() - started - done
        if is_over:
            self._finish()
        return len(rows)

    def _begin_step(self, step: Recompute, observed: KeyDeviationPass | None = None) -> None:
        """Lay out the passes that a step of the policy takes."""
        command, prompt = self.command, self._prompt
        self._look = None
        if step.observe_key_deviation:
            everything = np.arange(command.plan.exact_len, command.end)
            assert self._rank.stack is not None, "the self-check finds it where the policy observes keys"
            self._passes = [KeyDeviationPass(prompt, everything, self._rank.stack)]
            return
        is_first, self._has_begun = not self._has_begun, True
        before = self._computed.copy()
        rows = self._rows_of(step, is_first=is_first)
        drift = DriftPlan(
            self._context, rows, step.sample, before, self._correction, max_length=self._prompt.longest_run
        )
        if step.observe_query:
            query = command.plan.compute[-QUERY_ROWS:]
            self._look = QueryLook(self._rank, self._homes, query, command.end)
        # What observes keys samples nothing (`KVDeviation`): behind it there is nothing to correct.
        whole = AllLayersPass(prompt, rows, self._look, drift) if observed is None else observed.later_layers(rows)
        self._captured = whole if is_first else None  # all gaps are in the first pass
        self._passes = [whole]
        if self._look is not None:
            behind = np.arange(command.end, command.plan.num_tokens)
            self._passes.append(QueryPass(prompt, behind, self._look))

    def _rows_of(self, step: Recompute, *, is_first: bool) -> NDArray[np.int64]:
        """Gaps and chosen tokens that are not computed yet, and the query rows among the gaps behind them once more.

        The same rows as in the embedded engine (`SparsePrefill`); those behind the graft are the engine's. Where a home
        forgets, everything computed so far is computed again: only so can a row further in front be run a second time.
        """
        plan, end = self.command.plan, self.command.end
        if self._fell_back:
            return np.arange(plan.exact_len, end)
        gaps = plan.compute[plan.compute < end]
        wanted = np.union1d(gaps, step.positions)
        new = wanted[~self._computed[wanted]]
        self._computed[new] = True
        if not len(new) or is_first:
            return new
        if any(home.forgets for home in self._homes):
            for home in self._homes:
                home.restart()
            return np.flatnonzero(self._computed)
        query = plan.compute[-QUERY_ROWS:]
        return np.union1d(new, query[(query > new[0]) & (query < end)])

    def _next_step(self, last: GraftPass) -> bool:
        """Ask the policy for more; False if there is no more. Where it fails on one rank, all of them compute everything."""
        observed = last if isinstance(last, KeyDeviationPass) else None
        deviation = None if observed is None else observed.deviation()
        mass = None if self._look is None else summed_over_ranks(self._look.mass).numpy()
        step, failure = None, None
        together(
            lambda: None
        )  # a rank that failed since the last vote votes here: what follows is about the policy alone
        try:
            step = self._steps.send(Observation(None, mass, deviation))
        except PolicyError as error:
            failure = error
        if not all_ranks(failure is None):
            self._give_up_reuse(failure)
        elif step is None:
            return False
        else:
            self._begin_step(step, observed)
        return True

    def _finish(self) -> None:
        started = time.perf_counter()
        for home in self._homes:
            home.finish(self._prompt.spans, self.command.end)
        self._inject_s += time.perf_counter() - started
        self.outcome = GraftOutcome(
            self._recomputed_runs(),
            self._inject_s * 1e3,
            self._compute_s * 1e3,
            self._fell_back,
            corrected_tokens=int((self._corrected & ~self._computed).sum()),
            is_policy_error=self._is_policy_error,
        )

    def _recomputed_runs(self) -> tuple[tuple[int, int], ...]:
        """Reused tokens that were computed again."""
        plan, is_again = self.command.plan, self._computed.copy()
        is_again[plan.compute[plan.compute < self.command.end]] = False
        return marked_runs(is_again)

    def _spans(self, spans: Sequence[Match], source_starts: Sequence[int]) -> DonorSpans:
        return DonorSpans(self._donors, spans, source_starts, self._rank.rope, self._rank.device, awaited=self._awaited)

    def _keep(self, rows: NDArray[np.int64]) -> None:
        """Copy computed text that shall become donors."""
        for text_id, (start, stop) in self._kept_texts.items():
            kept = rows[(rows >= start) & (rows < stop)]
            if len(kept):
                self._donors.append(text_id, read_block(self._homes, kept))


def read_block(homes: list[GroupKV], positions: NDArray[np.int64]) -> KVBlock:
    """Copy the K/V of `positions` to host memory."""
    places = [(home.place(positions), home.layers) for home in homes]
    pairs = [place.read(layer) for place, layers in places for layer in layers]
    return KVBlock(tuple(keys.cpu() for keys, _ in pairs), tuple(values.cpu() for _, values in pairs))


def _homes(command: Graft, rank: RankModel, max_rows: int) -> list[GroupKV]:
    homes: list[GroupKV] = []
    for group, first_layer, block_ids in zip(rank.groups, rank.first_layers, command.block_ids, strict=True):
        blocks = np.asarray(block_ids, np.int32)
        if group.window:
            homes.append(WindowRing(group, first_layer, blocks, max_rows=max_rows))
        else:
            table, caches = BlockTable(blocks, group.block_size), [layer.cache for layer in group.layers]
            homes.append(PagedKV(group, first_layer, table, caches, start=command.plan.exact_len))
    return homes
