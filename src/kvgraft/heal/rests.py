"""Texts that rest after a failed try, longer each time, so that others have their turn meanwhile."""

from __future__ import annotations

import hashlib
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgraft.heal.texts import Text

MAX_JITTER = 0.5
"""Waits are longer by as much at most, by chance: what two processes do at once, they do not do at once again."""
_GROWTH = 2
_LONGEST = 64
_MAX_REMEMBERED = 4_096
"""Texts with a rest; of more, the oldest are forgotten."""


@dataclass(slots=True)
class _Tries:
    """Tries of one text since it was computed last.

    Attributes:
        num_failed: Those that the server did not do.
        num_interrupted: Those that were interrupted.
        rests_until: When the next one may be made, in seconds of the clock.
    """

    num_failed: int = 0
    num_interrupted: int = 0
    rests_until: float = 0.0


class Rests:
    """Texts that rest. A text is known by its tokens: announced anew, under another name, it rests on."""

    def __init__(
        self,
        first_s: float,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Begin with none.

        Args:
            first_s: Rest after the first try; each further one doubles it, up to 64 times.
            clock: Seconds.
            draw: Numbers from 0 to 1.
        """
        self._first_s = first_s
        self._clock = clock
        self._draw = draw
        self._tries: dict[bytes, _Tries] = {}

    def is_resting(self, text: Text) -> bool:
        """Return whether a text is not to be tried yet."""
        if not self._tries:
            return False
        tries = self._tries.get(_key(text))
        return tries is not None and self._clock() < tries.rests_until

    def failed(self, text: Text) -> int:
        """Note that the server failed; return how often that happened."""
        tries = self._of(text)
        tries.num_failed += 1
        self._rest(tries)
        return tries.num_failed

    def interrupted(self, text: Text) -> int:
        """Note that another request came; return how often that happened."""
        tries = self._of(text)
        tries.num_interrupted += 1
        self._rest(tries)
        return tries.num_interrupted

    def done(self, text: Text) -> None:
        """Forget the tries of a text that was computed."""
        self._tries.pop(_key(text), None)

    def _of(self, text: Text) -> _Tries:
        key = _key(text)
        tries = self._tries.pop(key, _Tries())
        self._tries[key] = tries  # the latest comes last
        if len(self._tries) > _MAX_REMEMBERED:
            del self._tries[next(iter(self._tries))]
        return tries

    def _rest(self, tries: _Tries) -> None:
        longer = min(_GROWTH ** (tries.num_failed + tries.num_interrupted - 1), _LONGEST)
        tries.rests_until = self._clock() + self._first_s * longer * (1 + MAX_JITTER * self._draw())


def _key(text: Text) -> bytes:
    return hashlib.blake2b(text.token_ids.tobytes(), digest_size=16, key=text.namespace.key).digest()
