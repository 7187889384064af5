"""Print the recorded figures of the prefix caches as Markdown tables, as `docs/benchmarks.md` shows them.

python benchmarks/prefix/table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_RESULTS = Path(__file__).parent.parent / "results"
_LENGTHS = ("1K", "8K", "32K", "128K")
_TRACES = ("mooncake-synthetic", "mooncake-conversation", "claude-code")


def load(name: str) -> dict[str, Any]:
    """A recorded result."""
    record: dict[str, Any] = json.loads((_RESULTS / f"prefix-{name}.json").read_text())
    return record


def row(*cells: object) -> None:
    """One line of a table."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |")


def header(*cells: str) -> None:
    """The first two lines of a table."""
    row(*cells)
    row(*("---" for _ in cells))


def short(value: float) -> str:
    """Three digits."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def tree_tables() -> None:
    """Medians by tree, page 1 and 16 in one cell."""
    trees = load("trees")["result"]["trees"]
    pages = list(next(iter(trees.values())))

    def cells(*path: str) -> list[str]:
        return [" / ".join(short(_at(trees[tree][page], path)) for page in pages) for tree in trees]

    header("µs, page 1 / 16", *trees)
    for operation in trees["kvgraft"][pages[0]]["1K"]:
        for length in _LENGTHS:
            row(f"{operation}, {length}", *cells(length, operation))
    row("128K in chunks of 512, ms", *cells("128K in chunks of 512, ms"))
    for size in [key for key in trees["kvgraft"][pages[0]] if key.endswith(" nodes")]:
        for operation in [name for name in trees["kvgraft"][pages[0]][size] if not name.startswith("bytes")]:
            row(f"{size}: {operation}", *cells(size, operation))
    if "bytes per node of 192 tokens" in trees["kvgraft"][pages[0]]:
        row("bytes per node of 192 tokens", *cells("bytes per node of 192 tokens"))


def _at(figures: dict[str, Any], path: tuple[str, ...]) -> float:
    value: Any = figures
    for key in path:
        value = value[key]
    return float(value)


def trace_tables() -> None:
    """Hit rates by policy and capacity; the best policy of each capacity in bold."""
    for name in _TRACES:
        results = load(name)["result"]
        capacities = list(dict.fromkeys(result["capacity"] for result in results))
        rates = {(r["policy"], r["capacity"]): r["hit_rate"] for r in results}
        policies = [p for p in dict.fromkeys(r["policy"] for r in results) if p != "optimum"]
        best = {c: max(rates[p, c] for p in policies) for c in capacities}
        print()
        header(name, *(f"{c / 1e6:g} M" if c else "no limit" for c in capacities))
        for policy in [*policies, "optimum"]:
            texts = [f"{100 * rates[policy, c]:.1f}" for c in capacities]
            row(
                policy,
                *(
                    f"**{t}**" if policy != "optimum" and rates[policy, c] == best[c] else t
                    for t, c in zip(texts, capacities, strict=True)
                ),
            )


if __name__ == "__main__":
    tree_tables()
    trace_tables()
