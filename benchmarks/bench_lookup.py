"""Times the donor catalogue: lookup of a 32K prompt against many donors, registration, removal. Prints milliseconds.

    PYTHONPATH=src python benchmarks/bench_lookup.py [--json] [--quick] [--shared]

Donors are random text of a vocabulary of 32,000. Every lookup is of a new prompt, so caches are as cold as they are in
a server. Prompts: `pieces` of 512 tokens from random places of random donors, `shifted` text of one place amid 24K new
tokens, `fresh` text that no donor has, and prompts chosen to make lookups expensive. Registration is into a full
catalogue and includes evictions.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.bench.bound import covered_positions
from kvgraft.donors import GUARANTEED_RUN, DonorCatalogue, DonorQuery
from kvgraft.types import Namespace
from shared_text import SHARED_TEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Tokens = NDArray[np.int32]

VOCABULARY = 32_000
PROMPT_TOKENS = 32_768
PIECE_TOKENS = 512
DOCUMENT_TOKENS = 8_192
"""Of the shifted document."""
REPEATS = 200
NUM_TWINS = 2_000
"""Donors that share a passage, in one of the hostile cases."""
SIZES = ((1_000, 8_192), (100_000, 512))
"""Donors and tokens of each."""
LEAST_FOUND = 0.95
"""Of the tokens that a prompt shares with donors; a lookup that finds less is fast for the wrong reason."""
NAMESPACE = Namespace("benchmark")
SECRET = bytes(32)


def random_tokens(rng: np.random.Generator, *shape: int) -> Tokens:
    """Uniform token ids."""
    return rng.integers(0, VOCABULARY, shape, dtype=np.int32)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum in milliseconds."""
    values = np.array(seconds) * 1e3
    return {
        name: round(float(np.percentile(values, percent)), 3)
        for name, percent in {"p50": 50, "p99": 99, "max": 100}.items()
    }


def timed(call: Callable[[], object]) -> float:
    """Seconds that `call` takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def filled_catalogue(texts: Tokens) -> DonorCatalogue:
    """A catalogue that is full with `texts` (num_donors, length)."""
    catalogue = DonorCatalogue(texts.size, secret=SECRET)
    for text in texts:
        catalogue.add(NAMESPACE, text, None)
    return catalogue


def pieces_prompt(rng: np.random.Generator, texts: Tokens) -> Tokens:
    """Pieces from random places of random donors."""
    num_pieces = PROMPT_TOKENS // PIECE_TOKENS
    donors = rng.integers(0, len(texts), num_pieces)
    starts = rng.integers(0, texts.shape[1] - PIECE_TOKENS + 1, num_pieces)
    return np.concatenate(
        [texts[donor, start : start + PIECE_TOKENS] for donor, start in zip(donors, starts, strict=True)]
    )


def shifted_prompt(rng: np.random.Generator, texts: Tokens) -> Tokens:
    """Consecutive donors of 8K tokens together, in the middle of new text."""
    count = max(1, DOCUMENT_TOKENS // texts.shape[1])
    first = int(rng.integers(0, len(texts) - count + 1))
    document = texts[first : first + count].ravel()
    fresh = random_tokens(rng, PROMPT_TOKENS - len(document))
    return np.concatenate([fresh[:200], document, fresh[200:]])


def fresh_prompt(rng: np.random.Generator, _: Tokens) -> Tokens:
    """Text that no donor has."""
    return random_tokens(rng, PROMPT_TOKENS)


def bench_lookup(num_donors: int, donor_tokens: int) -> dict[str, Any]:
    """Lookups by kind of prompt, registration into and removal from a full catalogue."""
    rng = np.random.default_rng(0)
    texts = random_tokens(rng, num_donors, donor_tokens)
    catalogue = filled_catalogue(texts)
    result: dict[str, Any] = {"donors": num_donors, "donor_tokens": donor_tokens}
    for name, make in {"pieces": pieces_prompt, "shifted": shifted_prompt, "fresh": fresh_prompt}.items():
        found, seconds = 0, []
        for _ in range(REPEATS):
            prompt = make(rng, texts)
            seconds.append(timed(lambda prompt=prompt: catalogue.find(DonorQuery(NAMESPACE, prompt))))
            found += sum(match.length for match in catalogue.find(DonorQuery(NAMESPACE, prompt)))
        result[name] = percentiles(seconds) | {"matched_tokens": found // REPEATS}
    long_texts = random_tokens(rng, 50, PROMPT_TOKENS)
    result["register_32k"] = percentiles([timed(lambda t=t: catalogue.add(NAMESPACE, t, None)) for t in long_texts])
    newest = [donor for donor in catalogue if donor.num_tokens == PROMPT_TOKENS]
    before = len(catalogue.finder.index)
    result["remove_32k"] = percentiles([timed(lambda d=d: catalogue.remove(d.donor_id)) for d in newest])
    result["anchors_per_removal"] = round((before - len(catalogue.finder.index)) / len(newest))
    result["anchors_left"] = len(catalogue.finder.index)
    shared = {"pieces": PROMPT_TOKENS, "shifted": min(DOCUMENT_TOKENS, texts.size), "fresh": 0}
    for name, most in shared.items():
        found = result[name]["matched_tokens"]
        if not LEAST_FOUND * most <= found <= most:
            raise SystemExit(f"bench_lookup: {name} prompts share {most} tokens with donors, {found} were found")
    return result


def hostile_cases(rng: np.random.Generator) -> dict[str, tuple[list[Tokens], Tokens]]:
    """Donors and a prompt for texts that propose far more matches than they have."""
    line, other = random_tokens(rng, 2, 20)
    passage = random_tokens(rng, 8_192)
    one_token = np.zeros(PROMPT_TOKENS, np.int32)
    random_lines = [np.concatenate([(line, other)[i] for i in rng.integers(0, 2, 1_638)]) for _ in range(9)]
    snippets = random_tokens(rng, 1_000, 16)
    sentences = [random_tokens(rng, int(length)) for length in rng.integers(8, 30, 40)]

    def among_noise() -> Tokens:
        return np.concatenate([part for snippet in snippets for part in (snippet, random_tokens(rng, 16))])

    def in_any_order(num_tokens: int) -> Tokens:
        return np.concatenate([sentences[i] for i in rng.integers(0, 40, num_tokens // 18)])

    def chained(num_tokens: int) -> Tokens:
        """Cuttings of one text from anywhere: every k-gram in many donors, none with more than a passage around it."""
        return np.concatenate([passage[i : i + 32] for i in rng.integers(0, 8_000, num_tokens // 32)])

    return {
        "one token, donors of one token": ([one_token] * 8, one_token),
        "one line repeated": ([np.resize(line, PROMPT_TOKENS)] * 8, np.resize(np.roll(line, 7), PROMPT_TOKENS)),
        "two lines in random order": (random_lines[:8], random_lines[8]),
        "two tokens alternating": ([np.resize(line[:2], PROMPT_TOKENS)] * 8, np.resize(line[1::-1], PROMPT_TOKENS)),
        f"{NUM_TWINS:,} donors with one passage": (
            [np.concatenate([random_tokens(rng, 32), passage[:1_024]]) for _ in range(NUM_TWINS)],
            np.tile(passage[:1_024], 32),
        ),
        "common snippets in noise": ([among_noise() for _ in range(8)], among_noise()),
        "4,000 donors of 40 sentences": ([in_any_order(512) for _ in range(4_000)], in_any_order(PROMPT_TOKENS)),
        "4,000 donors of 32-token cuttings": ([chained(512) for _ in range(4_000)], np.tile(passage, 4)),
    }


def bench_hostile() -> dict[str, dict[str, float]]:
    """Lookups of hostile prompts."""
    result = {}
    for name, (texts, prompt) in hostile_cases(np.random.default_rng(1)).items():
        catalogue = DonorCatalogue(sum(map(len, texts)), secret=SECRET)
        for text in texts:
            catalogue.add(NAMESPACE, text, None)
        seconds = [timed(lambda: catalogue.find(DonorQuery(NAMESPACE, prompt))) for _ in range(20)]  # noqa: B023
        result[name] = percentiles(seconds) | {"matches": len(catalogue.find(DonorQuery(NAMESPACE, prompt)))}
    return result


def bench_shared(name: str, seeds: Sequence[int], num_prompts: int = 300) -> dict[str, object]:
    """Share of what an exact method finds in runs of 32 tokens, in text that many donors share; every seed has its key."""
    found, bound, wrong = [], [], 0
    for seed in seeds:
        prompts = SHARED_TEXT[name](num_prompts, seed)
        catalogue = DonorCatalogue(sum(map(len, prompts)), secret=seed.to_bytes(32, "little"))
        masks = []
        for prompt in prompts:
            masks.append(np.zeros(len(prompt), np.bool_))
            for match in catalogue.find(DonorQuery(NAMESPACE, prompt)):
                target = slice(match.target_start, match.target_end)
                donor = catalogue.get(match.donor_id).token_ids
                wrong += int((donor[match.donor_start :][: match.length] != prompt[target]).sum())
                masks[-1][target] = True
            catalogue.add(NAMESPACE, prompt, None)
        covered = covered_positions(prompts, GUARANTEED_RUN)
        found.append(sum(int((mask & best).sum()) for mask, best in zip(masks, covered, strict=True)))
        bound.append(sum(int(best.sum()) for best in covered))
    shares = [round(part / whole, 4) for part, whole in zip(found, bound, strict=True)]
    return {"prompts": num_prompts, "bound_tokens": sum(bound), "recovered": shares, "wrong_tokens": wrong}


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--shared", action="store_true", help="only what is found of shared text; no times")
    parser.add_argument("--quick", action="store_true", help="a tenth of the donors")
    args = parser.parse_args()
    if args.shared:
        shared = {name: bench_shared(name, range(5)) for name in SHARED_TEXT}
        print(json.dumps({"seeds": "0-4, each with a key of its own", "shared": shared}, indent=1))
        return
    scale = 10 if args.quick else 1
    sizes = [(num_donors // scale, donor_tokens) for num_donors, donor_tokens in SIZES]
    result = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}",
        "prompt_tokens": PROMPT_TOKENS,
        "lookup": [bench_lookup(*size) for size in sizes],
        "hostile": bench_hostile(),
    }
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for measured in result["lookup"]:
        for name, value in measured.items():
            print(f"{name:20s} {value}")
        print()
    for name, value in result["hostile"].items():
        print(f"{name:32s} {value}")


if __name__ == "__main__":
    main()
