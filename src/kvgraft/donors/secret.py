"""Secrets that key the hashes of catalogues, so that a client who knows no secret cannot aim for collisions."""

from __future__ import annotations

import os

SECRET_BYTES = 32


def new_secret() -> bytes:
    """Make a secret for catalogues of several processes that must behave alike."""
    return os.urandom(SECRET_BYTES)


_of_process = new_secret()


def process_secret() -> bytes:
    """Return the secret of catalogues that are made without one."""
    return _of_process


def set_process_secret(secret: bytes) -> None:
    """Set the secret of catalogues that are made without one from now on, so that a run can be repeated."""
    global _of_process  # noqa: PLW0603
    _of_process = secret
