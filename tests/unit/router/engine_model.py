"""An engine as its events show it, kept as plainly as can be: what the index is compared with."""

from __future__ import annotations

import hashlib
from itertools import groupby

from kvgraft.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvgraft.reuse.donor_events import scope_of


def page_hash(parent, tokens, salt):
    raw = repr((parent, tuple(tokens), salt)).encode()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big", signed=True)


class EngineModel:
    """Pages by hash, each with its parent, text and media."""

    def __init__(self, page_size):
        self.page_size = page_size
        self.pages = {}
        self.runs = []

    def chain(self, text, salt=""):
        """Hashes and texts of the whole pages of a prompt."""
        parent, size, chain = None, self.page_size, []
        for start in range(0, len(text) - size + 1, size):
            tokens = tuple(text[start : start + size])
            own = page_hash(parent, tokens, salt)
            chain.append((own, parent, tokens))
            parent = own
        return chain

    def store(self, text, salt="", medium="GPU"):
        """Compute a prompt: pages that are missing are stored, as one event per stretch without a gap."""
        events, new = [], []
        for own, parent, tokens in self.chain(text, salt):
            if medium not in self.pages.setdefault(own, (parent, tokens, salt, set()))[3]:
                new.append((own, parent, tokens))
            elif new:
                events.append(self._event(new, salt, medium))
                new = []
        if new:
            events.append(self._event(new, salt, medium))
        return events

    def remove(self, hashes, medium):
        for name in hashes:
            self.pages[name][3].discard(medium)
        for name in [name for name, page in self.pages.items() if not page[3]]:
            del self.pages[name]
        return BlockRemoved(tuple(hashes), medium)

    def clear(self):
        self.pages.clear()
        self.runs.clear()
        return AllBlocksCleared()

    def exact(self, prompt, salt=""):
        """Tokens at the beginning of a prompt whose pages are all there; the last token is always computed."""
        count = 0
        for own, _, tokens in self.chain(prompt[:-1], salt):
            if own not in self.pages:
                break
            count += len(tokens)
        return count

    def held_runs(self, salt=""):
        """Texts of the events of a tenant, with a mark per token whether its page is there."""
        for run_salt, run in self.runs:
            if run_salt == salt:
                yield (
                    [token for _, tokens in run for token in tokens],
                    [own in self.pages for own, tokens in run for _ in tokens],
                )

    def _event(self, new, salt, medium):
        # What lies in another medium already is a text of its own; each stretch of what does not is another one.
        for is_known, stretch in groupby(new, lambda page: bool(self.pages[page[0]][3])):
            if not is_known:
                self.runs.append((salt, [(own, tokens) for own, _, tokens in stretch]))
        for own, _, _ in new:
            self.pages[own][3].add(medium)
        return BlockStored(
            tuple(own for own, _, _ in new),
            new[0][1],
            tuple(token for _, _, tokens in new for token in tokens),
            self.page_size,
            medium=medium,
            cache_salt=salt or None,
        )


def covered(prompt, first, text, held, shortest):
    """Positions at or behind `first` in runs of at least `shortest` equal tokens, where these are held."""
    found = set()
    prompt = prompt[:-1]
    for shift in range(-len(text) + 1, len(prompt)):
        run = []
        for position in range(max(first, shift), min(len(prompt), shift + len(text)) + 1):
            inside = position < min(len(prompt), shift + len(text))
            if inside and prompt[position] == text[position - shift]:
                run.append(position)
                continue
            if len(run) >= shortest:
                found.update(each for each in run if held[each - shift])
            run = []
    return found


def scope(salt=""):
    return scope_of(salt=salt)
