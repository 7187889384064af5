"""Table T11: what is reused of a prompt, by the cosine of the earlier prompt that is most like it.

SemBlend's README has the share of hits of WildChat by such buckets. What is found here is equal text, whatever the cosine:
the table shows how far one says something of the other. The model lends its tokenizer and computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.bench.packs import PackSession, Workload
from kvgraft.bench.reuse import measure_reuse
from kvgraft.errors import ConfigError
from kvgraft.semantic import create_embedder
from kvgraft.semantic.decoder import decoder_of

from .measured import MeasuredTable
from .settings import option
from .sources import ChosenDatasets, Dataset, load_dataset
from .statistics import array_mean, ratio_of_sums, with_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvgraft.bench.journal import Journal
    from kvgraft.bench.reuse import PromptReuse
    from kvgraft.engine import LLM
    from kvgraft.semantic import Embedder

    Row = dict[str, Any]
    Cosines = NDArray[np.float32]

EDGES = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Between buckets; SemBlend takes a donor from 0.60 on."""


@dataclass(frozen=True)
class CosineSettings(ChosenDatasets):
    """Data sets, and what says how much alike prompts are."""

    names: tuple[str, ...] = option(
        ("ShareGPT", "Arena-Hard", "mturn", "xtemplate", "rag: XQuAD"), "rows, packs or families"
    )
    limit: int = option(200, "requests per data set, from the first on; minilm takes some 0.3 ms per token", least=1)
    embedder: str = option("minilm", "embedder of docs/semantic.md; minilm is the one SemBlend uses")
    min_run: int = option(16, "shortest run that planning counts, 16 as in SemBlend's planner", least=16)

    @property
    def num_steps(self) -> int:
        """Data sets."""
        return len(self.present)


def measure(llm: LLM, settings: CosineSettings, journal: Journal, advance: Callable[[], object]) -> list[Row]:
    """Return a row per data set and bucket that has prompts; `advance` is called once per data set."""
    rows: list[Row] = []
    if not settings.present:
        raise ConfigError(
            f"none of these data sets is in {settings.data}: {', '.join(settings.absent)}; give --data DIR"
        )
    embedder = create_embedder(settings.embedder, decoder_of(llm.loaded.tokenizer))
    for dataset in settings.present:
        found = journal.get(dataset.name, 0)
        if found is None:
            found = {"suite": dataset.name, "index": 0, "rows": _rows(dataset, llm, embedder, settings)}
            journal.add(found)
        rows += found["rows"]
        advance()
    return rows


def _rows(dataset: Dataset, llm: LLM, embedder: Embedder, settings: CosineSettings) -> list[Row]:
    suite = load_dataset(dataset, settings.data)
    texts = tuple(request.prompt for request in suite.requests[: settings.limit])
    tokens = {text: llm.tokenize(text) for text in texts}
    workload = Workload(dataset.name, (PackSession((), texts),))
    planned = measure_reuse(workload, lambda text: tokens[text].astype(np.int32), min_run=settings.min_run)
    cosines = nearest_earlier([tokens[text] for text in texts], embedder)
    return [
        {"dataset": dataset.name, "wrong_tokens": planned.wrong_tokens} | row
        for row in bucket_rows(planned.prompts, cosines, settings.seed)
    ]


def nearest_earlier(prompts: Sequence[NDArray[np.int64]], embedder: Embedder) -> Cosines:
    """Return for each prompt the cosine of the earlier one that is most like it, float32 `(prompts,)`; 0 for the first.

    Complexity: O(prompts^2) products of vectors.
    """
    vectors = np.concatenate([embedder.embed([prompt]) for prompt in prompts])
    found = np.zeros(len(vectors), np.float32)
    for number in range(1, len(vectors)):
        found[number] = (vectors[:number] @ vectors[number]).max()
    return found


def bucket_rows(prompts: Sequence[PromptReuse], cosines: Cosines, seed: int) -> list[Row]:
    """Return a row per bucket that has prompts, from the least cosine to the greatest."""
    buckets = np.digitize(cosines, EDGES)
    names = [
        f"below {EDGES[0]:.1f}",
        *(f"{low:.1f}-{high:.1f}" for low, high in zip(EDGES, (*EDGES[1:], 1.0), strict=True)),
    ]
    return [
        {
            "bucket": names[bucket],
            **_shares([prompts[index] for index in np.flatnonzero(buckets == bucket).tolist()], seed),
        }
        for bucket in np.unique(buckets)
    ]


def _shares(prompts: Sequence[PromptReuse], seed: int) -> Row:
    tokens, reused = [prompt.tokens for prompt in prompts], [prompt.reused_tokens for prompt in prompts]
    half = [2 * prompt.reused_tokens >= prompt.tokens > 0 for prompt in prompts]
    return {
        "requests": len(prompts),
        "tokens": sum(tokens),
        "bound_share": sum(prompt.bound_tokens for prompt in prompts) / max(sum(tokens), 1),
        **with_interval("reused_share", ratio_of_sums, [reused, tokens], seed),
        **with_interval("half_share", array_mean, [half], seed),
    }


TABLE = MeasuredTable(
    "cosine",
    "What is reused of prompts that look alike",
    "Embed every prompt of each data set in order of arrival, and plan its reuse; then count by the cosine of the earlier "
    "prompt that is most like it. The model gives its tokenizer and computes nothing. Packs that are not in --data are left "
    "out and named.",
    CosineSettings,
    ("suite", "index"),
    measure,
)
