"""What SGLang's scheduler calls does not raise: a failure is logged, counted and becomes a miss, on all ranks alike."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgraft.integrations.sglang.requests.books import Books

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class Guarded(Protocol):
    """Has methods that SGLang calls."""

    @property
    def books(self) -> Books:
        """Of the scheduler."""


_Part = TypeVar("_Part", bound=Guarded)
if TYPE_CHECKING:
    _Method = Callable[Concatenate[_Part, _Given], _Result]


def guarded(
    stage: str, instead: Callable[[], Any], *, is_read: bool = False
) -> Callable[[_Method[_Part, _Given, _Result]], _Method[_Part, _Given, _Result]]:
    """Return a decorator for what SGLang calls: a failure is counted, and the call returns `instead()`.

    Books are verified before the next call reads them. Ranks exchange nothing here. What schedulers of all ranks decide by
    alike is read (`is_read`) once more where there are several: memory may be there again, and what else fails does on all.
    """

    def decorate(method: _Method[_Part, _Given, _Result]) -> _Method[_Part, _Given, _Result]:
        @functools.wraps(method)
        def done(self: _Part, /, *given: _Given.args, **named: _Given.kwargs) -> _Result:
            for _ in range(1 + (is_read and self.books.ranks.size > 1)):
                try:
                    return method(self, *given, **named)
                except Exception as error:  # noqa: BLE001 - logged and counted
                    self.books.log.failed(stage, "-", error)
            found: _Result = instead()
            return found

        return done

    return decorate


def together(
    stage: str, instead: Callable[[], Any]
) -> Callable[[_Method[_Part, _Given, _Result]], _Method[_Part, _Given, _Result]]:
    """Return a decorator for what ranks do together: a failure is counted on all, and the call returns `instead()` there.

    Trees of which one was used less would not evict the same: all forget their donors, and empty their trees.
    """

    def decorate(method: _Method[_Part, _Given, _Result]) -> _Method[_Part, _Given, _Result]:
        @functools.wraps(method)
        def done(self: _Part, /, *given: _Given.args, **named: _Given.kwargs) -> _Result:
            try:
                return self.books.ranks.together(functools.partial(method, self, *given, **named))
            except Exception as error:  # noqa: BLE001 - raised again where others cannot know
                self.books.failed(stage, "-", error)
                self.books.level()
                found: _Result = instead()
                return found

        return done

    return decorate


def nothing() -> None:
    """Return None."""
