"""Which stored texts an embedder finds for a prompt, how near they are, and what it costs. Prints JSON.

    python benchmarks/semantic/discovery.py [--data DIR] [--tokenizer FILE] [--embedders minhash,tfidf,minilm]
    [--questions 60]

Quality, per suite and embedder: the share of a prompt's sources among as many nearest texts (`recall`); the cosine of
sources and of the nearest other text; how many prompts have their nearest text in each bucket of the cosine, and of how
many of these it is a source; and the share of proposals at a cosine of 0.60 that are none (`false_proposals`). DIR has
packs (`rag`, `xtemplate`, `adversarial.pairs`, `arena_hard_v01`); without it, what every machine has.

Weights: what of `rag` and others is found by exact cosines of token frequencies, weighed not at all, by the token's id
or by how many stored texts have the token.

Cost: milliseconds of CPU to embed a prompt of 4K and 32K tokens on one thread, and to search.

Proposals: a full catalogue of donors, prompts of short pieces of them, and how many of their tokens are found with the
indexes alone and with proposals; `lost` is the same with indexes that have lost every anchor.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from suites import suites
from tokenizers import Tokenizer

import kvgraft.models
from kvgraft.donors import DonorCatalogue, DonorQuery
from kvgraft.errors import KVGraftError
from kvgraft.semantic import CosineIndex, Discovery, DonorProposer, create_embedder, unit_rows
from kvgraft.types import Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from suites import Suite

    from kvgraft.semantic import Embedder

THRESHOLD = 0.60
BUCKETS = (0.6, 0.7, 0.8, 0.9, 1.0)
LENGTHS = (4_096, 32_768)
SEARCHED = (1_000, 10_000, 50_000)
REPEATS = 15
WEIGHED = ("rag", "edited", "xtemplate", "paraphrased")
CATALOGUE_TOKENS, DONOR_TOKENS, PIECES = 1 << 20, 2_048, (32, 64, 512)
PROMPT_TOKENS, PROMPTS = 4_096, 40
NAMESPACE = Namespace("benchmark")


def quality(embedder: Embedder, suite: Suite, encode: Callable[[str], Any], known: dict[str, Any]) -> dict[str, Any]:
    """Ask all questions of a suite; `known` has vectors of texts by then embedded, of embedders that do not learn."""
    index = CosineIndex(embedder.dimensions)
    learnt = [embedder.learn(encode(text)) for text in suite.stored.values()]
    if True in learnt:
        known = {}

    def vector(text: str) -> Any:  # noqa: ANN401 - a row
        if text not in known:
            known[text] = embedder.embed([encode(text)])[0]
        return known[text]

    for name, text in suite.stored.items():
        index.add(suite.name, name, vector(text))
    recall, sources, others, nearest = [], [], [], []
    for text, keys in suite.questions:
        found = index.search(suite.name, vector(text), len(suite.stored), -1)
        if keys:
            recall.append(len({each.key for each in found[: len(keys)]} & set(keys)) / len(keys))
            sources += [each.similarity for each in found if each.key in keys]
        others += [next(each.similarity for each in found if each.key not in keys)]
        nearest.append((found[0].similarity, found[0].key in keys))
    proposed = [is_source for similarity, is_source in nearest if similarity >= THRESHOLD]
    return {
        "suite": suite.name,
        "embedder": embedder.name,
        "stored": len(suite.stored),
        "questions": len(suite.questions),
        "recall": rounded(np.mean(recall)) if recall else None,
        "source_cosine": quantiles(sources, 5, 50),
        "nearest_other_cosine": quantiles(others, 50, 99),
        "buckets": {f"{low:.1f}-{high:.1f}": bucket(nearest, low, high) for low, high in pairwise(BUCKETS)},
        "proposals": len(proposed),
        "false_proposals": rounded(1 - np.mean(proposed)) if proposed else None,
    }


def bucket(nearest: Sequence[tuple[float, bool]], low: float, high: float) -> dict[str, Any]:
    """How many prompts have their nearest text there, and of how many of these it is a source."""
    inside = [right for similarity, right in nearest if low <= similarity < high or (high == BUCKETS[-1] <= similarity)]
    return {"prompts": len(inside), "right": rounded(np.mean(inside)) if inside else None}


def weights(suite: Suite, encode: Callable[[str], Any], vocabulary: int) -> dict[str, Any]:
    """Share of sources found by exact cosines of token frequencies, with each way to weigh tokens."""

    def counted(text: str) -> Any:  # noqa: ANN401 - a row of frequencies
        counts = np.bincount(encode(text), minlength=vocabulary)
        return np.where(counts > 0, 1 + np.log(np.maximum(counts, 1)), 0)

    names, stored = list(suite.stored), np.stack([counted(text) for text in suite.stored.values()])
    asked = np.stack([counted(text) for text, _ in suite.questions])
    learnt = np.log((len(stored) + 1) / (np.count_nonzero(stored, axis=0) + 1))
    result: dict[str, Any] = {"suite": suite.name, "stored": len(names), "questions": len(asked)}
    for name, weight in {"none": 1.0, "id": np.log1p(np.arange(vocabulary) / 256), "learnt": learnt}.items():
        similarities = unit_rows(asked * weight) @ unit_rows(stored * weight).T
        best = [[names[row] for row in np.argsort(-each, kind="stable")] for each in similarities]
        found = [
            len({*order[: len(keys)]} & {*keys}) / len(keys)
            for order, (_, keys) in zip(best, suite.questions, strict=True)
        ]
        result[name] = rounded(np.mean(found))
    return result


def cost(embedder: Embedder, text: Any) -> dict[str, Any]:  # noqa: ANN401 - token ids
    """Median milliseconds of CPU to embed and to search."""
    result: dict[str, Any] = {"embedder": embedder.name, "dimensions": embedder.dimensions}
    for length in LENGTHS:
        repeats = REPEATS if embedder.is_quick else 3
        tokens = np.resize(text, length)
        result[f"embed_{length}_ms"] = median_ms(lambda tokens=tokens: embedder.embed([tokens]), repeats)
    return result


def search_cost(dimensions: int) -> dict[str, Any]:
    """Median milliseconds to search vectors that are compared one by one."""
    rng, result = np.random.default_rng(0), {"dimensions": dimensions}
    index = CosineIndex(dimensions)
    rows = unit_rows(rng.normal(size=(SEARCHED[-1], dimensions)).astype(np.float32))
    for number, row in enumerate(rows):
        index.add("n", number, row)
        if number + 1 in SEARCHED:
            result[f"search_{number + 1}_ms"] = median_ms(lambda: index.search("n", rows[0], 8, 0.0), REPEATS)
    return result


def proposals(embedder: Embedder, piece: int, *, lost: bool) -> dict[str, Any]:
    """Find pieces of donors in a full catalogue, without and with proposals."""
    rng = np.random.default_rng(0)
    catalogue = DonorCatalogue(CATALOGUE_TOKENS)
    proposer = DonorProposer(Discovery(embedder, max_waiting=1 << 20))
    catalogue.watch(proposer)
    donors = rng.integers(0, 32_000, (CATALOGUE_TOKENS // DONOR_TOKENS, DONOR_TOKENS), dtype=np.int32)
    for donor in donors:
        catalogue.add(NAMESPACE, donor, None)
    proposer.discovery.wait()
    if lost:
        catalogue.finder.index.clear()
        catalogue.finder.passages.clear()
    alone, helped, asked = 0, 0, 0
    alone_ms, helped_ms = [], []
    for _ in range(PROMPTS):
        chosen = rng.choice(len(donors), 4)
        places = rng.integers(0, DONOR_TOKENS - piece, PROMPT_TOKENS // (2 * piece))
        parts = [
            (donors[chosen[i % 4], start : start + piece], rng.integers(32_000, 40_000, piece))
            for i, start in enumerate(places)
        ]
        prompt = np.concatenate([each for pair in parts for each in pair])
        asked += piece * len(places)
        alone_ms.append(timed(lambda prompt=prompt: catalogue.find(DonorQuery(NAMESPACE, prompt))))
        alone += sum(match.length for match in catalogue.find(DonorQuery(NAMESPACE, prompt)))

        def with_proposals(prompt: Any = prompt) -> list[Any]:  # noqa: ANN401 - token ids
            return catalogue.find(DonorQuery(NAMESPACE, prompt, proposed=proposer.propose(NAMESPACE, prompt)))

        helped_ms.append(timed(with_proposals))
        helped += sum(match.length for match in with_proposals())
    proposer.discovery.close()
    return {
        "embedder": embedder.name,
        "piece_tokens": piece,
        "indexes": "lost" if lost else "full",
        "displaced_share": rounded(
            catalogue.finder.num_displaced / max(1, len(catalogue.finder.index) + catalogue.finder.num_displaced)
        ),
        "found_alone": rounded(alone / asked),
        "found_with_proposals": rounded(helped / asked),
        "find_ms": rounded(np.median(alone_ms)),
        "propose_and_find_ms": rounded(np.median(helped_ms)),
    }


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of CPU of this thread."""
    started = time.thread_time()
    call()
    return (time.thread_time() - started) * 1e3


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Median of several calls after one that warms up."""
    call()
    return rounded(np.median([timed(call) for _ in range(repeats)]))


def quantiles(values: Sequence[float], *percents: int) -> dict[str, float]:
    """Percentiles by name."""
    return {f"p{percent}": rounded(np.percentile(values, percent)) for percent in percents} if values else {}


def rounded(value: Any) -> float:  # noqa: ANN401 - a number
    """Four decimals."""
    return round(float(value), 4)


def main() -> int:
    """Parse the command line and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with packs; without it, what every machine has")
    bundled = Path(kvgraft.models.__file__).parent / "graft-tiny" / "tokenizer.json"
    parser.add_argument("--tokenizer", default=str(bundled), help="tokenizers JSON file; by default graft-tiny's")
    parser.add_argument("--embedders", default="minhash,tfidf,minilm")
    parser.add_argument("--questions", type=int, default=60, help="per suite")
    parser.add_argument("--only", choices=("quality", "weights", "cost", "proposals"), help="leave the others out")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(args.tokenizer)

    def encode(text: str) -> Any:  # noqa: ANN401 - token ids
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    try:
        embedders = [create_embedder(name, tokenizer.decode) for name in args.embedders.split(",")]
        asked = suites(args.data, args.questions)
    except (KVGraftError, ImportError) as error:
        print(f"discovery: {error}", file=sys.stderr)
        return 2
    result: dict[str, Any] = {}
    if args.only in (None, "quality"):
        for name in args.embedders.split(","):
            known: dict[str, Any] = {}
            for suite in asked:
                fresh = create_embedder(name, tokenizer.decode)
                result.setdefault("quality", []).append(quality(fresh, suite, encode, known))
    if args.only in (None, "weights"):
        size = tokenizer.get_vocab_size()
        result["weights"] = [weights(suite, encode, size) for suite in asked if suite.name in WEIGHED]
    if args.only in (None, "cost"):
        text = encode("\n".join(text for text, _ in asked[0].questions))
        result["cost"] = [cost(embedder, text) for embedder in embedders]
        result["search"] = [search_cost(dimensions) for dimensions in sorted({each.dimensions for each in embedders})]
    if args.only in (None, "proposals"):
        quick = [embedder for embedder in embedders if embedder.is_quick]
        result["proposals"] = [
            proposals(embedder, piece, lost=lost) for embedder in quick for lost in (False, True) for piece in PIECES
        ]
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
