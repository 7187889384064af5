"""The data sets of the tables: request packs that may be there, and workloads that every machine can make. Runs no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.bench.fidelity.request import FidelityRequest, Part
from kvgraft.bench.fidelity.suites import BUILTIN, Suite, has_suite, load_suite
from kvgraft.bench.serve_workload import BUILTIN_RAG, load_workload
from kvgraft.errors import ConfigError

from .settings import PACKS, TableSettings, option

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUM_RAG_PROMPTS = 50


@dataclass(frozen=True, slots=True)
class Dataset:
    """A row of the table.

    Attributes:
        name: Of the row.
        pack: `builtin`, `builtin:rag`, or the name of a pack in the folder of packs.
        group: Beginning of the groups of its requests; empty for all requests.
        has_documents: Whether requests name the documents or the session that they share with others.
        is_control: Whether next to nothing can be reused, so that reuse shows its cost and nothing else.
    """

    name: str
    pack: str
    group: str = ""
    has_documents: bool = True
    is_control: bool = False


PUBLIC = (
    Dataset("WildChat", "wildchat"),
    Dataset("LongEval", "longeval"),
    Dataset("WikiText-103", "wikitext-103"),
    Dataset("NarrativeQA", "narrativeqa"),
    Dataset("TriviaQA", "triviaqa"),
    Dataset("SCBench", "scbench"),
    Dataset("CNN/DailyMail", "cnn_dailymail"),
    Dataset("MultiNews", "multi_news"),
    Dataset("SAMSum", "samsum"),
    Dataset("LooGLE", "loogle"),
)
"""Packs that `kvgraft bench pack dataset` makes of files of these data sets."""
DATASETS = (
    Dataset(BUILTIN, BUILTIN),
    Dataset(BUILTIN_RAG, BUILTIN_RAG, has_documents=False),
    Dataset("rag: XQuAD", "rag", "xquad"),
    Dataset("rag: HotpotQA", "rag", "hotpot"),
    Dataset("xinstr", "xinstr"),
    Dataset("xtemplate: CNN/DailyMail", "xtemplate", "cnn_dailymail"),
    Dataset("xtemplate: SAMSum", "xtemplate", "samsum"),
    Dataset("lines", "lines"),
    Dataset("tools", "tools"),
    Dataset("mturn", "mturn"),
    Dataset("agents: Magentic-One", "agent_magagent"),
    Dataset("agents: mini-SWE", "agent_miniswe"),
    Dataset("agents: tau-bench", "agent_taubench"),
    Dataset("ShareGPT", "sharegpt_aibrix", has_documents=False, is_control=True),
    Dataset("Arena-Hard", "arena_hard_v01", has_documents=False, is_control=True),
    *PUBLIC,
)


@dataclass(frozen=True)
class ChosenDatasets(TableSettings):
    """Settings of a table with a part per data set."""

    names: tuple[str, ...] = option((), "rows, packs or families of rows")
    data: str = option(PACKS, "folder of packs; those that are not there are left out")

    @property
    def present(self) -> tuple[Dataset, ...]:
        """Data sets that can be measured here."""
        return tuple(each for each in chosen_datasets(self.names) if is_present(each, self.data))

    @property
    def absent(self) -> tuple[str, ...]:
        """Data sets that need a pack that is not on this machine."""
        return tuple(each.name for each in chosen_datasets(self.names) if not is_present(each, self.data))


def chosen_datasets(names: Sequence[str]) -> tuple[Dataset, ...]:
    """Return the rows that have one of `names` as their name or their pack, or are of a family of that name; all for none.

    Raises:
        ConfigError: A name is none of these.
    """
    known = {name for each in DATASETS for name in _names(each)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"there is no data set {unknown[0]!r}; choose of {', '.join(sorted(known))}")
    return tuple(each for each in DATASETS if not names or _names(each) & set(names))


def is_present(dataset: Dataset, data: str) -> bool:
    """Return whether this machine has the data set, or can make it."""
    return dataset.pack == BUILTIN_RAG or has_suite(dataset.pack, data)


def load_dataset(dataset: Dataset, data: str) -> Suite:
    """Load its requests as a suite of its name.

    Raises:
        ConfigError: The pack is missing or malformed, or has no request of the row.
    """
    if dataset.pack == BUILTIN_RAG:
        return Suite(dataset.name, tuple(_rag_requests()))
    suite = load_suite(dataset.pack, data)
    requests = tuple(request for request in suite.requests if request.group.startswith(dataset.group))
    if not requests:
        raise ConfigError(
            f"pack {dataset.pack} in {data} has no request of a group that begins with {dataset.group!r}; it is another pack"
        )
    return Suite(dataset.name, requests, suite.metric)


def _names(dataset: Dataset) -> set[str]:
    return {dataset.name, dataset.pack, dataset.name.partition(":")[0]}


def _rag_requests() -> list[FidelityRequest]:
    prompts = load_workload(BUILTIN_RAG, _NUM_RAG_PROMPTS, seed=0).prompts
    return [
        FidelityRequest(str(number), (Part(text),), (str(number),), str(number), ())
        for number, text in enumerate(prompts)
    ]
