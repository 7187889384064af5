r"""First token, and 16 tokens, of every call of recorded agent sessions on stock vLLM and SGLang, with SmolLM2.

    python benchmarks/engines/make_smollm2.py runs/smollm2
    python benchmarks/record.py agent-times-vllm -- \
        python benchmarks/engines/agent_times.py vLLM --packs FOLDER --clients aider

Two servers of the engine, one with its exact prefixes and one with kvgraft, both empty at the start, get every call one after
the other, in alternating order, the other one held still meanwhile. Calls whose prompt and answer do not fit the model are
left out. Tokens of the packs are a permutation of those that a client sent: times and counts say something, answers do not.
`computed` is what usage does not call cached, which vLLM calls gaps and repairs, too; SGLang's answers have a report.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from suite_servers import ENGINES, Engine, EngineServer, Site
from vllm_server import timed_events
from vllm_ttft import say

from kvgraft.bench.recorded import read_pack
from kvgraft.bench.server_process import end_on_sigterm

if TYPE_CHECKING:
    from typing import Self

    Prompt = list[int]

VARIANTS = ("exact", "kvgraft")
_POSITIONS = 8192
_ANSWER = 16
_KV_TOKENS = 46_000
_SECONDS = 900.0


def main() -> int:
    """Print the record's JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=("vLLM", "SGLang"))
    parser.add_argument("--packs", type=Path, required=True, help="folder of CLIENT.jsonl.gz")
    parser.add_argument("--clients", nargs="+", required=True)
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2"), help="folder that make_smollm2.py wrote")
    parser.add_argument("--port", type=int, default=8481)
    args = parser.parse_args()
    end_on_sigterm()
    engine = ENGINES[args.engine]
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvgraft-times-") as folder:
        site = Site(args.model.resolve(), 2, _POSITIONS, Path(folder), kv_tokens=_KV_TOKENS)
        for client in args.clients:
            calls = read_pack(args.packs / f"{client}.jsonl.gz")
            with Pair(engine, site, args.port) as pair:
                for index, prompt in enumerate(prompt for prompt in calls if len(prompt) + _ANSWER < _POSITIONS):
                    rows.append({"client": client, "call": index, "tokens": len(prompt), **pair.ask(prompt.tolist())})
                    say(json.dumps(rows[-1]))
    sums = [summary(client, [row for row in rows if row["client"] == client]) for client in args.clients]
    print(json.dumps({"engine": engine.name, "answer_tokens": _ANSWER, "clients": sums, "rows": rows}))
    return 0


class Pair:
    """A server of every variant; a context manager that starts them and ends them."""

    def __init__(self, engine: Engine, site: Site, port: int) -> None:
        self._engine = engine
        self._ports = {variant: port + 20 * number for number, variant in enumerate(VARIANTS)}
        self._servers = {variant: EngineServer(engine, variant, site, port) for variant, port in self._ports.items()}
        self._stack = ExitStack()
        self._order = VARIANTS

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for server in self._servers.values():
                stack.enter_context(server).pause()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def ask(self, prompt: Prompt) -> dict[str, Any]:
        """Time one call on every server: seconds to its first and to its last token; the next call begins with another."""
        found = {variant: self._ask(variant, prompt) for variant in self._order}
        self._order = self._order[::-1]
        return found

    def _ask(self, variant: str, prompt: Prompt) -> dict[str, Any]:
        body = self._engine.body(prompt)
        if "sampling_params" in body:
            body["sampling_params"]["max_new_tokens"] = _ANSWER
        else:
            body["max_tokens"] = _ANSWER
        self._servers[variant].resume()
        timed = timed_events(self._ports[variant], self._engine.path, body, _SECONDS)
        self._servers[variant].pause()
        _, reused, _ = self._engine.reply([event for _, event in timed])
        return {"first_s": timed[0][0], "answer_s": timed[-1][0], "computed": len(prompt) - reused}


def summary(client: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over a client's calls, and the median of a call's ratio, exact prefixes to grafts."""
    facts: dict[str, Any] = {"client": client, "calls": len(rows)}
    for field in ("first_s", "answer_s", "computed"):
        exact, graft = ([row[variant][field] for row in rows] for variant in VARIANTS)
        facts[field] = {"exact": sum(exact), "kvgraft": sum(graft), "ratio": sum(exact) / sum(graft)}
        facts[field]["median_ratio"] = median(one / other for one, other in zip(exact, graft, strict=True))
    return facts


if __name__ == "__main__":
    sys.exit(main())
