"""Everything about a request but its prompt, as users give it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, Unpack

from kvgraft.config import quoted
from kvgraft.engine.sampling.sampling_params import SamplingParams
from kvgraft.errors import ConfigError
from kvgraft.types import RepairTime, ReuseMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.engine.requests.document_names import DocumentLabel
    from kvgraft.engine.requests.repair import RepairRules
    from kvgraft.graft.drift import DriftCorrection
    from kvgraft.graft.select import SelectionPolicy

GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Settings for how a prompt is answered. `RequestBuilder.build` checks what depends on the model and the prompt.

    Attributes:
        sampling: How to generate.
        reuse: `graft` (exact prefixes and matches at any offset), `exact`, `off`, `verified`: drafts as with `graft` and
            the answer of a full prefill, or `substitute`: as `graft`, and the `semantic_provider` of the settings may
            name another text to copy from, which may give a wrong answer.
        cache_salt: Requests with different salts never share K/V.
        selection: Selection policy, its name, or None for the configured one.
        correction: Drift correction, its name ("none" for none), or None for the configured one.
        repair: `before` or `after` the first token, all rules of the repair, or None for the configured ones.
        priority: Under the eviction policy `priority`, prefixes of higher ones stay longer. Changes no order of requests.
        session_id: Session that this is a turn of, or None.
        append: The prompt follows what the session holds, the last answer included; otherwise it replaces it.
        owner: Client that opened the session; others cannot name it.
        provisional: With `reuse="verified"`: stream drafted tokens, too, before they are verified (`StreamPart`).
        documents: Names of parts of the prompt, for reports; not with `append`.
        request_id: Name in reports and logs; None for a new one.
        add_special_tokens: The tokenizer adds its own.

    Raises:
        ConfigError: A value has the wrong type.
    """

    sampling: SamplingParams = GREEDY
    reuse: ReuseMode | str = ReuseMode.GRAFT
    cache_salt: str = ""
    selection: str | SelectionPolicy | None = None
    correction: str | DriftCorrection | None = None
    repair: str | RepairTime | RepairRules | None = None
    priority: int = 0
    session_id: str | None = None
    append: bool = False
    owner: str = ""
    provisional: bool = False
    documents: Sequence[DocumentLabel] = ()
    request_id: str | None = None
    add_special_tokens: bool = True

    @classmethod
    def of(
        cls, sampling: SamplingParams | None, reuse: ReuseMode | str, **fields: Unpack[OptionFields]
    ) -> RequestOptions:
        """Return the options of a call; `sampling` None is greedy."""
        return cls(GREEDY if sampling is None else sampling, reuse, **fields)

    def __post_init__(self) -> None:
        _require(self, "sampling", SamplingParams, "a SamplingParams or None")
        _require(self, "cache_salt", str, "a text")
        _require(self, "request_id", str | None, "a text or None")
        _require(self, "provisional", bool, "True or False")
        if isinstance(self.priority, bool):
            raise ConfigError(f"priority is a whole number, not {self.priority}", "priority")
        _require(self, "priority", int, "a whole number")


class SessionFields(TypedDict, total=False):
    """Fields of `RequestOptions` about the session of a request."""

    session_id: str | None
    append: bool
    owner: str


class OptionFields(SessionFields, total=False):
    """Fields of `RequestOptions` that the engine's public methods take by keyword."""

    cache_salt: str
    selection: str | SelectionPolicy | None
    correction: str | DriftCorrection | None
    repair: str | RepairTime | RepairRules | None
    priority: int
    provisional: bool
    documents: Sequence[DocumentLabel]
    request_id: str | None
    add_special_tokens: bool


def _require(options: RequestOptions, name: str, kind: object, described: str) -> None:
    value = getattr(options, name)
    if not isinstance(value, kind):  # type: ignore[arg-type]
        raise ConfigError(f"{name} is {described}, not {quoted(value)}", name)
