"""Names of our own in SGLang's tree, for text that exact requests must never hit."""

from __future__ import annotations

import hashlib
import secrets


class PrivateNames:
    """Names of paths in SGLang's tree that no client can guess. Not thread-safe."""

    def __init__(self) -> None:
        self._secret = secrets.token_hex(16)
        self._num_fresh = 0
        self.renew()

    def fresh(self) -> str:
        """Return a name that nothing has."""
        self._num_fresh += 1
        return f"{self._secret}-{self._num_fresh}"

    def of_text(self, key: bytes, front: bytes) -> str:
        """Return the name of what follows a front under a key of 16 bytes, another one after `renew`."""
        return f"{self._secret}-{hashlib.blake2b(key + front, digest_size=32, key=self._epoch).hexdigest()}"

    def renew(self) -> None:
        """Have no text found any more that was named before."""
        self._epoch = secrets.token_bytes(32)

    def are_of(self, salt: str | None) -> bool:
        """Whether a salt is one of these names."""
        return salt is not None and salt.startswith(self._secret)
