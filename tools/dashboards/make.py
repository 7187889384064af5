"""Write the dashboards of `deploy/grafana/dashboards`, one per engine from one description; `--check` compares instead.

Run it after a change here and commit what it writes. Grafana reads the files, nobody edits them there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from engines import ENGINES, RATE, Engine, per_second
from panels import Dashboard, Panel, Row, Target, Variable
from reuse import EMBEDDED_TEXT, ERRORS, NOT_COMPUTED, TEXT, quantiles, share

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"
_TOKENS = "kvgraft:prompt_tokens_total"


def dashboard(engine: Engine) -> Dashboard:
    """Return the dashboard of an engine."""
    labels = ("job", "instance", "model_name", *(["engine"] if engine.has_engines else []))
    extra = EMBEDDED_TEXT if engine.name == "embedded" else ()
    return Dashboard(
        uid=f"kvgraft-{engine.name}",
        title=f"{engine.title}: requests and reused text",
        text="Written by tools/dashboards/make.py; docs/monitoring.md says what the metrics mean.",
        selector=",".join(f'{label}=~"${label}"' for label in labels),
        variables=_variables(engine),
        rows=(
            Row("At a glance", _glance(engine)),
            Row("Requests and latency", _requests(engine)),
            Row("K/V cache", engine.cache),
            Row("Reused text", (*TEXT, *extra)),
            Row("Errors", (*ERRORS, *engine.failed)),
        ),
    )


def _variables(engine: Engine) -> tuple[Variable, ...]:
    """Each reads what is left by those in front of it."""
    names = ("job", "model_name", "instance", *(["engine"] if engine.has_engines else []))
    chosen = ""
    found = []
    for name in names:
        where = f"{{{chosen}}}" if chosen else ""
        found.append(Variable(name, f"label_values({engine.anchor}{where}, {name})"))
        chosen += f'{"," if chosen else ""}{name}=~"${name}"'
    return tuple(found)


def _glance(engine: Engine) -> tuple[Panel, ...]:
    return (
        _stat("Running", "Requests that are being computed.", f"sum({engine.anchor}{{@}})"),
        _stat("Waiting", "Requests in the queue.", f"sum({engine.waiting}{{@}})"),
        _stat(
            "First token, p95",
            "From arrival to the first token.",
            quantiles(engine.first_token, 95)[0].expr,
            unit="s",
        ),
        _stat(
            "Not computed",
            "Share of prompt tokens whose K/V were at hand, exact and approximate.",
            share(_TOKENS, NOT_COMPUTED),
            unit="percentunit",
        ),
        _stat(
            "Approximate",
            "Share of prompt tokens that were shifted or substituted: the part that a prefix cache does not find.",
            share(_TOKENS, 'kind=~"segment|substituted"'),
            unit="percentunit",
        ),
        _stat(
            "Tokens saved",
            "Prompt tokens that were not computed, in the time shown.",
            f"sum(increase({_TOKENS}{{@,{NOT_COMPUTED}}}[$__range]))",
        ),
        _stat(
            "Errors of reuse",
            "In the time shown; each became a miss.",
            "sum(increase(kvgraft:graft_errors_total{@}[$__range]))",
            limits={"bad": 1},
        ),
        _stat(
            "Grafts",
            "Whether the self-check accepts them; the log of a server that refuses says why.",
            "max(kvgraft:graft_refused{@})",
            limits={"bad": 1},
            words={"0": "accepted", "1": "refused"},
        ),
    )


def _stat(
    title: str,
    text: str,
    expr: str,
    *,
    unit: str = "short",
    limits: dict[str, float] | None = None,
    words: dict[str, str] | None = None,
) -> Panel:
    return Panel(title, text, (Target(expr),), unit, "stat", 3, limits=limits or {}, words=words or {})


def _requests(engine: Engine) -> tuple[Panel, ...]:
    return (
        Panel("Requests", "Those that ended, per second.", (engine.ended,), unit="reqps", stack="normal"),
        Panel(
            "Running and waiting",
            "A queue that grows: more work than the server does.",
            (Target(f"sum({engine.anchor}{{@}})", "running"), Target(f"sum({engine.waiting}{{@}})", "waiting")),
        ),
        Panel(
            "K/V in use",
            "Share of the device's K/V that is taken.",
            (Target(engine.usage, "in use"),),
            unit="percentunit",
            top=1,
        ),
        Panel(
            "Time to first token",
            "From arrival to the first token. Reuse is to make it short.",
            quantiles(engine.first_token, 50, 95, 99),
            unit="s",
        ),
        Panel("Time per token", f"Between tokens, {engine.token_text}.", quantiles(engine.token, 50, 95), unit="s"),
        Panel("Whole requests", "From arrival to the end.", quantiles(engine.whole, 50, 95), unit="s"),
        Panel("Time in the queue", "From arrival until the request is run.", quantiles(engine.queue, 50, 95), unit="s"),
        Panel(
            "Tokens",
            "Of prompts, however they came about, and of answers.",
            (Target(per_second(_TOKENS), "prompts"), Target(per_second(engine.generated), "answers")),
        ),
        Panel(
            "Mean length of a prompt",
            "In tokens, of requests that ended.",
            (Target(f"{per_second(_TOKENS)} / (sum(rate({engine.whole}_count{{@}}{RATE})) > 0)", "tokens"),),
        ),
    )


def main() -> int:
    """Write or compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a file is not what would be written"
    )
    is_check = parser.parse_args().check
    stale = []
    for engine in ENGINES:
        path = FOLDER / f"{engine.name}.json"
        text = json.dumps(dashboard(engine).as_json(), indent=1) + "\n"
        if path.exists() and path.read_text() == text:
            continue
        stale.append(path.name)
        if not is_check:
            path.write_text(text)
    if is_check and stale:
        sys.stderr.write(f"{', '.join(stale)} differ; run python tools/dashboards/make.py and commit what it writes\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
