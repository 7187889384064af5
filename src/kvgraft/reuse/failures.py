"""The miss that an exception becomes."""

from __future__ import annotations

from kvgraft.errors import PolicyError
from kvgraft.types import Miss, MissReason


def miss_of(error: BaseException) -> Miss:
    """Return the miss that a failure of reuse becomes; one that a selection policy caused has a reason of its own."""
    caused: BaseException | None = error
    while caused is not None:
        if isinstance(caused, PolicyError):
            return Miss(MissReason.POLICY_ERROR, str(caused))
        caused = caused.__cause__
    return Miss(MissReason.ERROR, f"{type(error).__name__}: {error}")
