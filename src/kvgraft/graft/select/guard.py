"""A policy's choices, each checked before anything is done with it: policies may come from other packages.

Any fault of a policy becomes a `PolicyError` here. The caller must then leave nothing of the graft.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import PolicyError, one_line
from kvgraft.graft.select.base import Observable, Recompute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeVar

    from numpy.typing import NDArray

    from kvgraft.graft.select.base import Observation, SelectionContext, SelectionPolicy, SelectionSteps

    Result = TypeVar("Result")

MOST_STEPS = 64
"""Steps of one prompt. Policies that double a budget take a dozen; one that never ends would hold up its request for ever."""
_FLAGS = ("observe_query", "observe_key_deviation", "afresh")


class PolicySteps:
    """The steps of one policy for one prompt: ask for the first, then send the observations of each."""

    def __init__(self, policy: SelectionPolicy, context: SelectionContext, *, num_layers: int | None = None) -> None:
        """Ask nothing yet.

        Args:
            policy: Chooses.
            context: Of the prompt; the policy is shown its arrays read-only.
            num_layers: Of the model, for policies that look at a layer; None where the engine chooses the layer.
        """
        self._policy = policy
        self._context = replace(
            context,
            reused=_read_only(context.reused),
            seam_distance=_read_only(context.seam_distance),
            live=_read_only(context.live),
        )
        self._num_layers = num_layers
        self._is_reused = np.zeros(context.num_tokens, np.bool_)
        self._is_reused[context.reused] = True
        self._steps: SelectionSteps
        self._observes: frozenset[Observable]
        self._num_steps = 0
        self._is_look = False

    def first(self) -> Recompute:
        """Ask for the first step.

        Raises:
            PolicyError: The policy failed, or there is none that can be taken.
        """
        self._observes = self._asked(lambda: frozenset(self._policy.observes))
        self._steps = self._asked(lambda: self._policy.steps(self._context))
        step = self._asked(lambda: next(self._steps, None))
        if step is None:
            raise self._error("it has no step; yield Recompute(context.reused[:0]) to compute nothing")
        return self._checked(step)

    def send(self, observation: Observation) -> Recompute | None:
        """Send the observations of the last step and return the next; None if that was the last.

        Raises:
            PolicyError: The policy failed, its step cannot be taken, or it ended with a look through some layers.
        """
        try:
            step = self._asked(lambda: self._steps.send(observation), (StopIteration,))
        except StopIteration:
            if self._is_look:
                raise self._error("its last step looks at keys only, which gives no answer") from None
            return None
        return self._checked(step)

    def close(self) -> None:
        """Ask no more, and ignore errors of the policy at its end."""
        with contextlib.suppress(Exception):
            self._steps.close()

    def _asked(self, question: Callable[[], Result], may_end: tuple[type[Exception], ...] = ()) -> Result:
        try:
            return question()
        except may_end:
            raise
        except Exception as error:
            raise self._error(one_line(error)) from error

    def _checked(self, step: object) -> Recompute:
        if not isinstance(step, Recompute):
            raise self._error(f"it yielded a {type(step).__name__} instead of a Recompute")
        self._num_steps += 1
        if self._num_steps > MOST_STEPS:
            raise self._error(f"it takes more than {MOST_STEPS} steps")
        for flag in _FLAGS:
            if not isinstance(getattr(step, flag), bool | np.bool_):
                raise self._error(f"{flag} is True or False")
        self._check_positions("positions", step.positions)
        self._check_positions("sample", step.sample)
        if not step.afresh and not np.isin(step.sample, step.positions, assume_unique=True).all():
            raise self._error("sample has positions that are not computed again")
        self._check_look(step)
        self._is_look = bool(step.observe_key_deviation)
        return step

    def _check_positions(self, what: str, positions: object) -> None:
        """Refuse positions that are not reused, and positions that are named twice."""
        if not isinstance(positions, np.ndarray) or positions.dtype != np.int64 or positions.ndim != 1:
            raise self._error(f"{what} is an int64 array of one dimension")
        if not len(positions):
            return
        if positions.min() < 0 or positions.max() >= self._context.num_tokens:
            raise self._error(f"{what} lies outside of the prompt's {self._context.num_tokens} positions")
        if (np.diff(positions) <= 0).any():
            raise self._error(f"{what} is not ascending, or names a position twice")
        if not self._is_reused[positions].all():
            raise self._error(f"{what} names positions that are not reused")

    def _check_look(self, step: Recompute) -> None:
        for is_asked, seen in (
            (step.observe_query, Observable.QUERY_ATTENTION),
            (step.observe_key_deviation, Observable.KEY_DEVIATION),
        ):
            if is_asked and seen not in self._observes:
                raise self._error(f"it asks for {seen}, which its `observes` does not name")
        if not step.observe_key_deviation:
            return
        layer = step.deviation_layer
        if isinstance(layer, bool) or not isinstance(layer, int) or layer < 1:
            raise self._error("deviation_layer is a whole number of at least 1")
        if self._num_layers is not None and layer >= self._num_layers:
            raise self._error(f"deviation_layer {layer} is not below the model's {self._num_layers} layers")

    def _error(self, what: str) -> PolicyError:
        return policy_error(self._policy, what)


def _read_only(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a view: the array is the plan's, too."""
    shown = positions.view()
    shown.setflags(write=False)
    return shown


def expected_share(policy: SelectionPolicy) -> float:
    """Return the share of reused tokens that a policy expects to choose, for cost models.

    Raises:
        PolicyError: It fails, or returns no share.
    """
    try:
        share = float(policy.recompute_ratio)
    except Exception as error:
        raise policy_error(policy, one_line(error)) from error
    if not 0 <= share <= 1:
        raise policy_error(policy, f"recompute_ratio is {share}, not from 0 to 1")
    return share


def expected_rows(policy: SelectionPolicy, context: SelectionContext) -> int:
    """Return how many reused tokens a policy expects to choose.

    Raises:
        PolicyError: As of `expected_share`.
    """
    return min(len(context.reused), math.ceil(expected_share(policy) * context.num_counted))


def looks_at_query(policy: SelectionPolicy) -> bool:
    """Return whether a policy wants to see what the query attends to, for which all reused tokens must be there.

    Raises:
        PolicyError: It fails.
    """
    try:
        return Observable.QUERY_ATTENTION in policy.observes
    except Exception as error:
        raise policy_error(policy, one_line(error)) from error


def fault(policy: SelectionPolicy) -> str | None:
    """Return the fault of a policy that shows before it chooses anything; None if there is none."""
    checks: Iterable[tuple[str, type | tuple[type, ...], str]] = (
        ("name", str, "a text"),
        ("version", int, "a whole number"),
        ("is_scattered", bool, "True or False"),
        ("observes", frozenset, "a frozenset of Observable"),
    )
    for attribute, kind, what in checks:
        try:
            value = getattr(policy, attribute)
        except Exception as error:  # noqa: BLE001 - a property of another package
            return f"{attribute} cannot be read: {one_line(error)}"
        if not isinstance(value, kind) or value == "":
            return f"{attribute} is {what}"
    if not all(isinstance(seen, Observable) for seen in policy.observes):
        return "observes is a frozenset of Observable"
    return None


def policy_error(policy: SelectionPolicy, what: str) -> PolicyError:
    """Return the error of a policy that did `what`."""
    try:
        name = str(policy.name)
    except Exception:  # noqa: BLE001 - a property of another package
        name = type(policy).__name__
    return PolicyError(f"selection policy {name}: {what}")
