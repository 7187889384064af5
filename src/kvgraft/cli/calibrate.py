"""`kvgraft calibrate`: which setting of the selection policy keeps a stated risk on your own prompts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.cli.model_options import add_settings, engine_config, load_llm
from kvgraft.cli.progress import progress
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from kvgraft.fidelity.control import Calibration, Loss

_SETTINGS = ("model", "dtype", "device", "num_slots", "max_model_len", "selection")
_BAR = 40


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "calibrate",
        help="find the setting that keeps a stated risk on your own prompts",
        description="Serve the prompts in order of arrival at every notch of the policy, from conservative to bold, "
        "and compare each grafted request with the model's own full prefill. Notches are certified up to the first one "
        "that was not shown to have a mean loss of at most --epsilon, with a probability of being wrong of --delta. "
        "Requests of which nothing is grafted are exact and do not count.",
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
    add("--output", metavar="FILE", help="write what was found, for the setting 'calibration'")
    add("--plot", nargs="?", const="", metavar="FILE", help="draw it: as text, or as a PNG in FILE")
    add("--json", action="store_true", help="print a JSON object instead of a table")
    add_settings(parser, _SETTINGS)
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Measured:
    """What a calibration found.

    Attributes:
        calibration: What a file holds.
        losses: By notch, those of its grafted requests in order of arrival; at "full" of all requests.
        num_too_long: Prompts that were left out.
    """

    calibration: Calibration
    losses: Mapping[str, Sequence[float]]
    num_too_long: int

    @property
    def full_prefill(self) -> dict[str, float]:
        """What kvgraft's own full prefill lost: rounding."""
        lost = self.losses["full"]
        return {"requests": len(lost), "loss_sum": float(sum(lost))}

    def as_json(self) -> dict[str, object]:
        """For programs; the file for the setting `calibration` holds no single losses."""
        told = {"full_prefill": self.full_prefill, "too_long": self.num_too_long, "losses": self.losses}
        return {**asdict(self.calibration), **told}


def run(args: argparse.Namespace) -> int:
    """Calibrate; 1 if no notch could be certified."""
    from kvgraft.fidelity.control import Loss, save_calibration

    loss = Loss.parse(args.loss)
    for option, value in (("--epsilon", args.epsilon), ("--delta", args.delta)):
        if not 0 < value < 1:
            raise ConfigError(f"{option} must lie between 0 and 1, not {value}")
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit must be at least 1, not {args.limit}")
    if args.output and not Path(args.output).absolute().parent.is_dir():
        raise ConfigError(f"--output {args.output}: there is no such folder; make it first")
    measured = _measure(args, loss)
    calibration = measured.calibration
    if args.json:
        print(json.dumps(measured.as_json()))
    else:
        print("\n".join(_table(measured)))
        if args.plot is not None:
            print("\n" + "\n".join(_text_plot(calibration)))
    if args.plot:
        from kvgraft.bench.calibration_plot import draw_calibration

        draw_calibration(calibration, Path(args.plot))
    is_enough = any(result.is_certified for result in calibration.results)
    if args.output and (is_enough or _most_requests(calibration) >= _fewest(calibration)):
        save_calibration(Path(args.output), calibration)
    return int(not is_enough)


def _measure(args: argparse.Namespace, loss: Loss) -> Measured:
    from functools import partial

    from kvgraft.bench.chat import user_message
    from kvgraft.bench.prompts import read_sessions

    sessions = read_sessions(args.prompts, args.limit)
    # What is calibrated is the policy, whatever an older calibration says.
    llm = load_llm(engine_config(args).updated({"calibration": "", "audit_share": 0.0, "risk_state": ""}))
    if llm.graft_refusal is not None:
        raise ConfigError(
            f"this model's K/V cannot be moved: {llm.graft_refusal}; nothing is grafted, nothing to calibrate"
        )
    from kvgraft.bench.calibrate import Asked, calibration_of, references, sample_notch, summed_up, tokenized
    from kvgraft.reuse.notches import notches_of

    prompts = tokenized(llm, sessions, loss.num_tokens, partial(user_message, llm) if args.chat else None)
    notches = notches_of(llm.policy)
    samples = {}
    with progress(prompts.count * (len(notches) + 1), "prompts") as advance:
        expected = references(llm, prompts, loss, advance)
        for notch in notches:
            samples[notch.name] = sample_notch(llm, notch, prompts, expected, loss, advance=advance)
    asked = Asked(loss, args.epsilon, args.delta)
    calibration = calibration_of(llm, summed_up(samples, asked), asked, prompts.count)
    return Measured(
        calibration, {name: tuple(sample.grafted) for name, sample in samples.items()}, prompts.num_too_long
    )


def _table(measured: Measured) -> Iterator[str]:
    calibration, control, num_too_long = measured.calibration, measured.full_prefill, measured.num_too_long
    epsilon, delta, binding = calibration.epsilon, calibration.delta, calibration.binding
    yield (
        f"{calibration.prompts} prompts in order of arrival, model {calibration.made_by['model']} in {binding['dtype']}, "
        f"policy {binding['policy']}, loss {calibration.loss}, epsilon {epsilon:.3g}, delta {delta:.3g}"
    )
    if num_too_long:
        yield f"{num_too_long} prompts were left out: too long for the model or the pool"
    yield f"{'notch':10s}{'recomputed':>11s}{'grafted':>9s}{'loss':>9s}{'mean':>9s}{'at most':>9s}{'p-value':>10s}"
    mean = control["loss_sum"] / max(1, control["requests"])
    told = f"rounding, {control['requests']} prompts"
    yield f"{'full':10s}{'all':>11s}{'-':>9s}{control['loss_sum']:>9.4g}{mean:>9.2%}{'':19s}  {told}"
    for result in calibration.results:
        mean = result.loss_sum / max(1, result.requests)
        yield (
            f"{result.notch:10s}{result.recomputed_share:>11.1%}{result.requests:>9d}{result.loss_sum:>9.4g}{mean:>9.2%}"
            f"{result.upper_limit:>9.2%}{result.p_value:>10.2g}{'  certified' if result.is_certified else ''}"
        )
    yield ""
    yield from _conclusion(calibration)


def _conclusion(calibration: Calibration) -> Iterator[str]:
    """Say what may be said, and if it is nothing, what that would take."""
    from kvgraft.engine.risk import told
    from kvgraft.fidelity.control import trials_needed

    if any(result.is_certified for result in calibration.results):
        yield f"certified: {told(calibration)}"
        yield "this is a rate over traffic like these prompts, not a statement about one answer; see docs/risk.md"
        return
    if _most_requests(calibration) < _fewest(calibration):
        yield (
            f"nothing is certified: {_most_requests(calibration)} requests were grafted, and with none lost it takes "
            f"{_fewest(calibration)}; give more prompts"
        )
        return
    first = calibration.results[0]
    rate = first.loss_sum / max(1, first.requests)
    needed = trials_needed(calibration.epsilon, calibration.delta, rate)
    more = f"if that is its risk, {needed} requests would show it" if needed else "that is no less than epsilon"
    yield f"nothing is certified: notch {first.notch!r} lost {rate:.2%} of {first.requests} requests; {more}"


def _most_requests(calibration: Calibration) -> int:
    return max(result.requests for result in calibration.results)


def _fewest(calibration: Calibration) -> int:
    from kvgraft.fidelity.control import trials_needed

    needed = trials_needed(calibration.epsilon, calibration.delta)
    assert needed is not None
    return needed


def _text_plot(calibration: Calibration) -> Iterator[str]:
    """A line per notch: mean `#`, up to its limit `-`, epsilon `|`."""
    highest = max(calibration.epsilon, *(min(1.0, result.upper_limit) for result in calibration.results))
    scale = (_BAR - 1) / highest
    at = round(calibration.epsilon * scale)
    for result in calibration.results:
        mean, limit = (
            round(value * scale) for value in (result.loss_sum / max(1, result.requests), result.upper_limit)
        )
        bar = "".join("|" if i == at else "#" if i < mean else "-" if i <= limit else " " for i in range(_BAR))
        yield f"{result.notch:10s}{bar}"
    yield f"{'':10s}{'':{at}s}| {calibration.epsilon:.3g} asked; # mean, - up to its limit"
