"""Pages of one worker's prefix cache: chains of text from the beginning of a prompt.

Engines name pages by hashes of their own, which are never computed here: an event gives the tokens with them. So one
index serves engines of any page size and hash. A page without a known parent is left out, and so is everything after
it: too little is known then, never too much. Tokens are compared one by one.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvgraft.errors import CorruptCacheError
from kvgraft.events.log import NAMESPACE_SALT
from kvgraft.reuse.donor_events import scope_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from kvgraft.events import BlockHash, BlockRemoved, BlockStored

    Tokens = NDArray[np.int32]

_UNNAMED = "GPU"
"""Medium of events that name none."""
_NUM_MEDIA = 8
_BYTES_PER_RUN = 700
_BYTES_PER_PAGE = 250
_BYTES_PER_TOKEN = 4


@dataclass(slots=True, eq=False)
class BlockRun:
    """Pages that were stored together, each continuing the one before.

    Attributes:
        number: Order in which runs came; the key under which the chains keep it.
        scope: Scope of the text.
        parent: Run before it and how many of its pages, or None at the beginning of a prompt.
        tokens: int32 `(pages * page_size,)`.
        page_size: Tokens per page.
        hashes: The engine's names of the pages.
        media: Media of each page, a bit per medium; 0 for a page that is gone.
        children: Runs after a number of own pages, by that number and their first page's tokens.
        num_held: Pages that lie somewhere.
        age: Number of the youngest run after it that has left, or its own.
    """

    number: int
    scope: str
    parent: tuple[BlockRun, int] | None
    tokens: Tokens
    page_size: int
    hashes: tuple[BlockHash, ...]
    media: bytearray
    children: dict[tuple[int, bytes], BlockRun] = field(default_factory=dict)
    num_held: int = 0
    age: int = 0

    def num_held_before(self, pages: int) -> int:
        """Count how many of the first `pages` pages are held without a gap."""
        gap = self.media.find(0, 0, pages)
        return pages if gap < 0 else gap

    @property
    def num_bytes(self) -> int:
        """Memory that the run takes, about."""
        return _BYTES_PER_RUN + _BYTES_PER_TOKEN * len(self.tokens) + _BYTES_PER_PAGE * len(self.hashes)

    def first_page(self) -> bytes:
        """Return the tokens of the first page as bytes."""
        return self.tokens[: self.page_size].tobytes()


class StoredPages(NamedTuple):
    """The run that an event added, or None, and runs that had to leave because there is too much text."""

    added: BlockRun | None
    dropped: tuple[BlockRun, ...]


class BlockChains:
    """Chains of pages of one worker, within a limit of memory. Not thread-safe.

    Invariants (verified by `check`):
        - Every held page is found by its hash, and `num_tokens` and `num_bytes` count all runs.
        - A run is kept as long as one of its pages is held or it has children.
        - Every run without children waits in `_oldest` for its turn to leave; those before others stay.

    Complexity: `stored` and `match` O(tokens), `removed` O(pages).
    """

    def __init__(self, max_bytes: int) -> None:
        """Keep about `max_bytes` at most; the chains that were extended longest ago leave first."""
        self._max_bytes = max_bytes
        self._media: dict[str, int] = {}
        self._places: dict[BlockHash, tuple[BlockRun, int]] = {}
        self._roots: dict[tuple[str, bytes], BlockRun] = {}
        self._runs: dict[int, BlockRun] = {}
        self._oldest: list[tuple[int, int]] = []
        self._num_runs = 0
        self._page_sizes: dict[int, int] = {}
        self.num_tokens = self.num_bytes = 0

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Return whether a page is remembered, held or not."""
        return block_hash in self._places

    def num_held_tokens(self, block_hashes: Iterable[BlockHash]) -> int:
        """Count the tokens of those of some pages that lie anywhere. Complexity: O(pages)."""
        places = [place for name in block_hashes if (place := self._places.get(name)) is not None]
        return sum(run.page_size for run, page in places if run.media[page])

    def stored(self, event: BlockStored) -> StoredPages:
        """Take pages that were stored; those that are known lie in one more place then."""
        pages, size = len(event.block_hashes), event.block_size
        if not pages or size < 1 or len(event.token_ids) != pages * size:
            return StoredPages(None, ())
        parent, scope = self._parent(event)
        if scope is None:
            return StoredPages(None, ())
        medium, known = self._bit(event.medium), 0
        for block_hash in event.block_hashes:
            place = self._places.get(block_hash)
            if place is None:
                break
            self._hold(*place, medium)
            parent, known = (place[0], place[1] + 1), known + 1
        hashes = event.block_hashes[known:]
        if not hashes or len(set(hashes)) < len(hashes) or any(name in self._places for name in hashes):
            return StoredPages(None, ())
        tokens = np.array(event.token_ids[known * size :], np.int32)
        if tokens.ndim != 1:  # pairs of tokens, as SGLang has them for some ways of speculation
            return StoredPages(None, ())
        run = self._append(BlockRun(self._num_runs, scope, parent, tokens, size, hashes, bytearray(len(hashes))))
        if run is None:
            return StoredPages(None, ())
        for page in range(len(hashes)):
            self._hold(run, page, medium)
        dropped = tuple(self._shrink())
        return StoredPages(None if run in dropped else run, dropped)

    def removed(self, event: BlockRemoved) -> list[BlockRun]:
        """Take pages that are gone from where the event says; returns runs of which nothing is left."""
        medium, touched = self._bit(event.medium), {}
        for block_hash in event.block_hashes:
            place = self._places.get(block_hash)
            if place is not None:
                self._release(*place, medium)
                touched[place[0].number] = place[0]
        empty = [run for run in touched.values() if not run.num_held]
        for run in empty:
            self._forget_empty(run)
        return empty

    def match(self, scope: str, token_ids: Tokens) -> int:
        """Count the tokens at the beginning of a prompt that are held, page by page."""
        matched, at = 0, None
        while True:
            run = self._next_run(scope, at, token_ids[matched:])
            if run is None:
                return matched
            size = min(len(run.tokens), len(token_ids) - matched)
            unequal = np.flatnonzero(run.tokens[:size] != token_ids[matched : matched + size])
            pages = (int(unequal[0]) if len(unequal) else size) // run.page_size
            held = run.num_held_before(pages)
            matched += held * run.page_size
            at = (run, held)
            if held < pages or not held:
                return matched

    def runs(self) -> Iterator[BlockRun]:
        """Yield all runs in the order in which they came."""
        return iter(self._runs.values())

    def clear(self) -> None:
        """Forget everything."""
        self._places.clear()
        self._roots.clear()
        self._runs.clear()
        self._oldest.clear()
        self._page_sizes.clear()
        self.num_tokens = self.num_bytes = 0

    def check(self) -> None:
        """Verify the invariants; for tests."""
        held = {run.hashes[i]: (run, i) for run in self.runs() for i, media in enumerate(run.media) if media}
        if held.keys() - self._places.keys() or any(self._places[key] != place for key, place in held.items()):
            raise CorruptCacheError("held pages are not found by their hashes")
        sizes = [(len(run.tokens), run.num_bytes) for run in self.runs()]
        if (self.num_tokens, self.num_bytes) != (sum(size[0] for size in sizes), sum(size[1] for size in sizes)):
            raise CorruptCacheError("sizes of runs do not sum up")
        for run in self.runs():
            if run.num_held != sum(map(bool, run.media)) or not (run.num_held or run.children):
                raise CorruptCacheError("a run is kept without a page")
            above = self._roots if run.parent is None else run.parent[0].children
            if run not in above.values():
                raise CorruptCacheError("a run is not below its parent")
        waiting = set(self._oldest)
        if any((run.age, run.number) not in waiting for run in self.runs() if not run.children):
            raise CorruptCacheError("a run at the end of a chain never leaves")

    def _parent(self, event: BlockStored) -> tuple[tuple[BlockRun, int] | None, str | None]:
        """Return the parent and the scope of pages; None if that is unknown or is no text."""
        if event.parent_block_hash is None:
            return None, scope_of_pages(event)
        place = self._places.get(event.parent_block_hash)
        if place is None or not place[0].media[place[1]] or scope_of_pages(event) is None:
            return None, None
        return (place[0], place[1] + 1), place[0].scope

    def _append(self, run: BlockRun) -> BlockRun | None:
        """Take a run up below its parent; None if there is one with the same first page, under another hash."""
        if run.parent is None:
            siblings: dict[tuple[str, bytes], BlockRun] | dict[tuple[int, bytes], BlockRun] = self._roots
            key: tuple[str | int, bytes] = (run.scope, run.first_page())
        else:
            siblings, key = run.parent[0].children, (run.parent[1], run.first_page())
        if key in siblings:
            return None
        siblings[key] = run  # type: ignore[index]
        self._page_sizes[run.page_size] = self._page_sizes.get(run.page_size, 0) + 1
        self.num_tokens += len(run.tokens)
        self.num_bytes += run.num_bytes
        run.age, self._num_runs = run.number, self._num_runs + 1
        self._runs[run.number] = run
        self._may_leave(run)
        for page, block_hash in enumerate(run.hashes):
            self._places[block_hash] = (run, page)
        return run

    def _may_leave(self, run: BlockRun) -> None:
        """Note a run without children; notes that are no longer true are cleared when they are the most."""
        heapq.heappush(self._oldest, (run.age, run.number))
        if len(self._oldest) > 2 * len(self._runs) + 64:
            self._oldest = [(each.age, each.number) for each in self._runs.values() if not each.children]
            heapq.heapify(self._oldest)

    def _bit(self, medium: str | None) -> int:
        """Return the bit of a medium; those beyond the first seven share the last one."""
        name = medium or _UNNAMED
        if name not in self._media and len(self._media) < _NUM_MEDIA - 1:
            self._media[name] = len(self._media)
        return 1 << self._media.get(name, _NUM_MEDIA - 1)

    def _hold(self, run: BlockRun, page: int, medium: int) -> None:
        run.num_held += not run.media[page]
        run.media[page] |= medium

    def _release(self, run: BlockRun, page: int, medium: int) -> None:
        was_held = bool(run.media[page])
        run.media[page] &= 0xFF ^ medium
        run.num_held -= was_held and not run.media[page]

    def _next_run(self, scope: str, at: tuple[BlockRun, int] | None, rest: Tokens) -> BlockRun | None:
        for size in self._page_sizes:
            first = rest[:size].tobytes()
            run = self._roots.get((scope, first)) if at is None else at[0].children.get((at[1], first))
            if run is not None:
                return run
        return None

    def _shrink(self) -> Iterator[BlockRun]:
        while self.num_bytes > self._max_bytes:
            age, number = heapq.heappop(self._oldest)
            oldest = self._runs.get(number)
            if oldest is not None and oldest.age == age and not oldest.children:
                oldest.media, oldest.num_held = bytearray(len(oldest.media)), 0
                self._forget_empty(oldest)
                yield oldest

    def _forget_empty(self, run: BlockRun) -> None:
        """Forget a run of which nothing is held, and those before it that were kept for it alone."""
        while not run.num_held and not run.children and run.number in self._runs:
            del self._runs[run.number]
            self.num_tokens -= len(run.tokens)
            self.num_bytes -= run.num_bytes
            for block_hash in run.hashes:
                del self._places[block_hash]
            self._page_sizes[run.page_size] -= 1
            if not self._page_sizes[run.page_size]:
                del self._page_sizes[run.page_size]
            if run.parent is None:
                del self._roots[run.scope, run.first_page()]
                return
            above, pages = run.parent
            del above.children[pages, run.first_page()]
            above.age = max(above.age, run.age)
            if above.num_held and not above.children:
                self._may_leave(above)
            run = above


def scope_of_pages(event: BlockStored) -> str | None:
    """Return the scope of pages; None if more than adapter and salt enters their hashes, such as images.

    vLLM names adapter and salt among the keys of a page, the salt in the first page of a prompt alone.
    """
    salt, adapter = event.cache_salt, event.lora_name
    if event.lora_id is not None and adapter is None:
        return None  # an adapter without a name
    for page, keys in enumerate(event.extra_keys or ()):
        strangers: list[object] = list(keys or ())
        if adapter in strangers:
            strangers.remove(adapter)  # once, for a salt may have the same name
        if not strangers:
            continue
        (named,) = strangers if len(strangers) == 1 else (None,)
        # A salt stands in the first page of a prompt alone; after it stands the hash of an image.
        if not isinstance(named, str) or page or event.parent_block_hash is not None:
            return None
        if named.startswith(NAMESPACE_SALT) or salt not in (None, named):
            return None  # a client's salt; ours names the namespace as `cache_salt`
        salt = named
    if salt is not None and salt.startswith(NAMESPACE_SALT):
        return salt  # donors name the namespace of it
    return scope_of(adapter, salt)
