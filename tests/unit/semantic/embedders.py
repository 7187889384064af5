"""Embedders for tests: their vectors say which tokens a text has, and they do as they are told."""

from __future__ import annotations

import threading

import numpy as np

from kvgraft.semantic import Embedder, SketchProvider, unit_rows

PATIENCE_S = 60


class Settled(SketchProvider):
    """Keeps what its constructor was given."""

    def __init__(self, *, threshold, capacity, patience_s, directory):
        super().__init__(threshold=threshold, capacity=capacity)
        self.given = (threshold, capacity, patience_s, directory)


class BagEmbedder(Embedder):
    """One dimension per token id below 64; slow, stuck or broken on demand."""

    def __init__(self, *, quick=False):
        self.is_quick = quick
        self.go = threading.Event()
        self.go.set()
        self.begun = threading.Semaphore(0)
        self.seen = []
        self.error = None
        self.is_learning, self.learnt = False, []

    def learn(self, text):
        """With the third text all vectors turn by one dimension, if it learns."""
        self.learnt.append(text.tolist())
        return len(self.learnt) == 3 and self.is_learning

    @property
    def name(self):
        return "bag"

    @property
    def dimensions(self):
        return 64

    def embed(self, texts):
        self.begun.release()
        assert self.go.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        self.seen += [text.tolist() for text in texts]
        rows = unit_rows(np.stack([np.bincount(text, minlength=64) for text in texts]).astype(np.float32))
        return np.roll(rows, 1, axis=1) if self.is_learning and len(self.learnt) > 2 else rows
