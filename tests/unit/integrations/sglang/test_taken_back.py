"""The idea of each fix of a request's life, undone, is found by what must hold after a few calls of SGLang's."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.unit.integrations.sglang.scheduler import Scheduler

from kvgraft.integrations import sglang
from kvgraft.integrations.sglang.donors.loader import Loader
from kvgraft.integrations.sglang.requests.books import Books
from kvgraft.integrations.sglang.requests.ends import Ends
from kvgraft.integrations.sglang.requests.publishing import Publishing
from kvgraft.integrations.sglang.requests.repairs import Repairs
from kvgraft.integrations.sglang.requests.request import SGLangRequest

DOCUMENTS = [list(range(first, first + 70)) for first in (1000, 2000)]


class Script:
    """Requests of a scheduler whose policy computes the first four tokens of each copy with the second token."""

    def __init__(self):
        self.scheduler = Scheduler(1, recomputes=True, first_k=4, max_generation=1)
        self.names = iter(range(100_000, 200_000))
        for document in DOCUMENTS:
            self.end(self.begin(document))

    def new(self, count):
        return [next(self.names) for _ in range(count)]

    def submit(self, tokens, repair="after"):
        self.scheduler.submit([*tokens, *self.new(5)], "", "request", repair)
        return self.scheduler.waiting[-1]

    def begin(self, tokens, repair="after", chunk=1000):
        entry = self.submit(tokens, repair)
        self.go_on(entry, chunk)
        return entry

    def fill(self, entry, chunk=1000):
        """Up to the end of the prompt."""
        if entry in self.scheduler.waiting:
            assert self.scheduler.admit(entry, chunk)
        for _ in range(9):
            if len(entry.row) < len(entry.req.full_untruncated_fill_ids):
                self.scheduler.go_on(entry, chunk)
        return entry

    def go_on(self, entry, chunk=1000):
        """Up to the first token."""
        self.draw(self.fill(entry, chunk))

    def draw(self, entry, count=1):
        for _ in range(count):
            self.scheduler.decode(entry, *self.new(1))

    def end(self, entry, count=2):
        self.draw(entry, count)
        self.scheduler.finish(entry)
        self.scheduler.reuse.publishing.settle()
        self.scheduler.check()
        return entry

    def grafted(self):
        """A prompt of which two regions are copied, the first one right at its beginning."""
        return [*DOCUMENTS[0][20:], *self.new(9), *DOCUMENTS[1]]


def answers(script):
    script.end(script.begin(script.grafted()))


def begins_again(script):
    entry = script.begin(script.grafted())
    script.draw(entry, 2)
    script.scheduler.retract(entry)
    script.fill(entry)
    assert entry.repaired_at is not None, "a token is drawn over copies that were to be repaired first"
    script.end(entry)


def begins_again_before_its_repair(script):
    entry = script.begin(script.grafted())
    script.scheduler.retract(entry)
    script.scheduler.tree.evict(1000)
    script.scheduler.keeper.clear()
    script.go_on(entry)
    script.end(entry)


def begins_again_without_copies(script):
    entry = script.begin(script.grafted())
    script.scheduler.retract(entry)
    script.scheduler.tree.evict(1000)
    script.scheduler.keeper.clear()
    script.go_on(entry)
    assert not entry.req.skip_radix_cache_insert, "exact: what it computes is not published"


def ends_before_its_repair(script):
    entry = script.begin(script.grafted())
    pages = len(script.scheduler.tree.pages())
    script.end(entry, 0)
    assert len(script.scheduler.tree.pages()) == pages, "hidden: others go on from what was to be repaired"


def cannot_load_a_region(script):
    """The copy of the first or the second fails, or the note that it was made."""
    scheduler = script.scheduler
    for owner, name in ((scheduler.buffers, "copy"), (scheduler.keeper, "record_hit")):
        for is_second in (False, True):
            entry = script.submit(script.grafted(), "before")
            if is_second:
                assert scheduler.admit(entry, 1000)
            setattr(owner, name, lambda *_: 1 / 0)
            if is_second:
                scheduler.go_on(entry, 1000)
            else:
                assert scheduler.admit(entry, 5)
            delattr(owner, name)
            scheduler.check()
            script.go_on(entry)
            script.end(entry)


def has_a_policy_that_fails(script):
    for repair in ("before", "after"):
        recomputer = script.scheduler.reuse.repairs.passes.recomputer
        entry = script.submit(script.grafted(), repair)
        script.scheduler.match(entry)
        vars(recomputer)["policy_for"] = lambda *_: 1 / 0
        script.go_on(entry)
        script.draw(entry)
        vars(recomputer).pop("policy_for")
        script.end(entry)


def weights_change_meanwhile(script):
    entry = script.begin([*DOCUMENTS[0], *script.new(60)])
    script.scheduler.change_weights()
    script.end(entry)
    script.end(script.begin([*script.new(9), *DOCUMENTS[0]]))


def aborts(script):
    script.scheduler.abort(script.begin(script.grafted()))
    entry = script.submit(script.grafted())
    script.scheduler.match(entry)
    script.scheduler.abort(entry)
    assert script.scheduler.reuse.books.num_requests == 0, "end: requests are kept that have ended"
    assert not script.scheduler.reuse.repairs.waiting, "end: what has ended is to be repaired"


def _without(owner, name):
    """A call that does nothing."""
    return lambda patch: patch.setattr(owner, name, lambda *_, **__: None)


def _changed(owner, name, change):
    """A call in place of which there is `change` of it."""
    return lambda patch: patch.setattr(owner, name, change(getattr(owner, name)))


def _then(change):
    """What a call does, and `change` of what it was made on."""

    def made_of(call):
        def changed(self, *given, **named):
            found = call(self, *given, **named)
            change(self if found is None else found, *given)
            return found

        return changed

    return made_of


def _is_never_stale(books, *_):
    books.is_stale = False


def _has_no_attempts(request, *_):
    request.attempts = ()


def _as_if_first(planned):
    return lambda repairs, asked, num_tokens_left, _: planned(repairs, asked, num_tokens_left)


def _keeps_slots(load):
    def loaded(loader, *given):
        free, loader.tree.free = loader.tree.free, lambda _: None
        try:
            return load(loader, *given)
        finally:
            loader.tree.free = free

    return loaded


def _keeps_pins(load):
    def loaded(loader, *given):
        unpin, loader.tree.unpin = loader.tree.unpin, lambda _: None
        try:
            return load(loader, *given)
        finally:
            loader.tree.unpin = unpin

    return loaded


def _stays_barred(release):
    def released(ends, req, state):
        is_barred = req.skip_radix_cache_insert
        release(ends, req, state)
        req.skip_radix_cache_insert = is_barred

    return released


def _without_looking(adopt):
    def adopted(publishing, *given):
        waiting, publishing.repairs.waiting = publishing.repairs.waiting, ()
        adopt(publishing, *given)
        publishing.repairs.waiting = waiting

    return adopted


TAKEN_BACK = {
    # fix: what was wrong before it, its idea undone, the script that finds it and the words
    "05d6c29 a retracted request draws a token before its repair": (
        _changed(Repairs, "planned", _as_if_first),
        begins_again,
        "repaired first",
    ),
    "05d6c29 what begins anew is still to be repaired": (
        _without(Repairs, "drop"),
        begins_again_before_its_repair,
        "approximate",
    ),
    "05d6c29 attempts before a retraction are forgotten": (
        _changed(SGLangRequest, "retracted", _then(_has_no_attempts)),
        begins_again,
        "not the one that is reported",
    ),
    "45da9c4 a retracted prompt stays barred": (
        _changed(Ends, "_released", _stays_barred),
        begins_again_without_copies,
        "exact",
    ),
    "7b17a29 K/V of old weights are copied": (
        _changed(Books, "weights_change", _then(_is_never_stale)),
        weights_change_meanwhile,
        "other weights",
    ),
    "06f140d slots that were loaded belong to no request": (
        _changed(Loader, "_load", _keeps_slots),
        cannot_load_a_region,
        "lost",
    ),
    "d40bb93 a load that failed marks the one before it as repaired": (
        _without(SGLangRequest, "unload"),
        cannot_load_a_region,
        "not what is reported",
    ),
    "9da01bc a policy that fails leaves copies in the report": (
        _without(SGLangRequest, "computed_from"),
        has_a_policy_that_fails,
        "not what is reported",
    ),
    "6471c85 slots that the tree took are freed": (
        _changed(Publishing, "adopted", lambda _: lambda *_: []),
        answers,
        "lost",
    ),
    "625ce7e others go on from what ended before its repair": (
        _changed(Publishing, "adopt_computed", _without_looking),
        ends_before_its_repair,
        "hidden",
    ),
    "a request that is aborted is kept": (_without(Ends, "aborted"), aborts, "end"),
    "82f121a donors stay pinned after their copy": (_changed(Loader, "load", _keeps_pins), answers, "pinned"),
}


@pytest.mark.parametrize("fix", TAKEN_BACK)
def test_a_fix_that_is_taken_back_is_found(fix, monkeypatch):
    take_back, script, words = TAKEN_BACK[fix]
    script(Script())
    begun = Script()
    take_back(monkeypatch)
    with pytest.raises(AssertionError, match=words):
        script(begun)


def test_a_request_alone_changes_itself():
    """Who else does would be one more place in which a half-way state is to be thought of."""
    changes = [
        f"{path.name}:{target.lineno}"
        for path in Path(sglang.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign))
        for target in ast.walk(ast.Tuple(node.targets if isinstance(node, ast.Assign) else [node.target]))
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "state"
    ]
    assert not changes
