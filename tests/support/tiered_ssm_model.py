"""A two-tier cache with states next to a token-level oracle: of the device in full, of the host by what is copied and freed.

On the device a `HierarchicalStateCache` does what a `StateRadixCache` does, so that oracle says what leaves. What lies on the
host follows from the transfers, which carry contents: they are compared with the rules of the host after each operation, and
what leaves it with what must leave first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.support.ssm_model import HeldLock, Page, Recorded, StateModel, key_of

from kvgraft.prefix import HierarchicalStateCache, StateLock
from kvgraft.testing.slots import CheckedSlots

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.ssm_model import Tokens

    from kvgraft.prefix import EvictResult, LoadBack, SlotArray, StateMatchResult, StateRadixCache, StoredLength

_FIRST_ON_HOST = 20_000_000
_FIRST_STATE_ON_HOST = 30_000_000


class _Tier:
    """Transfers of one kind of slots; contents go along. Says to the model what it did."""

    def __init__(self, model: TieredStateModel, device: Callable[[], CheckedSlots], host: CheckedSlots) -> None:
        self.model = model
        self.device = device
        self.host = host

    def backup(self, device_slots: SlotArray) -> SlotArray | None:
        self.model.fail_perhaps()
        slots = self.host.alloc(len(device_slots))
        if slots is None:
            self.model.note("full", self, device_slots[:0])
            return None
        self.copy(device_slots, slots)
        self.model.note("copied", self, slots)
        return slots

    def load(self, host_slots: SlotArray) -> SlotArray | None:
        self.model.fail_perhaps()
        slots = self.device().alloc(len(host_slots))
        return None if slots is None else self.copy(host_slots, slots)

    def free_host(self, host_slots: SlotArray) -> None:
        self.host.free(host_slots)
        self.model.note("freed", self, host_slots)

    def copy(self, source: SlotArray, target: SlotArray) -> SlotArray:
        """Copy contents; returns `target`."""
        contents = self.model.contents
        contents.update(zip(target.tolist(), [contents[slot] for slot in source.tolist()], strict=True))
        return target


@dataclass
class Noted:
    """What a transfer did: `copied`, `freed`, `full` (no room) or `failed`; the host slots, and what they held then."""

    kind: str
    tier: _Tier | None
    slots: list[int]
    contents: list[Tokens]


@dataclass
class HostPage:
    """Host slots of a page, and when it was used last, which is told of the same page on the device."""

    slots: tuple[int, ...]
    page: Page


@dataclass
class HostState:
    """Host slot of a state, and its facts, which are those of the same state on the device."""

    slot: int
    recorded: Recorded


@dataclass
class OpenTicket:
    """A load-back in progress: its end, and what it holds."""

    ticket: LoadBack
    last: Tokens
    start: int
    locks: tuple[HeldLock, HeldLock]
    has_state: bool


class TieredStateModel(StateModel):
    """The cache, four pools and the oracle.

    Attributes:
        contents: What lies in each slot of any pool: the tokens up to its own, or those that a state has read.
        failure_rate: Share of the transfers that raise.
        tickets: Load-backs that are open.
        num_loaded: States and pages that came back to the device.
        num_host_evictions: Copies that left to make room.
    """

    def __init__(
        self,
        page_size: int,
        chunk_size: int,
        policy: str = "lru",
        *,
        size: int = 4096,
        host_pages: int = 4096,
        host_states: int = 4096,
        write_policy: str = "write_back",
        fails: Callable[[], bool] | None = None,
    ) -> None:
        self.contents: dict[int, Tokens] = {}
        self.tickets: list[OpenTicket] = []
        self.num_loaded = self.num_host_evictions = 0
        self._log: list[Noted] = []
        self._copies_all = write_policy == "write_through" and fails is None and min(host_pages, host_states) >= 4096
        self._fails = fails
        self._write_policy = write_policy
        self._has_failed = self._resets = False
        self._host = CheckedSlots(host_pages * page_size, first=_FIRST_ON_HOST)
        self._host_state_slots = CheckedSlots(host_states, first=_FIRST_STATE_ON_HOST)
        self._host_pages: dict[Tokens, HostPage] = {}
        self._host_states: dict[Tokens, HostState] = {}
        super().__init__(page_size, chunk_size, policy, size=size)

    def _make_cache(self, page_size: int, chunk_size: int, policy: str) -> StateRadixCache:
        self._tier = _Tier(self, lambda: self._slots, self._host)
        self._state_tier = _Tier(self, lambda: self._state_slots, self._host_state_slots)
        self.tiered = HierarchicalStateCache(
            page_size,
            transfer=self._tier,
            state_transfer=self._state_tier,
            write_policy=self._write_policy,
            state_chunk_size=chunk_size,
            policy=policy,
        )
        return self.tiered

    def fail_perhaps(self) -> None:
        """Raise, if the model is to."""
        if self._fails is not None and self._fails():
            self._has_failed = True
            self._log.append(Noted("failed", None, [], []))
            raise OSError("the link is down")

    def note(self, kind: str, tier: _Tier, host_slots: SlotArray) -> None:
        """Hear what a transfer did."""
        slots = host_slots.tolist()
        self._log.append(Noted(kind, tier, slots, [self.contents[slot] for slot in slots]))

    # operations

    def load_back(self, tokens: Tokens) -> None:
        """Match and bring what the host has to the device, all in one call, which finds room or not."""
        result = self._match(tokens)
        begin, last = self._ends(tokens)
        wanted = {prefix for prefix in self._prefixes(last) if prefix not in self._pages}
        needs_state = bool(last) and last not in self._states
        has_room = len(wanted) * self._page_size <= self._slots.available and needs_state <= self._state_slots.available
        self._has_failed = False
        loaded = self.tiered.load_back(result)
        came = not self._has_failed and (has_room or not last)
        assert loaded.prefix_len == len(last if came else begin)
        self._sync()
        assert not came or not len(loaded.freed) + len(loaded.state_freed)
        if came:
            slots = self.tiered.path_slots(loaded.handle).tolist()
            self._arrive(last, slots, self.tiered.state_of(loaded.handle) if needs_state else None)
        self._slots.free(loaded.freed)
        self._state_slots.free(loaded.state_freed)

    def begin(self, tokens: Tokens) -> None:
        """Match and begin a load-back, which stays open over other operations."""
        result = self._match(tokens)
        begin, last = self._ends(tokens)
        ticket = self.tiered.begin_load_back(result)
        anchor = max((prefix for prefix in self._prefixes(last) if prefix in self._pages), key=len, default=())
        has_state = bool(last) and last not in self._states
        pages = self._prefixes(last)[len(anchor) // self._page_size :]
        assert ticket.start == len(anchor)
        assert ticket.host_indices.tolist() == [slot for page in pages for slot in self._host_pages[page].slots]
        assert ticket.host_states.tolist() == ([self._host_states[last].slot] if has_state else [])
        begin_lock, anchor_lock = ticket.locks
        assert isinstance(begin_lock, StateLock)
        assert isinstance(anchor_lock, StateLock)
        holds_state = bool(anchor) and anchor == last and not has_state
        assert anchor_lock.state_locked == holds_state
        locks = (HeldLock(begin_lock, begin, bool(begin)), HeldLock(anchor_lock, anchor, holds_state))
        self.tickets.append(OpenTicket(ticket, last, len(anchor), locks, has_state))

    def end(self, *, commit: bool) -> None:
        """Commit or abort the oldest load-back."""
        opened = self.tickets[0]
        ticket = opened.ticket
        slots = self._slots.alloc(len(ticket.host_indices)) if commit else None
        states = self._state_slots.alloc(len(ticket.host_states)) if slots is not None else None
        if slots is not None and states is None:
            self._slots.free(slots)
            slots = None
        self.tickets.pop(0)
        if slots is None or states is None:
            self._forget(self.tiered.abort_load_back(ticket), (self._unlocked(opened), []))
            return
        self._tier.copy(ticket.host_indices, slots)
        self._state_tier.copy(ticket.host_states, states)
        result = self.tiered.commit_load_back(ticket, slots, states)
        assert result.prefix_len == len(opened.last)
        path = [-1] * opened.start + slots.tolist()
        unused = [
            slot
            for prefix in self._prefixes(opened.last)[opened.start // self._page_size :]
            if prefix in self._pages
            for slot in path[len(prefix) - self._page_size : len(prefix)]
        ]
        unused_states = states.tolist() if opened.last in self._states else []
        self._arrive(opened.last, path, int(states[0]) if len(states) else None)
        pages = self._unlocked(opened)
        freed = [slot for prefix in pages for slot in self._pages[prefix].slots]
        assert sorted(result.freed.tolist()) == sorted(unused + freed)
        assert result.state_freed.tolist() == unused_states
        self._sync()
        for prefix in pages:
            del self._pages[prefix]
        self._slots.free(result.freed)
        self._state_slots.free(result.state_freed)

    def reset(self) -> None:
        """Forget everything on both sides; open load-backs come to nothing."""
        tickets, self.tickets = self.tickets, []
        self._resets = True
        super().reset()
        self._resets = False
        for opened in tickets:
            assert not self.tiered.abort_load_back(opened.ticket).num_tokens
        assert self._host.available == self._host.size
        assert self._host_state_slots.available == self._host_state_slots.size

    # comparison

    def check(self) -> None:
        """Verify the device, and on the host: sizes, contents, that nothing useless is left and nothing is missing."""
        super().check()
        cache, size = self.tiered, self._page_size
        assert cache.host_size == len(self._host_pages) * size == self._host.size - self._host.available
        assert cache.host_state_size == len(self._host_states)
        assert len(self._host_states) == self._host_state_slots.size - self._host_state_slots.available
        for prefix, page in self._pages.items():
            self._check_contents(prefix, page.slots)
        for prefix, copy in self._host_pages.items():
            self._check_contents(prefix, copy.slots)
            before = prefix[:-size]
            assert not before or before in self._pages or before in self._host_pages, "a copy lost its beginning"
        slots = [(prefix, state.slot) for prefix, state in self._states.items()]
        slots += [(prefix, copy.slot) for prefix, copy in self._host_states.items()]
        for prefix, slot in slots:
            assert self.contents[slot] == prefix
            assert prefix in self._pages or prefix in self._host_pages, "a state lost its tokens"
        assert self._useless() == set(), "tokens without a state after them are left on the host"
        if self._copies_all:
            assert self._pages.keys() <= self._host_pages.keys()
            assert self._states.keys() <= self._host_states.keys()

    def _check_contents(self, prefix: Tokens, slots: tuple[int, ...]) -> None:
        begin = len(prefix) - len(slots)
        assert [self.contents[slot] for slot in slots] == [prefix[: begin + n + 1] for n in range(len(slots))]

    def _useless(self) -> set[Tokens]:
        """Pages on the host only with no state at their end nor below, there or on the device."""
        used = {page for state in (*self._host_states, *self._states) for page in self._prefixes(state)}
        return {prefix for prefix in self._host_pages if prefix not in self._pages} - used

    def _match(self, tokens: Tokens) -> StateMatchResult:
        key = key_of(tokens)
        looked = self.cache.look(key)
        result = self.cache.match_prefix(key)
        self.num_matches += 1
        self._now += 1
        self._compare(tokens, looked, result)
        return result

    def _ends(self, tokens: Tokens) -> tuple[Tokens, Tokens]:
        """The deepest states of a key: on the device, and in either tier."""
        stored = self._stored(tokens)
        device = max((prefix for prefix in stored if prefix in self._states), key=len, default=())
        either = self._states.keys() | self._host_states.keys()
        return device, max((prefix for prefix in stored if prefix in either), key=len, default=())

    def _compare(self, tokens: Tokens, looked: StoredLength, result: StateMatchResult) -> Tokens:
        device, last = self._ends(tokens)
        assert (result.prefix_len, result.host_hit_len) == looked == (len(device), len(last) - len(device))
        assert result.branching_len == len(self._stored(tokens)) * self._page_size // self.alignment * self.alignment
        pages = [self._pages[prefix] for prefix in self._prefixes(device)]
        assert result.kv_indices.tolist() == [slot for page in pages for slot in page.slots]
        assert result.state == (self._states[device].slot if device else None)
        for prefix in {device, last} - {()}:
            self._facts(prefix).last_access = self._now
        self._use(last)
        return device

    def _facts(self, prefix: Tokens) -> Recorded:
        return self._states[prefix] if prefix in self._states else self._host_states[prefix].recorded

    def _stored(self, tokens: Tokens) -> list[Tokens]:
        stored: list[Tokens] = []
        for prefix in self._prefixes(tokens):
            if prefix not in self._pages and prefix not in self._host_pages:
                break
            stored.append(prefix)
        return stored

    def _num_on_device(self, tokens: Tokens) -> int:
        return sum(prefix in self._pages for prefix in self._prefixes(tokens))

    def _use(self, tokens: Tokens) -> None:
        for prefix in self._prefixes(tokens):
            page = self._pages[prefix] if prefix in self._pages else self._host_pages[prefix].page
            page.used = self._now

    def _fill(self, tokens: Tokens, slots: SlotArray, states: dict[int, int], start: int) -> None:
        for position in range(start, len(tokens)):
            self.contents[int(slots[position])] = tokens[: position + 1]
        for position, state in states.items():
            self.contents[state] = tokens[:position]

    def _apply_insert(
        self, tokens: Tokens, slots: SlotArray, states: dict[int, int], start: int, priority: int
    ) -> tuple[int, int, list[int]]:
        applied = super()._apply_insert(tokens, slots, states, start, priority)
        self._sync()
        return applied

    def _new_page(self, prefix: Tokens, slots: tuple[int, ...]) -> Page:
        copy = self._host_pages.get(prefix)
        if copy is None:
            return super()._new_page(prefix, slots)
        copy.page.slots = slots
        return copy.page

    def _new_state(self, prefix: Tokens, slot: int, priority: int) -> Recorded:
        copy = self._host_states.get(prefix)
        if copy is None:
            return super()._new_state(prefix, slot, priority)
        copy.recorded.slot = slot
        self._record_again(copy.recorded, priority)
        return copy.recorded

    def _arrive(self, last: Tokens, path: list[int], state: int | None) -> None:
        """Note what a load-back brought, where it was not there."""
        for prefix in self._prefixes(last):
            if prefix not in self._pages:
                copy = self._host_pages[prefix]
                copy.page.slots = tuple(path[len(prefix) - self._page_size : len(prefix)])
                self._pages[prefix] = copy.page
                self.num_loaded += 1
        if state is not None and last not in self._states:
            recorded = self._host_states[last].recorded
            recorded.slot = state
            self._states[last] = recorded
            self.num_loaded += 1

    def _unlocked(self, opened: OpenTicket) -> list[Tokens]:
        """Pages that leave with the locks of a load-back, which the oracle has given back."""
        anchor = opened.locks[1].tokens
        return [] if anchor in self._states else self._chain(anchor, set())

    def _all_locks(self) -> list[HeldLock]:
        return self.locks + [lock for opened in self.tickets for lock in opened.locks]

    def _forget(self, result: EvictResult, expected: tuple[list[Tokens], list[Tokens]]) -> None:
        """Take what left out of the device; what could be copied must lie on the host now."""
        was_refused = any(noted.kind in ("full", "failed") for noted in self._log)
        self._sync()
        super()._forget(result, expected)
        if not was_refused and not self._resets:
            assert set(expected[1]) <= self._host_states.keys(), "a state left without a copy"
            useful = {page for state in self._host_states for page in self._prefixes(state)}
            assert set(expected[0]) & useful <= self._host_pages.keys(), "tokens left without a copy"

    def _sync(self) -> None:
        """Do to the oracle of the host what the transfers did, and see that what made room was the least valuable."""
        full: _Tier | None = None
        is_second = False
        for noted in self._log:
            if noted.kind == "full":
                full, is_second = (None if is_second else noted.tier), False
            elif noted.kind == "freed":
                if full is not None:
                    self.num_host_evictions += 1
                    self._check_first_to_leave(noted.contents[-1], full)
                    full, is_second = None, True
                self._note_freed(noted)
            else:
                full, is_second = None, False
                if noted.kind == "copied":
                    self._note_copied(noted)
        self._log.clear()

    def _note_copied(self, noted: Noted) -> None:
        if noted.tier is self._state_tier:
            prefix = noted.contents[0]
            self._host_states[prefix] = HostState(noted.slots[0], self._states[prefix])
            return
        for stop in range(self._page_size, len(noted.slots) + 1, self._page_size):
            prefix = noted.contents[stop - 1]
            self._host_pages[prefix] = HostPage(tuple(noted.slots[stop - self._page_size : stop]), self._pages[prefix])

    def _note_freed(self, noted: Noted) -> None:
        for prefix in noted.contents:
            if noted.tier is self._state_tier:
                del self._host_states[prefix]
            elif len(prefix) % self._page_size == 0:
                del self._host_pages[prefix]

    def _check_first_to_leave(self, prefix: Tokens, full: _Tier) -> None:
        """What is freed after there was no room is the first of its order, or left the device in this very call.

        Where none waits, nothing makes room: what is freed then belongs to a node that vanishes.
        """
        if full is self._state_tier and self._knows_states:
            pinned = {opened.last for opened in self.tickets if opened.has_state}
            waiting = [p for p in self._host_states if p not in self._states and p not in pinned]
            orders: dict[Tokens, Any] = {p: (self._policy(self._host_states[p].recorded), len(p)) for p in waiting}
            if orders and prefix not in self._states:
                assert orders[prefix] == min(orders.values()), "another state left the host first"
        elif full is self._tier and self._knows_leaves:
            pinned = {
                page for opened in self.tickets for page in self._prefixes(opened.last) if len(page) > opened.start
            }
            continued = {page[: -self._page_size] for page in (*self._host_pages, *self._pages)}
            waiting = [p for p in self._host_pages if p not in self._pages and p not in continued and p not in pinned]
            orders = {p: self._host_pages[p].page.used for p in waiting}
            if orders and prefix not in self._pages:
                assert orders[prefix] == min(orders.values()), "other tokens left the host first"

    def describe(self) -> dict[str, Any]:
        """Counts, for those who ask what a walk did."""
        return {
            "matches": self.num_matches,
            "states evicted alone": self.num_evicted_alone,
            "loaded": self.num_loaded,
            "host evictions": self.num_host_evictions,
        }
