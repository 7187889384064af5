"""DonorCatalogue by example: adding, finding, evicting, pinning, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvgraft.donors import DonorCatalogue, DonorQuery, new_secret, set_process_secret
from kvgraft.donors.fingerprint import Fingerprinter
from kvgraft.donors.secret import process_secret
from kvgraft.errors import CapacityError, ConfigError, CorruptCacheError
from kvgraft.types import Fidelity, KeyedNamespace, Match, Namespace

NAMESPACE = Namespace("model")


def make_text(length, *, seed=0):
    return np.random.default_rng(seed).integers(0, 30_000, length)


def make_catalogue(*texts, capacity=10_000, **options):
    """A catalogue and the ids of `texts`."""
    catalogue = DonorCatalogue(capacity, **options)
    return catalogue, [catalogue.add(NAMESPACE, text, f"kv-{i}").donor.donor_id for i, text in enumerate(texts)]


def ids(donors):
    return [donor.donor_id for donor in donors]


def test_empty_catalogue_finds_nothing():
    catalogue = DonorCatalogue(100)
    assert catalogue.find(DonorQuery(NAMESPACE, make_text(100))) == []
    assert (len(catalogue), catalogue.num_tokens, list(catalogue), list(catalogue.victims())) == (0, 0, [], [])
    assert catalogue.evict(10) == []
    catalogue.check()


def test_shifted_text_is_found_with_donor_and_offset():
    catalogue, (donor_id,) = make_catalogue(make_text(500))
    prompt = np.concatenate([make_text(33, seed=1), make_text(500)[100:400], make_text(20, seed=2)])
    assert catalogue.find(DonorQuery(NAMESPACE, prompt)) == [Match(33, donor_id, 100, 300)]


def test_added_donor_keeps_what_it_was_given():
    catalogue = DonorCatalogue(1_000)
    text = make_text(50)
    kv = object()
    donor, evicted = catalogue.add(NAMESPACE, text, kv, generation=2, start_position=9)
    assert (donor.namespace, donor.kv, donor.generation, donor.start_position) == (NAMESPACE, kv, 2, 9)
    assert evicted == ()
    assert donor.num_tokens == 50
    assert catalogue.get(donor.donor_id) is donor
    before = text.copy()
    text[:] = 0
    assert donor.token_ids.tolist() == before.tolist()
    with pytest.raises(ValueError, match="read-only"):
        donor.token_ids[0] = 1


def test_matches_are_clipped_to_start():
    catalogue, (donor_id,) = make_catalogue(make_text(300))
    assert catalogue.find(DonorQuery(NAMESPACE, make_text(300), start=200)) == [
        Match(200, donor_id, 200, 100, fidelity=Fidelity.EXACT)
    ]
    assert catalogue.find(DonorQuery(NAMESPACE, make_text(300), start=284)) == [
        Match(284, donor_id, 284, 16, fidelity=Fidelity.EXACT)
    ]
    assert catalogue.find(DonorQuery(NAMESPACE, make_text(300), start=285)) == []
    assert catalogue.find(DonorQuery(NAMESPACE, make_text(300), start=300)) == []


def test_clipped_rest_of_a_long_run_is_found_for_every_start():
    catalogue, (donor_id,) = make_catalogue(make_text(200))
    prompt = np.concatenate([make_text(200), make_text(50, seed=1)])
    for start in range(185):
        expected = Match(start, donor_id, start, 200 - start, fidelity=Fidelity.EXACT)
        assert catalogue.find(DonorQuery(NAMESPACE, prompt, start=start)) == [expected]


def test_namespaces_do_not_see_each_other():
    catalogue, _ = make_catalogue(make_text(200))
    other = Namespace("model", tenant_salt="b")
    assert catalogue.find(DonorQuery(other, make_text(200))) == []
    theirs = catalogue.add(other, make_text(200), None).donor
    assert {match.donor_id for match in catalogue.find(DonorQuery(other, make_text(200)))} == {theirs.donor_id}


def test_donors_above_max_generation_are_not_used():
    catalogue = DonorCatalogue(1_000)
    old = catalogue.add(NAMESPACE, make_text(200), None, generation=3).donor
    assert catalogue.find(DonorQuery(NAMESPACE, make_text(200), max_generation=2)) == []
    assert ids_of(catalogue.find(DonorQuery(NAMESPACE, make_text(200), max_generation=3))) == [old.donor_id]
    exact = catalogue.add(NAMESPACE, make_text(200), None).donor
    assert ids_of(catalogue.find(DonorQuery(NAMESPACE, make_text(200)))) == [exact.donor_id]


def ids_of(matches):
    return [match.donor_id for match in matches]


def test_min_run_bounds_every_match():
    catalogue, _ = make_catalogue(make_text(500), min_run=64)
    prompt = np.concatenate([make_text(500)[:63], make_text(9, seed=1), make_text(500)[100:164]])
    assert [match.length for match in catalogue.find(DonorQuery(NAMESPACE, prompt))] == [64]


def test_text_below_a_gram_is_no_donor_and_changes_nothing():
    catalogue, _ = make_catalogue(make_text(90), capacity=100)
    assert catalogue.add(NAMESPACE, make_text(15), None) == (None, ())
    assert catalogue.num_tokens == 90


def test_removed_donor_is_gone_and_its_id_is_not_given_again():
    catalogue, (first,) = make_catalogue(make_text(200))
    removed = catalogue.remove(first)
    assert removed.kv == "kv-0"
    assert catalogue.get(first) is None
    assert catalogue.find(DonorQuery(NAMESPACE, make_text(200))) == []
    second = catalogue.add(NAMESPACE, make_text(200), None).donor.donor_id
    assert second != first
    assert catalogue.get(first) is None
    for use in (catalogue.remove, catalogue.pin, catalogue.unpin, lambda donor_id: catalogue.rebind(donor_id, None)):
        with pytest.raises(CorruptCacheError, match="no donor"):
            use(first)
    catalogue.record_hit(first, 10)
    catalogue.check()


def test_first_in_is_first_out_without_hits():
    catalogue, donors = make_catalogue(*(make_text(100, seed=seed) for seed in range(3)), capacity=300)
    result = catalogue.add(NAMESPACE, make_text(150, seed=9), None)
    assert ids(result.evicted) == donors[:2]
    assert catalogue.num_tokens == 250


def test_tokens_saved_per_token_held_decide_who_stays():
    catalogue, (small, large, unused) = make_catalogue(make_text(50), make_text(200, seed=1), make_text(50, seed=2))
    catalogue.record_hit(small, 50)
    catalogue.record_hit(large, 100)
    assert ids(catalogue.victims()) == [unused, large, small]
    assert ids(catalogue.evict(1)) == [unused]
    assert ids(catalogue.evict(1_000)) == [large, small]
    assert len(catalogue) == 0


def test_pinned_donor_stays_until_the_last_unpin():
    catalogue, (pinned, other) = make_catalogue(make_text(100), make_text(100, seed=1), capacity=200)
    catalogue.pin(pinned)
    catalogue.pin(pinned)
    assert catalogue.is_pinned(pinned)
    assert ids(catalogue.evict(1_000)) == [other]
    catalogue.unpin(pinned)
    assert catalogue.evict(1_000) == []
    catalogue.unpin(pinned)
    assert not catalogue.is_pinned(pinned)
    assert ids(catalogue.evict(1)) == [pinned]
    catalogue.check()


def test_unpin_without_pin_is_refused():
    catalogue, (donor_id,) = make_catalogue(make_text(100))
    with pytest.raises(CorruptCacheError, match="not pinned"):
        catalogue.unpin(donor_id)


def test_pinned_donor_can_be_removed():
    catalogue, (donor_id,) = make_catalogue(make_text(100), capacity=100)
    catalogue.pin(donor_id)
    catalogue.remove(donor_id)
    assert catalogue.add(NAMESPACE, make_text(100), None).donor is not None
    catalogue.check()


def test_text_that_cannot_fit_is_refused_and_evicts_nothing():
    catalogue, (pinned, _) = make_catalogue(make_text(100), make_text(50, seed=1), capacity=200)
    catalogue.pin(pinned)
    for length in (101, 201):
        with pytest.raises(CapacityError, match="raise its capacity"):
            catalogue.add(NAMESPACE, make_text(length, seed=2), None)
    assert len(catalogue) == 2
    assert catalogue.add(NAMESPACE, make_text(100, seed=2), None).donor is not None


def test_text_that_finds_no_memory_is_no_donor_and_evicts_nothing(monkeypatch):
    catalogue, known = make_catalogue(make_text(100), make_text(100, seed=1), capacity=200)
    with monkeypatch.context() as patch:
        patch.setattr(Fingerprinter, "anchors", lambda *_: 1 / 0)
        for namespace in (NAMESPACE, Namespace("other")):
            with pytest.raises(ZeroDivisionError):
                catalogue.add(namespace, make_text(100, seed=2), None)
    assert ids(catalogue) == known
    catalogue.check()
    assert ids(catalogue.add(NAMESPACE, make_text(100, seed=2), None).evicted) == known[:1]
    catalogue.check()


def test_rebind_changes_the_handle_and_nothing_else():
    catalogue, (donor_id,) = make_catalogue(make_text(100))
    before = catalogue.get(donor_id)
    catalogue.rebind(donor_id, "elsewhere")
    after = catalogue.get(donor_id)
    assert (after.kv, before.kv) == ("elsewhere", "kv-0")
    assert after.token_ids is before.token_ids
    assert catalogue.remove(donor_id).kv == "elsewhere"


def test_reset_returns_all_and_ids_stay_invalid():
    catalogue, donors = make_catalogue(make_text(100), make_text(100, seed=1))
    catalogue.pin(donors[0])
    assert ids(catalogue.reset()) == donors
    assert (len(catalogue), catalogue.num_tokens, len(catalogue.finder.index)) == (0, 0, 0)
    catalogue.check()
    again = catalogue.add(NAMESPACE, make_text(100), None).donor.donor_id
    assert again not in donors
    assert ids_of(catalogue.find(DonorQuery(NAMESPACE, make_text(100)))) == [again]
    catalogue.check()


def test_catalogues_of_different_histories_give_the_same_ids_once_they_are_reset_alike():
    short, first = make_catalogue(make_text(100))
    long, more = make_catalogue(*(make_text(100, seed=seed) for seed in range(3)))
    for donor_id in more:
        long.remove(donor_id)
    more += [long.add(NAMESPACE, make_text(100, seed=9), None).donor.donor_id]
    highest = max(short.next_epoch, long.next_epoch)
    texts = [make_text(100, seed=seed) for seed in range(5)]
    given = []
    for catalogue, before in ((short, first), (long, more)):
        catalogue.reset(highest)
        given.append([catalogue.add(NAMESPACE, text, None).donor.donor_id for text in texts])
        assert not set(given[-1]) & set(before), "an id that no donor had before"
        catalogue.check()
    assert given[0] == given[1]


def make_pack():
    stock = [make_text(length, seed=length) for length in range(5, 45)]
    rng = np.random.default_rng(0)
    return [np.concatenate([stock[i] for i in rng.integers(0, 40, 12)]) for _ in range(60)]


def replayed(secret):
    """What every lookup finds and what every registration evicts, hits recorded."""
    catalogue = DonorCatalogue(9_000, **({} if secret is None else {"secret": secret}))
    for prompt in make_pack():
        matches = catalogue.find(DonorQuery(NAMESPACE, prompt))
        for match in matches:
            catalogue.record_hit(match.donor_id, match.length)
        yield matches, ids(catalogue.add(NAMESPACE, prompt, None).evicted)


def test_catalogues_of_one_secret_behave_alike():
    secret = new_secret()
    assert list(replayed(secret)) == list(replayed(secret))


def test_catalogues_without_a_secret_have_that_of_the_process():
    secret, other = new_secret(), new_secret()
    before = process_secret()
    set_process_secret(secret)
    try:
        first = list(replayed(None))
    finally:
        set_process_secret(before)
    assert first == list(replayed(secret))
    assert first != list(replayed(other))


def test_processes_have_secrets_of_their_own():
    code = "from kvgraft.donors.secret import process_secret; print(process_secret().hex())"
    first, second = (subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in "ab")
    assert first != second


@pytest.mark.parametrize("secret", [b"", bytes(31), bytes(64)])
def test_secret_of_another_length_is_refused(secret):
    with pytest.raises(ConfigError, match="32 bytes"):
        DonorCatalogue(100, secret=secret)


def test_find_changes_nothing():
    catalogue, donors = make_catalogue(*(make_text(100, seed=seed) for seed in range(5)))
    before = (ids(catalogue.victims()), ids(catalogue), len(catalogue.finder.index))
    catalogue.find(DonorQuery(NAMESPACE, make_text(100)))
    assert (ids(catalogue.victims()), ids(catalogue), len(catalogue.finder.index)) == before
    assert before[0] == donors


def test_removal_leaves_no_anchor_of_its_own_and_all_of_others():
    catalogue, (first, second) = make_catalogue(make_text(1_000), make_text(1_000, seed=1))
    before = len(catalogue.finder.index)
    catalogue.remove(first)
    only = make_catalogue(make_text(1_000, seed=1))[0]
    assert len(catalogue.finder.index) == len(only.finder.index) < before
    assert ids_of(catalogue.find(DonorQuery(NAMESPACE, make_text(1_000, seed=1)))) == [second]


@pytest.mark.parametrize("text", [[[1, 2]], [1.5] * 20, ["a"] * 20, 5])
def test_what_is_no_token_sequence_is_refused(text):
    catalogue, _ = make_catalogue(make_text(100))
    with pytest.raises(ConfigError, match="integers"):
        catalogue.find(DonorQuery(NAMESPACE, text))
    with pytest.raises(ConfigError, match="integers"):
        catalogue.add(NAMESPACE, text, None)


@pytest.mark.parametrize("token", [2**31, 2**32 + 5, -(2**31) - 1])
def test_token_that_would_wrap_is_refused(token):
    catalogue = DonorCatalogue(100)
    catalogue.add(NAMESPACE, np.full(20, token & 0xFF), None)
    with pytest.raises(ConfigError, match="32 bits"):
        catalogue.find(DonorQuery(NAMESPACE, np.full(20, token)))


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint32, np.uint16, list])
def test_any_integer_sequence_is_accepted(dtype):
    text = make_text(100).tolist() if dtype is list else make_text(100).astype(dtype)
    catalogue, _ = make_catalogue(text)
    assert [match.length for match in catalogue.find(DonorQuery(NAMESPACE, text))] == [100]
    assert catalogue.find(DonorQuery(NAMESPACE, [])) == []


@pytest.mark.parametrize("options", [{"capacity_tokens": 15}, {"capacity_tokens": 100, "min_run": 15}])
def test_sizes_below_a_gram_are_refused(options):
    with pytest.raises(ConfigError, match="at least 16"):
        DonorCatalogue(**options)


def test_catalogue_survives_being_refilled_many_times():
    catalogue = DonorCatalogue(2_000)
    rng = np.random.default_rng(0)
    for step in range(400):
        text = make_text(int(rng.integers(16, 700)), seed=step)
        donor = catalogue.add(NAMESPACE, text, None).donor
        assert catalogue.find(DonorQuery(NAMESPACE, text)) == [
            Match(0, donor.donor_id, 0, len(text), fidelity=Fidelity.EXACT)
        ]
        if step % 40 == 0:
            catalogue.check()


def test_a_namespace_known_by_its_key_alone_is_the_same_one():
    """As of donors that another process has stored: they are found by whoever has the namespace, and by nobody else."""
    catalogue, text = DonorCatalogue(1000), make_text(100)
    donor = catalogue.add(KeyedNamespace(NAMESPACE.key), text, None).donor
    assert [match.donor_id for match in catalogue.find(DonorQuery(NAMESPACE, text))] == [donor.donor_id]
    other = Namespace(NAMESPACE.model_fingerprint, NAMESPACE.adapter, NAMESPACE.tenant_salt + "x")
    assert not catalogue.find(DonorQuery(other, text))
    assert not catalogue.find(DonorQuery(KeyedNamespace(other.key), text))
    catalogue.check()
    catalogue.remove(donor.donor_id)
    catalogue.check()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c, i: c.finder._arena.remove(i[0]), "lost|rows in use"),
        (lambda c, i: c._free_rows.append(0), "free and in use"),
        (lambda c, i: c.finder._texts.update({i[0]: c.finder._texts[i[1]]}), "of which donors have"),
        (lambda c, i: c._queue.discard(i[0]), "waiting for eviction"),
        (lambda c, i: setattr(c, "_num_tokens", 5), "tokens"),
        (lambda c, i: c.finder._generations.__setitem__(0, 4), "generation"),
        (lambda c, i: c.finder._ids.__setitem__(0, 4), "is not the one"),
        (lambda c, i: c.finder._arena.get(0).__setitem__(3, -1), "have changed"),
        (lambda c, i: setattr(c.finder._tenants[NAMESPACE.key], "num_texts", 9), "do not sum up"),
    ],
)
def test_check_finds_damage(damage, message):
    catalogue, donors = make_catalogue(make_text(100), make_text(100, seed=1))
    damage(catalogue, donors)
    with pytest.raises(CorruptCacheError, match=message):
        catalogue.check()


def test_donors_that_stand_whole_in_a_text_are_found_from_a_generation_on():
    catalogue = DonorCatalogue(10_000)
    text = make_text(600)
    whole = catalogue.add(NAMESPACE, text[100:300], None, generation=1, start_position=70).donor
    catalogue.add(NAMESPACE, text[350:500], None, generation=0)
    catalogue.add(NAMESPACE, np.append(text[500:], make_text(30, seed=3)), None, generation=2)  # ends behind the text
    catalogue.add(Namespace("another"), text[100:300], None, generation=1)
    changed = text[300:350].copy()
    changed[40] += 1
    catalogue.add(NAMESPACE, changed, None, generation=1)
    assert catalogue.inside(NAMESPACE, text, min_generation=1) == [whole]
    assert catalogue.inside(NAMESPACE, text[:299], min_generation=1) == []
    assert catalogue.inside(NAMESPACE, text, min_generation=2) == []
    assert catalogue.inside(Namespace("a third"), text, min_generation=1) == []
    catalogue.check()


def test_periodic_text_stands_in_itself():
    catalogue = DonorCatalogue(10_000)
    donor = catalogue.add(NAMESPACE, np.zeros(200, np.int32), None, generation=1).donor
    assert catalogue.inside(NAMESPACE, np.zeros(3_000, np.int32), min_generation=1) == [donor]
    assert catalogue.inside(NAMESPACE, np.zeros(199, np.int32), min_generation=1) == []


def test_an_heir_is_worth_what_the_donor_was_that_it_replaces():
    catalogue, (old, other, heir) = make_catalogue(*(make_text(100, seed=seed) for seed in range(3)))
    catalogue.record_hit(old, 500)
    catalogue.inherit(heir, old)
    catalogue.remove(old)
    assert ids(catalogue.victims()) == [other, heir]
    catalogue.check()
