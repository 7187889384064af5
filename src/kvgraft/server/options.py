"""What completions and chat have in common: how to sample, what to reuse, how to answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvgraft.config import EngineConfig
from kvgraft.engine.sampling import SamplingParams
from kvgraft.server.errors import APIError
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft.server.fields import Fields

MAX_CHOICES = 128
"""Prompts times `n` of one HTTP request; each is a request of the engine."""
MAX_LOGPROBS = 20
_MAX_STOPS, _MAX_STOP_CHARS = 16, 256
_MAX_SALT_CHARS = 256
_GREEDY_BELOW = 1e-3
"""Lower temperatures are greedy: dividing logits by them overflows float32 and could not be told from it."""
_SEED_LIMIT = 2**63
SELECTIONS = EngineConfig.rules()["selection"].choices
CORRECTIONS = EngineConfig.rules()["correction"].choices
_KVGRAFT_KEYS = frozenset({"reuse", "selection", "correction"})

_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
}
"""Fields that would change the output and are not implemented, with the values that ask for nothing."""


@dataclass(frozen=True, slots=True)
class Options:
    """The fields of a body that both endpoints know.

    Attributes:
        sampling: How to sample the first choice.
        n: Choices per prompt.
        stream: Answer in server-sent events.
        include_usage: End the stream with a chunk that carries `usage`.
        reuse: What may be reused.
        selection: Selection policy instead of the configured one, or None.
        correction: Drift correction instead of the configured one, or None.
        cache_salt: K/V are shared among requests of the same salt only.
    """

    sampling: SamplingParams
    n: int
    stream: bool
    include_usage: bool
    reuse: str
    selection: str | None
    correction: str | None
    cache_salt: str

    def with_stops(self, stop: tuple[str, ...]) -> Options:
        """Return a copy that stops at further texts."""
        return replace(self, sampling=replace(self.sampling, stop=self.sampling.stop + stop)) if stop else self


def check_model(fields: Fields, model_id: str) -> None:
    """Refuse a request for another model; a request that names none is for ours."""
    name = fields.text("model", model_id)
    if name != model_id:
        raise APIError(
            404,
            f"the model {name[:100]!r} does not exist here; this server has {model_id!r}",
            code="model_not_found",
            param="model",
        )


def refuse(fields: Fields, unsupported: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse fields that ask for what is not implemented; ignoring them would give wrong answers silently."""
    for key, harmless in unsupported.items():
        value = fields.values.get(key)
        if value is not None and value not in harmless:
            raise fields.error(key, "is not supported by this server; leave it out")


def parse_options(fields: Fields, *, max_tokens: int, logprobs: int | None, default_reuse: str) -> Options:
    """Read the common fields.

    Raises:
        APIError: One of them is wrong; the error names it.
    """
    refuse(fields, _UNSUPPORTED)
    temperature = fields.number("temperature", 1.0, 0, 2)
    top_p = fields.number("top_p", 1.0, 0, 1)
    if top_p == 0:
        raise fields.error("top_p", "must be above 0; temperature 0 is greedy")
    sampling = SamplingParams(
        max_new_tokens=max_tokens,
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_p=top_p,
        top_k=max(0, fields.integer("top_k", 0, -1, 2**31)),
        seed=fields.integer("seed", 0, -_SEED_LIMIT, _SEED_LIMIT - 1) if fields.has("seed") else None,
        stop=fields.texts("stop", max_items=_MAX_STOPS, max_chars=_MAX_STOP_CHARS),
        ignore_eos=fields.flag("ignore_eos"),
        logprobs=logprobs,
    )
    ours = fields.section("kvgraft", known=_KVGRAFT_KEYS)
    return Options(
        sampling=sampling,
        n=fields.integer("n", 1, 1, MAX_CHOICES),
        stream=fields.flag("stream"),
        include_usage=fields.section("stream_options").flag("include_usage"),
        reuse=ours.choice("reuse", default_reuse, [*ReuseMode]),
        selection=ours.choice("selection", "", SELECTIONS) or None,
        correction=ours.choice("correction", "", CORRECTIONS) or None,
        cache_salt=fields.text("cache_salt", max_chars=_MAX_SALT_CHARS),
    )
