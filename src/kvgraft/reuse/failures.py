"""What a failure is told as: the one place that makes a miss of an exception."""

from __future__ import annotations

from kvgraft.errors import PolicyError
from kvgraft.types import Miss, MissReason


def miss_of(error: BaseException) -> Miss:
    """Return the miss that a failure of reuse becomes; one that a selection policy caused is told from others."""
    caused: BaseException | None = error
    while caused is not None:
        if isinstance(caused, PolicyError):
            return Miss(MissReason.POLICY_ERROR, str(caused))
        caused = caused.__cause__
    return Miss(MissReason.ERROR, f"{type(error).__name__}: {error}")
