"""What a reader of KV events knows of a cache, and what the cache holds: the same pages, page by page."""

from __future__ import annotations

import struct

from kvgraft.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvgraft.prefix import UnannouncedKey


class PageIndex:
    """Pages by hash, as a router keeps them: the tokens of each and of all pages in front of it."""

    def __init__(self):
        self.pages = {}

    def read(self, events):
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.pages.clear()
            elif isinstance(event, BlockRemoved):
                for page_hash in event.block_hashes:
                    del self.pages[page_hash]
            else:
                self._store(event)

    def _store(self, event: BlockStored):
        front = () if event.parent_block_hash is None else self.pages[event.parent_block_hash]
        assert len(event.token_ids) == event.block_size * len(event.block_hashes)
        for number, page_hash in enumerate(event.block_hashes):
            front += event.token_ids[number * event.block_size : (number + 1) * event.block_size]
            assert page_hash not in self.pages, "a page is stored once"
            self.pages[page_hash] = front


def tree_pages(cache):
    """The pages of a radix tree that events speak of, in the same form."""
    pages, texts = {}, {}
    for node in cache.root_handle.subtree():
        if node.parent is None:
            texts[node] = ()
            continue
        front = texts[node.parent]
        texts[node] = front + tuple(node.token_ids.tolist())
        hashes = [value for (value,) in struct.iter_unpack(">q24x", node.page_hashes)]
        is_announced = not isinstance(node.namespace[0], UnannouncedKey)
        assert len(hashes) * cache.page_size == (len(node) if is_announced else 0)
        for number, page_hash in enumerate(hashes):
            pages[page_hash] = texts[node][: len(front) + (number + 1) * cache.page_size]
    return pages
