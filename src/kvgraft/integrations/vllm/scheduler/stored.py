"""Exact K/V that another connector's store holds of a request, after the prefix of vLLM's own cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """Exact K/V that a store beside us can load.

    Attributes:
        num_tokens: After vLLM's own hit.
        asynchronous: The request waits until they are there. A load in the step that uses them may turn out to have failed
            when the text of that step was captured: such text becomes no donor.
    """

    num_tokens: int
    asynchronous: bool


NOTHING_STORED = StoredPrefix(0, asynchronous=True)
