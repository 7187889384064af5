"""A calibration and its file: the notch that keeps a stated risk, for one model under one policy."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvgraft.errors import ConfigError, one_line
from kvgraft.fidelity.control.json_file import read_json, write_json
from kvgraft.fidelity.control.loss import Loss
from kvgraft.fidelity.control.parts import AnswerPart

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CALIBRATION_VERSION = 2
"""Of the file; another version is not read. Those of version 1 know nothing of a repair after the first token."""
_KIND = "kvgraft calibration"


@dataclass(frozen=True, slots=True)
class PartResult:
    """One part of the answers at a notch.

    Attributes:
        part: Which.
        requests: Grafted requests with such a part; the others say nothing about it.
        loss_sum: Sum of their losses.
        upper_limit: Least risk that this sample alone rejects at level delta.
        p_value: Of "the risk is at least epsilon".
    """

    part: AnswerPart
    requests: int
    loss_sum: float
    upper_limit: float
    p_value: float

    @property
    def mean(self) -> float:
        """Mean loss; 0 without requests."""
        return self.loss_sum / max(1, self.requests)


@dataclass(frozen=True, slots=True)
class NotchResult:
    """One notch on the prompts of a calibration.

    Attributes:
        notch: Its name.
        parts: Of its answers, at least one.
        is_certified: Whether all parts of this notch and of all more conservative ones reject "the risk is at least epsilon".
        recomputed_share: Of the reused tokens, computed again.
    """

    notch: str
    parts: tuple[PartResult, ...]
    is_certified: bool
    recomputed_share: float

    @property
    def worst(self) -> PartResult:
        """The part that is the furthest from showing its risk."""
        return max(self.parts, key=lambda result: (result.p_value, result.upper_limit))


@dataclass(frozen=True, slots=True)
class Calibration:
    """The question, its subject, and the result.

    Attributes:
        binding: What it holds for: model fingerprint, dtype, policy and its version, when its choice is computed, and what
            else decides what is grafted.
        loss: As `Loss` is written.
        epsilon: Mean loss that must not be exceeded.
        delta: Probability with which the statement may be wrong.
        notch: Boldest certified notch; "full" where none is, so that nothing is grafted.
        notches: All of them, conservative first; the first is "full".
        prompts: Prompts that were run.
        results: One per notch but "full".
        date: Day, ISO.
        made_by: Version of kvgraft, and the model's name.
    """

    binding: Mapping[str, str]
    loss: str
    epsilon: float
    delta: float
    notch: str
    notches: tuple[str, ...]
    prompts: int
    results: tuple[NotchResult, ...]
    date: str
    made_by: Mapping[str, str]

    def require(self, binding: Mapping[str, str], path: Path) -> None:
        """Raise `ConfigError` if this is about something else than `binding`."""
        for name, value in binding.items():
            if self.binding.get(name) != value:
                raise ConfigError(
                    f"calibration {path} is of another {name} ({self.binding.get(name, 'unknown')}, here {value}); run "
                    "'kvgraft calibrate' with the settings in use, or leave calibration out"
                )


def save_calibration(path: Path, calibration: Calibration) -> None:
    """Write the file at `path`; raises `ConfigError` if it cannot be written."""
    try:
        write_json(path, {"kind": _KIND, "version": CALIBRATION_VERSION, **asdict(calibration)})
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({one_line(error)}); give another file") from error


def load_calibration(path: Path) -> Calibration:
    """Read the file at `path`; raises `ConfigError` in one line if it is none."""
    try:
        values = read_json(path)
        if values.get("kind") != _KIND:
            raise ValueError("not written by 'kvgraft calibrate'")  # noqa: TRY301
        version = values.get("version")
        found = _calibration(values) if version == CALIBRATION_VERSION else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"calibration {path} cannot be used ({one_line(error)}); give a file that 'kvgraft calibrate' wrote"
        ) from error
    if found is None:
        raise ConfigError(
            f"calibration {path} is a file of version {version!r:.20}, and this kvgraft reads {CALIBRATION_VERSION}; run "
            "'kvgraft calibrate' again"
        )
    return found


def _calibration(values: Mapping[str, Any]) -> Calibration:
    """Build and check; raises what `load_calibration` turns into one line."""
    notches = tuple(str(name) for name in values["notches"])
    results = tuple(_result(result) for result in values["results"])
    found = Calibration(
        binding={str(name): str(value) for name, value in values["binding"].items()},
        loss=str(Loss.parse(values["loss"])),
        epsilon=_share(values["epsilon"]),
        delta=_share(values["delta"]),
        notch=values["notch"],
        notches=notches,
        prompts=int(values["prompts"]),
        results=results,
        date=str(values["date"]),
        made_by={str(name): str(value) for name, value in values["made_by"].items()},
    )
    certified = [result.notch for result in results if result.is_certified is True]
    if found.notch not in notches or tuple(certified) != notches[1 : 1 + notches.index(found.notch)]:
        raise ValueError("its notch is not the boldest certified one")
    return found


def _result(values: Mapping[str, Any]) -> NotchResult:
    parts = tuple(PartResult(**{**part, "part": AnswerPart(part["part"])}) for part in values["parts"])
    if not parts:
        raise ValueError("a notch without a part")
    return NotchResult(**{**values, "parts": parts})


def _share(value: object) -> float:
    if not isinstance(value, float) or not 0 < value < 1 or not math.isfinite(value):
        raise ValueError("epsilon and delta must lie between 0 and 1")
    return value
