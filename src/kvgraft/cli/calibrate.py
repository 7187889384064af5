"""`kvgraft calibrate`: which setting of the selection policy keeps a stated risk on your own prompts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.cli.model_options import add_settings, engine_config, load_llm
from kvgraft.cli.output_files import check_output
from kvgraft.cli.parser import show_first
from kvgraft.cli.progress import progress
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from kvgraft.fidelity.control import Calibration, Loss

_SETTINGS = (
    *("model", "dtype", "device", "num_slots", "max_model_len", "selection"),
    *("repair", "repair_below_margin"),
)
_BAR = 40


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "calibrate",
        help="find the setting that keeps a stated risk on your own prompts",
        description="Serve the prompts in order of arrival at every notch of the policy, from conservative to bold, "
        "and compare each grafted request with the model's own full prefill. Notches are certified up to the first one "
        "that was not shown to have a mean loss of at most --epsilon, with a probability of being wrong of --delta; "
        "bolder ones are not measured. Requests of which nothing is grafted are exact and do not count. With "
        "repair=after the first token and those after the repair are judged apart, and so are answers that wait for it; "
        "a notch is certified if all of them are.",
    )
    add = parser.add_argument
    add(
        "--prompts",
        required=True,
        metavar="FILE",
        help="request pack as of 'bench reuse', JSON lines with a 'prompt' or 'text' each, lines of text, or 'builtin' for "
        "questions over the standard library's documentation",
    )
    add(
        "--chat", action="store_true", help="prompts are messages of a user: put each through the model's chat template"
    )
    add(
        "--loss",
        default="first_token",
        metavar="LOSS",
        help="first_token (another most likely token), kl:KAPPA (its KL over "
        "KAPPA nats, at most 1) or greedy:K (any of K tokens) (default first_token)",
    )
    add("--epsilon", type=float, default=0.02, metavar="X", help="mean loss that must not be exceeded (default 0.02)")
    add("--delta", type=float, default=0.05, metavar="X", help="probability of being wrong about it (default 0.05)")
    add("--limit", type=int, metavar="N", help="take the first N prompts only")
    add("--all-notches", action="store_true", help="measure notches after the first one that is not certified, too")
    add("--output", metavar="FILE", help="write what was found, for the setting 'calibration'")
    add("--plot", nargs="?", const="", metavar="FILE", help="draw it: as text, or as a PNG in FILE")
    add("--json", action="store_true", help="print a JSON object instead of a table")
    add_settings(parser, _SETTINGS)
    show_first(
        parser,
        "--prompts",
        "--chat",
        "--loss",
        "--epsilon",
        "--delta",
        "--limit",
        "--output",
        "--json",
        "--model",
        "--config",
    )
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Measured:
    """Result of a calibration.

    Attributes:
        losses: By notch and part of the answer, those of its grafted requests in order of arrival; at "full" of all requests.
    """

    calibration: Calibration
    losses: Mapping[str, Mapping[str, Sequence[float]]]
    num_too_long: int

    @property
    def full_prefill(self) -> dict[str, float]:
        """Loss of kvgraft's own full prefill: rounding."""
        lost = self.losses["full"]["whole"]
        return {"requests": len(lost), "loss_sum": float(sum(lost))}

    def as_json(self) -> dict[str, object]:
        """Return the result for programs; the file for the setting `calibration` holds no single losses."""
        more = {"full_prefill": self.full_prefill, "too_long": self.num_too_long, "losses": self.losses}
        return {**asdict(self.calibration), **more}


def run(args: argparse.Namespace) -> int:
    """Calibrate; 1 if no notch could be certified."""
    from kvgraft.fidelity.control import Loss, save_calibration

    loss = Loss.parse(args.loss)
    _check(args)
    measured = _measure(args, loss)
    calibration = measured.calibration
    is_enough = any(result.is_certified for result in calibration.results)
    if args.output and (is_enough or _most_requests(calibration) >= _fewest(calibration)):
        save_calibration(Path(args.output), calibration)
    if args.json:
        print(json.dumps(measured.as_json()))
    else:
        print("\n".join(_table(measured)))
        if args.plot is not None:
            print("\n" + "\n".join(_text_plot(calibration)))
    if args.plot:
        from kvgraft.bench.calibration_plot import draw_calibration

        draw_calibration(calibration, Path(args.plot))
    return int(not is_enough)


def _check(args: argparse.Namespace) -> None:
    """Refuse what would be found wrong after measuring.

    Raises:
        ConfigError: A number is out of range, or a file cannot be written there.
        ImportError: matplotlib is not installed, and there is to be a picture.
    """
    for option, value in (("--epsilon", args.epsilon), ("--delta", args.delta)):
        if not 0 < value < 1:
            raise ConfigError(f"{option} must lie between 0 and 1, not {value}")
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit must be at least 1, not {args.limit}")
    for option, file in (("output", args.output), ("plot", args.plot)):
        if file:
            check_output(option, Path(file))
    if args.plot:
        import_module("kvgraft.bench.calibration_plot")  # a missing package is reported before measuring


def _measure(args: argparse.Namespace, loss: Loss) -> Measured:
    from functools import partial

    from kvgraft.bench.chat import user_message
    from kvgraft.bench.prompts import read_sessions

    sessions = read_sessions(args.prompts, args.limit)
    # The policy is calibrated, not what an older calibration says.
    llm = load_llm(engine_config(args).updated({"calibration": "", "audit_share": 0.0, "risk_state": ""}))
    if llm.graft_refusal is not None:
        raise ConfigError(
            f"this model's K/V cannot be moved: {llm.graft_refusal}; nothing is grafted, nothing to calibrate"
        )
    from kvgraft.bench.calibrate import AskedRisk, calibration_of, references, sample_notches, summed_up, tokenized
    from kvgraft.fidelity.control.notches import notches_of
    from kvgraft.types import RepairTime

    prompts = tokenized(llm, sessions, loss.num_tokens, partial(user_message, llm) if args.chat else None)
    notches = notches_of(llm.policy, RepairTime(llm.config.repair))
    asked = AskedRisk(loss, args.epsilon, args.delta)
    with progress(prompts.count * (len(notches) + 1), "prompts") as advance:
        expected = references(llm, prompts, loss, advance)
        samples = sample_notches(llm, prompts, expected, asked, takes_all=args.all_notches, advance=advance)
    calibration = calibration_of(llm, summed_up(samples, asked), asked, prompts.count)
    losses = {
        name: {part.value: tuple(lost) for part, lost in sample.losses.items()} for name, sample in samples.items()
    }
    return Measured(calibration, losses, prompts.num_too_long)


def _table(measured: Measured) -> Iterator[str]:
    calibration, control, num_too_long = measured.calibration, measured.full_prefill, measured.num_too_long
    epsilon, delta, binding = calibration.epsilon, calibration.delta, calibration.binding
    yield (
        f"{calibration.prompts} prompts in order of arrival, model {calibration.made_by['model']} in {binding['dtype']}, "
        f"policy {binding['policy']}, repair {binding['repair']}, loss {calibration.loss}, epsilon {epsilon:.3g}, "
        f"delta {delta:.3g}"
    )
    if num_too_long:
        yield f"{num_too_long} prompts were left out: too long for the model or the pool"
    heads = f"{'recomputed':>11s}{'grafted':>9s}{'loss':>9s}{'mean':>9s}{'at most':>9s}{'p-value':>10s}"
    yield f"{'notch':12s}{'part':7s}{heads}"
    mean = control["loss_sum"] / max(1, control["requests"])
    note = f"rounding, {control['requests']} prompts"
    yield f"{'full':12s}{'whole':7s}{'all':>11s}{'-':>9s}{control['loss_sum']:>9.4g}{mean:>9.2%}{'':19s}  {note}"
    for result in calibration.results:
        names = (result.notch, *[""] * len(result.parts))
        for name, part in zip(names, result.parts, strict=False):
            yield (
                f"{name:12s}{part.part:7s}{result.recomputed_share:>11.1%}{part.requests:>9d}{part.loss_sum:>9.4g}"
                f"{part.mean:>9.2%}{part.upper_limit:>9.2%}{part.p_value:>10.2g}"
                f"{'  certified' if result.is_certified and part is result.parts[-1] else ''}"
            )
    yield ""
    yield from _conclusion(calibration)


def _conclusion(calibration: Calibration) -> Iterator[str]:
    """Yield the statement that holds, or else how many prompts one would take."""
    from kvgraft.engine.requests.risk import stated_by
    from kvgraft.fidelity.control import trials_needed

    if any(result.is_certified for result in calibration.results):
        yield f"certified: {stated_by(calibration)}"
        yield "this is a rate over traffic like these prompts, not a statement about one answer; see docs/risk.md"
        yield from _first_token_alone(calibration)
        return
    if _most_requests(calibration) < _fewest(calibration):
        worst = max(calibration.results, key=lambda result: result.worst.requests).worst
        had = "" if worst.part.value == "whole" else f" with an answer that has the part {worst.part.value!r}"
        yield (
            f"nothing is certified: {worst.requests} requests were grafted{had}, and with none lost it takes "
            f"{_fewest(calibration)}; give more prompts"
        )
        return
    first = calibration.results[0]
    worst = first.worst
    needed = trials_needed(calibration.epsilon, calibration.delta, worst.mean)
    more = f"if that is its risk, {needed} requests would show it" if needed else "that is no less than epsilon"
    yield f"nothing is certified: notch {first.notch!r} lost {worst.mean:.2%} of {worst.requests} requests; {more}"


def _first_token_alone(calibration: Calibration) -> Iterator[str]:
    """Yield a remedy where a bolder notch fails for its first token alone, which no share that is computed after it mends."""
    failed = next((result for result in calibration.results if not result.is_certified), None)
    if failed is None:
        return
    lost = {part.part.value for part in failed.parts if part.p_value > calibration.delta}
    if lost == {"first"}:
        yield (
            f"notch {failed.notch!r} fails for its first token alone, which is drawn before the repair: --repair before may "
            "certify bolder ones"
        )


def _most_requests(calibration: Calibration) -> int:
    return max(result.worst.requests for result in calibration.results)


def _fewest(calibration: Calibration) -> int:
    from kvgraft.fidelity.control import trials_needed

    needed = trials_needed(calibration.epsilon, calibration.delta)
    assert needed is not None
    return needed


def _text_plot(calibration: Calibration) -> Iterator[str]:
    """Yield a line per notch, of its worst part: mean `#`, up to its limit `-`, epsilon `|`."""
    highest = max(calibration.epsilon, *(min(1.0, result.worst.upper_limit) for result in calibration.results))
    scale = (_BAR - 1) / highest
    at = round(calibration.epsilon * scale)
    for result in calibration.results:
        worst = result.worst
        mean, limit = (round(value * scale) for value in (worst.mean, worst.upper_limit))
        bar = "".join("|" if i == at else "#" if i < mean else "-" if i <= limit else " " for i in range(_BAR))
        yield f"{result.notch:12s}{worst.part:7s}{bar}"
    yield f"{'':19s}{'':{at}s}| {calibration.epsilon:.3g} asked; # mean, - up to its limit"
