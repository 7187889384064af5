"""Donors by resemblance, from the catalogue's events to a proposal; and in an engine whose index has lost them."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.semantic.embedders import PATIENCE_S, BagEmbedder

from kvgraft.donors import DonorCatalogue
from kvgraft.semantic import Discovery, DonorProposer, MinHashSketch
from kvgraft.types import Namespace

NAMESPACE, OTHER = Namespace("model"), Namespace("model", tenant_salt="other")


def make_text(seed, length=400):
    return np.random.default_rng(seed).integers(1_000, 30_000, length)


@pytest.fixture
def catalogue():
    return DonorCatalogue(3_000)


@pytest.fixture
def proposer(catalogue):
    made = DonorProposer(Discovery(MinHashSketch(key=bytes(16))))  # a key by chance makes texts alike now and then
    catalogue.watch(made)
    yield made
    made.discovery.close()
    made.discovery.check()


def add(catalogue, proposer, *seeds, namespace=NAMESPACE):
    ids = [catalogue.add(namespace, make_text(seed), None).donor.donor_id for seed in seeds]
    assert proposer.discovery.wait(PATIENCE_S)
    return ids


def test_donors_are_named_nearest_first_and_the_rest_is_not(catalogue, proposer):
    first, second, _ = add(catalogue, proposer, 0, 1, 2)
    prompt = np.concatenate([make_text(0), make_text(1)[:200]])
    assert proposer.propose(NAMESPACE, prompt) == (first, second)
    assert proposer.propose(NAMESPACE, make_text(9)) == ()
    assert proposer.propose(OTHER, prompt) == ()


def test_donors_that_leave_are_named_no_more(catalogue, proposer):
    first, second = add(catalogue, proposer, 0, 1)
    catalogue.remove(first)
    assert proposer.propose(NAMESPACE, make_text(0)) == ()
    add(catalogue, proposer, *range(10, 17))
    assert catalogue.get(second) is None, "evicted by now"
    assert proposer.propose(NAMESPACE, make_text(1)) == ()
    assert len(proposer.discovery) == len(catalogue)
    catalogue.reset()
    assert proposer.propose(NAMESPACE, make_text(12)) == ()
    assert len(proposer.discovery) == 0


def test_counts_say_what_became_of_texts(catalogue):
    embedder = BagEmbedder()
    embedder.error = RuntimeError("broken")
    proposer = DonorProposer(Discovery(embedder, max_waiting=1))
    catalogue.watch(proposer)
    embedder.go.clear()
    catalogue.add(NAMESPACE, np.arange(20), None)
    assert embedder.begun.acquire(timeout=PATIENCE_S)
    for _ in range(3):
        catalogue.add(NAMESPACE, np.arange(20), None)
    embedder.go.set()
    assert proposer.discovery.wait(PATIENCE_S)
    assert proposer.counts() == {"embedded": 0, "dropped": 2, "errors": 2}
    assert proposer.propose(NAMESPACE, np.arange(20)) == ()
    proposer.discovery.close()
