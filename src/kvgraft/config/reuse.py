"""Settings that decide about reuse in every engine, once. Engines extend them and override defaults only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvgraft.config.setting import setting
from kvgraft.config.settings import Settings
from kvgraft.errors import ConfigError
from kvgraft.types import SHORTEST_RUN

REUSE, MEMORY = "reuse", "memory"
"""Headings in `--help` and in the documentation."""


@dataclass(frozen=True, slots=True)
class ReuseSettings(Settings):
    """Settings of reuse and of the memory that it keeps.

    Subclasses widen the choices of `selection` by what their engine can show to a policy, and override defaults only where a
    measurement or their engine says so (`setting.overridden`).
    """

    # The best policy at an equal budget that all engines can run, and with the correction nearer by a third, at no forward
    # pass (docs/fidelity.md).
    selection: str = setting(
        "query_seam",
        "policy that chooses reused tokens to compute again; another package's by its name, or as module:Class",
        REUSE,
        plugins="kvgraft.selection_policies",
        choices=("none", "random", "first_k", "query_attention", "query_seam"),
    )
    recompute_ratio: float = setting(
        0.1,
        "share of reused tokens that is computed again, by policies that take a share",
        REUSE,
        above=0,
        high=1,
        remedy="selection='none' recomputes nothing",
    )
    correction: str = setting(
        "drift",
        "whether reused tokens that are not computed again are corrected by the drift of those that are",
        REUSE,
        choices=("none", "drift"),
    )
    repair: str = setting(
        "after",
        "when chosen tokens are computed again: before the first token, or after it, with the second; an answer of one token "
        "always waits for it",
        REUSE,
        choices=("before", "after"),
    )
    repair_below_margin: float = setting(
        0.25,
        "with repair=after, a first token whose probability exceeds the next one's by less waits for the repair; 0 for none",
        REUSE,
        low=0,
        high=1,
    )
    first_k: int = setting(16, "tokens per run that first_k computes again", REUSE, low=1)
    # As low as a donor can be found: every run of 32 tokens is, of shorter ones some (docs/donors.md). No measurement speaks
    # for missing those; the planner drops what costs more to copy than to compute.
    min_run: int = setting(
        SHORTEST_RUN,
        "shortest run of equal tokens that is reused, and shortest text that becomes a donor",
        REUSE,
        low=SHORTEST_RUN,
    )
    max_generation: int = setting(
        2,
        "highest generation of a donor: 0 is text computed after exact K/V, g + 1 after copies of donors of g; turns that go "
        "on from one another add none",
        REUSE,
        low=0,
    )
    donor_tokens: int = setting(
        1 << 22,
        "tokens that the donor catalogue may hold in all tiers; each takes 34 bytes of host memory as measured, 48 at most",
        MEMORY,
        low=SHORTEST_RUN,
    )
    host_bytes: int = setting(
        1 << 30,
        "host memory for K/V of donors that the device does not hold, per process; 0 keeps none",
        MEMORY,
        low=0,
        size=True,
    )
    store: str = setting(
        "host",
        "where donors are kept besides: host memory alone, or also stores that outlive the process and can be shared, "
        "joined by commas (file:DIR, redis://HOST:PORT, mooncake://HOST:PORT, NAME:WHERE)",
        MEMORY,
        url=True,
    )

    announce_donors: bool = setting(
        False,
        "whether donors are announced among the KV events, with their text, for routers that know them; needs KV events",
        MEMORY,
    )
    semantic_provider: str = setting(
        "",
        "SemanticPrefixProvider, as module:Class, that may name another text to lend its K/V to requests with "
        "reuse=substitute; never published",
        REUSE,
        may_be_empty=True,
        pattern=(r"|[A-Za-z_][\w.]*:[A-Za-z_]\w*", "module:Class"),
    )
    min_semantic_gain: int = setting(
        64,
        "tokens that another text must save beyond exact prefix and equal text, or it is not asked for",
        REUSE,
        low=1,
    )
    semantic_min_similarity: float = setting(
        0.6, "least cosine of another text that the provider may name", REUSE, above=0, high=1
    )
    # As long as MiniLM takes to embed 8K tokens: a prompt without a lookup before it has no vector until then.
    semantic_patience_ms: float = setting(
        2000.0,
        "longest that a request with reuse=substitute waits until its prompt is embedded; 0 takes what is ready",
        REUSE,
        low=0,
    )
    semantic_capacity: int = setting(
        4000, "stored prompts that the provider remembers; the least recently used leaves", REUSE, low=1
    )
    semantic_weights: str = setting(
        "",
        "directory of the provider's embedder, with model.onnx and tokenizer.json; empty for those of the extra",
        REUSE,
        may_be_empty=True,
    )
    semantic_deadline_ms: float = setting(
        20.0, "a semantic provider that takes longer, its patience aside, counts as a miss", REUSE, above=0
    )

    def __post_init__(self) -> None:
        """Check every value, and that text of the shortest run fits.

        Raises:
            ConfigError: The first one that is wrong.
        """
        Settings.__post_init__(self)
        if self.min_run > self.donor_tokens:
            raise ConfigError(
                f"donor_tokens={self.donor_tokens} hold no run of min_run={self.min_run} tokens; "
                "raise donor_tokens or lower min_run"
            )


@dataclass(frozen=True, slots=True)
class AdapterSettings(ReuseSettings):
    """Settings of engines in which a lookup holds up every request of the scheduler."""

    lookup_deadline_ms: float = setting(
        20.0, "a lookup that is expected to take longer is not begun; the request counts as a miss", REUSE, above=0
    )


def mode_setting() -> Any:  # noqa: ANN401 - like dataclasses.field
    """Return the setting of the reuse mode, for engines whose requests have one."""
    return setting(
        "graft",
        "what requests may reuse unless they say otherwise: nothing, exact prefixes, text at any offset, or that for drafts "
        "alone, so that answers are those of a full prefill",
        REUSE,
        choices=("off", "exact", "graft", "verified"),
    )
