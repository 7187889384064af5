"""Donors of hybrid models: copies on the host, because the window slots of their text are given back."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvgraft.donors import DonorText
from kvgraft.engine.kv.kv_space import HostDonorKV
from kvgraft.engine.kv.request_donors import RequestDonors
from kvgraft.memory import KVBlock
from kvgraft.reuse.lineage import ComputedRun

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvgraft.donors import Donor
    from kvgraft.engine.kv.kv_space import KVSpace
    from kvgraft.engine.kv.request_kv import RequestKV
    from kvgraft.engine.kv.sliding_windows import SlidingWindows
    from kvgraft.reuse.donor_rules import DonorRules
    from kvgraft.types import DonorId, TokenArray


class HostDonors(RequestDonors):
    """Donors of hybrid models: what was computed since the last call, copied to the host.

    A stretch without captured window K/V, for want of host memory, is left out.
    """

    def __init__(self, space: KVSpace, rules: DonorRules, windows: SlidingWindows) -> None:
        super().__init__(space, rules)
        self._windows = windows

    def register(self, kv: RequestKV, token_ids: TokenArray) -> None:
        """Register each run that was computed since the last call and that donors do not have yet."""
        row = kv.windows
        if row is None or not row.is_donor:
            return
        done = row.registered_len
        for start, stop, generation in self._rules.runs(kv.lineage, kv.lineage.prefix_len, len(token_ids)):
            first = max(start, done)
            is_admitted = self._rules.admits(stop - first, generation)
            if is_admitted and not self._rules.is_known(kv.namespace, token_ids[first:stop], generation):
                self._add(kv, token_ids, ComputedRun(first, stop, generation))
        row.registered_len = max(done, len(token_ids))
        self._windows.forget_captured(kv)

    def join(self, donor_ids: Iterable[DonorId]) -> list[DonorId]:
        """See `RequestDonors.join`: pieces are copies of their own here, and a text would be found in as many parts."""
        catalogue = self._space.donors
        found = (catalogue.get(donor_id) for donor_id in donor_ids if not catalogue.is_pinned(donor_id))
        parts = sorted(
            (d for d in found if d and isinstance(d.kv, HostDonorKV)), key=lambda donor: donor.start_position
        )
        runs: list[list[Donor]] = []
        for part in parts:
            if runs and runs[-1][-1].start_position + runs[-1][-1].num_tokens == part.start_position:
                runs[-1].append(part)
            else:
                runs.append([part])
        joined = (run[0].donor_id if len(run) == 1 else self._joined(run) for run in runs)
        return [donor_id for donor_id in joined if donor_id is not None]

    def _joined(self, parts: Sequence[Donor]) -> DonorId | None:
        """Make one donor of several, which are gone in either case; what they have saved counts for the whole."""
        whole, space = DonorText.joined(parts), self._space

        def add() -> DonorId | None:
            block = KVBlock.join([space.host.get(part.donor_id, 0, part.num_tokens) for part in parts])
            saved = sum(space.donors.saved_tokens(part.donor_id) for part in parts)
            for part in parts:
                space.remove_donor(part.donor_id)
            donor_id = space.add_host_donor(whole, lambda: block)
            if donor_id is not None:
                space.donors.record_hit(donor_id, saved)
            return donor_id

        return self._add_donor(whole, add)

    def _add(self, kv: RequestKV, token_ids: TokenArray, run: ComputedRun) -> None:
        """Register the parts of a run with windows that are known."""
        for start, block in self._windows.known_parts(kv, run.start, run.stop):
            part = run._replace(start=start, stop=start + block.num_tokens)
            if not self._rules.admits(block.num_tokens, run.generation):
                continue
            text, slots = DonorText.of_run(kv.namespace, token_ids, part), kv.kv_indices[part.start : part.stop]
            export = partial(self._windows.pool.export, slots, block)
            donor_id = self._add_donor(text, partial(self._space.add_host_donor, text, export))
            if donor_id is not None:
                kv.made.append(donor_id)
