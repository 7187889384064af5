"""Compare settings of `kvgraft bench fidelity` request by request, over several suites at once.

    python benchmarks/fidelity_pairs.py rag.requests.jsonl tools.requests.jsonl --against none query_seam:0.1 [--plot F]

Reads what `kvgraft bench fidelity --json F` writes beside F. Only requests that were grafted under every setting count. A
ratio is that of means over the same requests, with a 95 % interval from 4,000 resamples of requests within their suites:
two settings with intervals that overlap can still differ in nearly every request.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
FIGURES = ("mean_kl", "first_kl", "first_flip", "top1", "greedy_equal", "recomputed_share", "flops_share")
_RESAMPLES = 4_000


def read(paths: list[Path]) -> list[dict[str, object]]:
    """Records of requests that every setting grafted; all files must have the same settings."""
    records = [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    most = max((len(record["settings"]) for record in records), default=0)
    whole = [
        record
        for record in records
        if len(record["settings"]) == most and all(found["is_grafted"] for found in record["settings"].values())
    ]
    labels = {tuple(record["settings"]) for record in whole}
    if len(labels) != 1:
        raise SystemExit(
            f"{len(labels)} lists of settings in these files, not one; measure all suites with the same ones"
        )
    return whole


def draws(suites: list[str], seed: int) -> NDArray[np.int64]:
    """Indices of resampled requests, (resamples, requests): each suite keeps its number."""
    rng = np.random.default_rng(seed)
    names = np.array(suites)
    parts = [np.flatnonzero(names == name) for name in sorted(set(suites))]
    return np.concatenate([rng.choice(part, (_RESAMPLES, len(part))) for part in parts], axis=1)


def ratio(over: Values, under: Values, drawn: NDArray[np.int64]) -> dict[str, object]:
    """Ratio of means, and its interval."""
    resampled = over[drawn].mean(1) / under[drawn].mean(1)
    return {"ratio": over.mean() / under.mean(), "ci": np.quantile(resampled, [0.025, 0.975]).tolist()}


def compare(records: list[dict[str, object]], against: list[str], seed: int) -> list[dict[str, object]]:
    """Return a row per setting, in the order of the files."""
    labels = list(records[0]["settings"])
    if unknown := set(against) - set(labels):
        raise SystemExit(f"no setting {', '.join(sorted(unknown))} in these files; there are {', '.join(labels)}")
    columns = {
        label: {name: np.array([record["settings"][label][name] for record in records], float) for name in FIGURES}
        for label in labels
    }
    drawn = draws([str(record["suite"]) for record in records], seed)
    rows = []
    for label in labels:
        mine = columns[label]
        kl = mine["mean_kl"]
        rows.append(
            {
                "setting": label,
                "n": len(records),
                **{name: float(mine[name].mean()) for name in FIGURES},
                **{
                    f"{name}_ci": np.quantile(mine[name][drawn].mean(1), [0.025, 0.975]).tolist()
                    for name in ("mean_kl", "first_kl")
                },
                "median_kl": float(np.median(kl)),
                "worst_tenth_kl": float(np.sort(kl)[-max(1, len(kl) // 10) :].mean()),
                "against": {
                    other: {
                        "mean_kl": ratio(kl, columns[other]["mean_kl"], drawn),
                        "first_kl": ratio(mine["first_kl"], columns[other]["first_kl"], drawn),
                        "nearer": float((kl < columns[other]["mean_kl"]).mean()),
                    }
                    for other in against
                    if other != label
                },
            }
        )
    return rows


def markdown(rows: list[dict[str, object]], against: list[str]) -> str:
    """Lay the rows out."""
    ratios = "".join(f" KL / `{name}` |" for name in against) + "".join(
        f" first-token KL / `{name}` |" for name in against[:1]
    )
    lines = [f"| setting | FLOPs | mean KL | median | worst tenth |{ratios} first flip | top-1 | greedy-32 |"]
    lines.append("|---" * (8 + len(against) + 1) + "|")
    for row in rows:
        low, high = row["mean_kl_ci"]
        cells = [
            f"{row['flops_share']:.0%}",
            f"{row['mean_kl']:.4f} [{low:.4f}, {high:.4f}]",
            f"{row['median_kl']:.4f}",
        ]
        cells += [f"{row['worst_tenth_kl']:.3f}"]
        for figure, names in (("mean_kl", against), ("first_kl", against[:1])):
            cells += [figure_text(row["against"].get(name, {}).get(figure)) for name in names]
        cells += [f"{row['first_flip']:.1%}", f"{row['top1']:.1%}", f"{row['greedy_equal']:.0%}"]
        lines.append(f"| `{row['setting']}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: list[dict[str, object]], path: Path) -> None:
    """Draw error against computed operations, all suites together."""
    from kvgraft.bench.fidelity.plot import draw_fidelity

    drawn = []
    for row in rows:
        policy, _, correction = str(row["setting"]).partition("+")
        intervals = {name: row[f"{name}_ci"] for name in ("mean_kl", "first_kl")}
        drawn.append(
            {
                **row,
                "suite": "all",
                "policy": policy.partition(":")[0],
                "correction": correction or "none",
                "ci": intervals,
            }
        )
    draw_fidelity(drawn, None, f"the same {rows[0]['n']} requests under every setting", path)


def figure_text(found: dict[str, object] | None) -> str:
    """A ratio and its interval."""
    if found is None:
        return "1"
    low, high = found["ci"]
    return f"{found['ratio']:.2f} [{low:.2f}, {high:.2f}]"


def main() -> int:
    """Parse the command line and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("requests", nargs="+", type=Path, help="files of requests")
    parser.add_argument("--against", nargs="+", default=["none"], help="settings to divide by")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, help="write a PNG: error against computed operations")
    args = parser.parse_args()
    rows = compare(read(args.requests), args.against, args.seed)
    if args.plot:
        draw(rows, args.plot)
    print(json.dumps(rows, indent=1) if args.json else markdown(rows, args.against))
    return 0


if __name__ == "__main__":
    sys.exit(main())
