"""Donors and pieces against a simple book-keeper: never more tokens than fit, and workers hear of everything."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvgraft.integrations.vllm.donor_registry import DonorRegistry
from kvgraft.types import Namespace

CAPACITY, MIN_RUN, MAX_GENERATION = 400, 32, 1
NAMESPACE = Namespace("model")


class Registry(RuleBasedStateMachine):
    """`kept` is what workers hold: tokens by piece, then by donor."""

    def __init__(self):
        super().__init__()
        self.registry = DonorRegistry(CAPACITY, min_run=MIN_RUN, max_generation=MAX_GENERATION)
        self.pieces = {}
        self.held_pieces = {}
        self.held_donors = {}
        self.texts = 0

    def tokens(self, count):
        self.texts += 1
        return np.random.default_rng(self.texts).integers(0, 1 << 30, count).astype(np.int32)

    @rule(start=st.integers(0, 50), length=st.integers(1, 300), generation=st.integers(0, 3))
    def open(self, start, length, generation):
        piece = self.registry.open(start, start + length, generation)
        if length < MIN_RUN or generation > MAX_GENERATION:
            assert piece is None
        if piece is not None:
            self.pieces[piece.piece_id] = piece
            self.held_pieces[piece.piece_id] = 0

    @rule(start=st.integers(0, 50))
    def open_output(self, start):
        piece = self.registry.open_output(start, 0)
        self.pieces[piece.piece_id] = piece
        self.held_pieces[piece.piece_id] = 0

    @precondition(lambda self: self.pieces)
    @rule(data=st.data(), count=st.integers(1, 64))
    def capture(self, data, count):
        piece = self.pieces[data.draw(st.sampled_from(sorted(self.pieces)))]
        stop = piece.next + count
        if stop > piece.stop and not self.registry.extend(piece, stop):
            return
        piece.next = stop
        self.held_pieces[piece.piece_id] = piece.next - piece.start

    @precondition(lambda self: self.pieces)
    @rule(data=st.data())
    def seal(self, data):
        piece = self.pieces.pop(data.draw(st.sampled_from(sorted(self.pieces))))
        self.registry.seal(NAMESPACE, self.tokens(piece.start + max(0, piece.next - piece.start)), piece)

    @precondition(lambda self: self.pieces)
    @rule(data=st.data())
    def abandon(self, data):
        piece = self.pieces.pop(data.draw(st.sampled_from(sorted(self.pieces))))
        self.registry.abandon(piece)
        self.registry.abandon(piece)

    @precondition(lambda self: len(self.registry.catalogue))
    @rule(data=st.data())
    def forget(self, data):
        donors = [donor.donor_id for donor in self.registry.catalogue]
        self.registry.forget(data.draw(st.sampled_from(donors)))

    @rule()
    def tell_workers(self):
        seals, discards, drops = self.registry.take_news()
        for seal in seals:
            self.held_donors[seal.donor_id] = self.held_pieces.pop(seal.piece_id)
        for piece_id in discards:
            self.held_pieces.pop(piece_id, None)
        for donor_id in drops:
            self.held_donors.pop(donor_id, None)
        assert self.held_donors == {donor.donor_id: donor.num_tokens for donor in self.registry.catalogue}
        assert sum(self.held_donors.values()) + sum(self.held_pieces.values()) <= CAPACITY

    @invariant()
    def holds(self):
        self.registry.check()


TestRegistry = Registry.TestCase
TestRegistry.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
