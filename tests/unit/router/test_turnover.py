"""Which workers count as full, from what they say comes and goes, whatever is remembered of it here."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.router.engine_model import EngineModel

from kvgraft.donors import Donor
from kvgraft.events import BlockRemoved
from kvgraft.reuse.donor_events import donor_removed, donor_stored, scope_of
from kvgraft.router.directory import Directory
from kvgraft.router.held_text import HeldText
from kvgraft.router.load import WorkerLoad
from kvgraft.router.policy import Prompt, Reuse
from kvgraft.router.worker import parse_worker
from kvgraft.types import DonorId, Namespace


def donor(number, size=1_000, *, text=None, generation=0):
    """A donor with a text of its own, or that of another number."""
    tokens = np.random.default_rng(number if text is None else text).integers(0, 30_000, size).astype(np.int32)
    return Donor(DonorId(number), Namespace("model"), tokens, None, generation)


@pytest.mark.parametrize("max_tokens", [200_000, 12_000, 900])
def test_text_that_nobody_holds_is_shared_out_whatever_is_remembered_here(max_tokens):
    """Two workers hold 20 donors of 1,000 tokens each; a router that remembers all, some or none sends both as much."""
    specs = [parse_worker(f"http://{name}:1,events=tcp://{name}:1") for name in "ab"]
    directory, loads = Directory(specs, max_tokens=max_tokens), [WorkerLoad(spec) for spec in specs]
    live = {spec.name: [] for spec in specs}
    for number in range(120):
        new = donor(number)
        scores = directory.score(new.token_ids, scope_of())
        load = Reuse().choose(Prompt(new.token_ids, scope_of(), b""), loads, scores)
        load.num_sent += 1
        there = live[load.spec.name]
        gone = [donor_removed(there.pop(0))] if len(there) == 20 else []
        there.append(new)
        directory.apply(load.spec.name, [*gone, donor_stored(new)])
    assert all(load.num_sent >= 45 for load in loads), [load.num_sent for load in loads]


def test_what_went_here_first_counts_when_the_worker_says_that_it_is_gone():
    index = HeldText(grafts=False, max_tokens=2_500)
    index.apply([donor_stored(donor(0)), donor_stored(donor(1)), donor_stored(donor(2))])
    assert not index.is_full
    index.apply([donor_removed(donor(0))])
    assert index.is_full, "1,000 went here, and as many there, of 3,000 that came"


def test_a_worker_is_full_though_nothing_of_it_fits_here():
    index = HeldText(grafts=False, max_tokens=900)
    for number in range(10):
        index.apply([donor_stored(donor(number))])
    assert not index.is_full
    for number in range(10, 16):
        index.apply([donor_removed(donor(number - 10)), donor_stored(donor(number))])
    assert (index.is_full, index.num_tokens) == (True, 0)


def test_healing_displaces_nothing():
    """Of each text an approximate donor comes, and then an exact one in its place."""
    index = HeldText(grafts=False, max_tokens=100_000)
    for number in range(0, 40, 2):
        before, healed = donor(number, 600, generation=1), donor(number + 1, 600, text=number)
        index.apply([donor_stored(before)])
        index.apply([donor_stored(healed), donor_removed(before)])
    assert (index.is_full, index.num_tokens) == (False, 20 * 600)


def test_a_full_worker_that_heals_is_full():
    index = HeldText(grafts=False, max_tokens=100_000)
    for number in range(0, 80, 2):
        before, healed = donor(number, 600, generation=1), donor(number + 1, 600, text=number)
        gone = [donor_removed(donor(number - 39, 600, text=number - 40))] if number >= 40 else []
        index.apply([*gone, donor_stored(before), donor_stored(healed), donor_removed(before)])
    assert (index.is_full, index.num_tokens) == (True, 20 * 600)


def test_the_last_donor_of_a_text_is_a_loss():
    index = HeldText(grafts=False, max_tokens=100_000)
    index.apply([donor_stored(donor(0)), donor_stored(donor(1, text=0))])
    index.apply([donor_removed(donor(0))])
    assert not index.is_full
    index.apply([donor_removed(donor(1, text=0))])
    assert index.is_full


def test_pages_that_move_from_one_medium_to_another_are_not_lost():
    engine, index = EngineModel(16), HeldText(grafts=False, max_tokens=100_000)
    for number in range(8):
        text = list(range(1000 * number, 1000 * number + 160))
        index.apply([*engine.store(text, medium="GPU"), *engine.store(text, medium="CPU")])
        index.apply([engine.remove([name for name, _, _ in engine.chain(text)], "GPU")])
    assert (index.is_full, index.num_tokens) == (False, 8 * 160)


def test_pages_that_are_not_remembered_count():
    """What stands behind a page that is unknown here is remembered for nobody; it takes room all the same."""
    engine, index = EngineModel(16), HeldText(grafts=False, max_tokens=100_000)
    texts = [list(range(1000 * number, 1000 * number + 160)) for number in range(12)]
    for number, text in enumerate(texts):
        index.apply(engine.store(text)[1:] if number % 2 else engine.store(text))
    assert not index.is_full
    index.apply([BlockRemoved(tuple(range(10_000, 10_070)), "GPU")])
    assert index.is_full, "70 pages of 16 tokens, of 120 that came"
