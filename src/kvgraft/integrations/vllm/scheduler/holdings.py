"""Donors and room for text that a request holds, released whole or one kind at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from kvgraft.integrations.vllm.scheduler.donor_registry import CapturedText, DonorRegistry
    from kvgraft.types import DonorId


@dataclass(slots=True, eq=False)
class RegistryHoldings:
    """Everything of the registry that one attempt keeps from others.

    Attributes:
        pinned: Donors of its graft, until they are copied.
        prompt: Text that the engine computes and workers capture.
        output: Generated text, captured in chunks and registered at the end.
        gaps: Text of the prompt that the graft computes and captures.
    """

    registry: DonorRegistry
    pinned: tuple[DonorId, ...] = ()
    prompt: CapturedText | None = None
    output: CapturedText | None = None
    gaps: list[CapturedText] = field(default_factory=list)

    @property
    def texts(self) -> list[CapturedText]:
        """Texts that are being captured."""
        return [text for text in (self.prompt, self.output, *self.gaps) if text is not None]

    def pin(self, donor_ids: Sequence[DonorId]) -> None:
        """Keep donors from eviction; one that is named twice is pinned twice."""
        for donor_id in donor_ids:
            self.registry.catalogue.pin(donor_id)
            self.pinned = (*self.pinned, donor_id)

    def unpin(self) -> None:
        """Let donors be evicted; those that a reset took are ignored."""
        pinned, self.pinned = self.pinned, ()
        for donor_id in pinned:
            if self.registry.catalogue.get(donor_id) is not None:
                self.registry.catalogue.unpin(donor_id)

    def give_up_texts(self, lost: Container[int] | None = None) -> None:
        """Capture no more of the texts named by `lost`, or of any; what is a donor already stays one."""
        given_up = [text for text in self.texts if lost is None or text.text_id in lost]
        for text in given_up:
            self.registry.abandon(text)
        self.prompt = None if self.prompt in given_up else self.prompt
        self.output = None if self.output in given_up else self.output
        self.gaps = [text for text in self.gaps if text not in given_up]

    def release(self) -> None:
        """Give everything back."""
        self.unpin()
        self.give_up_texts()
