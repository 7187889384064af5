"""Fields that completions and chats share: how to sample, what to reuse, how to answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

from kvgraft.config import EngineConfig
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.engine.sampling.sampling_params import SamplingParams
from kvgraft.http.errors import APIError
from kvgraft.reuse.selection_names import selection_names
from kvgraft.server.given_prompts import MAX_CHOICES
from kvgraft.server.sampling_fields import sampling_fields
from kvgraft.server.structure_fields import structure_of
from kvgraft.server.truncation import parse_truncation
from kvgraft.types import RepairTime, ReuseMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from kvgraft.engine.requests.options import OptionFields
    from kvgraft.http.fields import Fields
    from kvgraft.server.truncation import Truncation

MAX_SALT_CHARS = 256
_PRIORITY_LIMIT = 2**31
SELECTIONS = EngineConfig.rules()["selection"].choices
CORRECTIONS = EngineConfig.rules()["correction"].choices
_KVGRAFT_KEYS = frozenset({"reuse", "selection", "correction", "repair", "provisional", "documents"})
_STREAM_KEYS = frozenset({"include_usage", "include_obfuscation", "continuous_usage_stats"})


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The fields of a body that all endpoints know.

    Attributes:
        request: What the engine is asked for each prompt; `sampling` is that of the first choice.
        n: Choices per prompt.
        stream: Answer in server-sent events.
        include_usage: End the stream with a chunk that carries `usage`.
        continuous_usage: Each chunk of the stream carries `usage`.
        tokens_as_ids: Log-probabilities name tokens by their ids.
        return_token_ids: The answer holds the ids of its tokens and of the prompt's.
        prompt_logprobs: How many of the most likely tokens are reported for each token of the prompt; None: nothing.
        truncation: What is kept of prompts; None for all.
        echo: The answer begins with the prompt, and so do its log-probabilities.
        no_output: The answer ends with the prompt: the token that was computed is left out.
        left_out: Names of what the client sent and is not served.
    """

    request: RequestOptions
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    tokens_as_ids: bool
    return_token_ids: bool
    prompt_logprobs: int | None
    truncation: Truncation | None
    echo: bool = False
    no_output: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def sampling(self) -> SamplingParams:
        """Parameters of the first choice."""
        return self.request.sampling

    def with_sampling(self, sampling: SamplingParams) -> AnswerOptions:
        """Return a copy that samples otherwise."""
        return replace(self, request=replace(self.request, sampling=sampling))

    def with_fields(self, **fields: Unpack[OptionFields]) -> AnswerOptions:
        """Return a copy that asks the engine with other `fields` of `RequestOptions`."""
        return replace(self, request=replace(self.request, **fields))


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


def parse_options(
    fields: Fields,
    *,
    max_tokens: int,
    logprobs: int | None,
    default_reuse: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> AnswerOptions:
    """Read the common fields.

    Args:
        fields: The body.
        max_tokens: Tokens that the answer may have.
        logprobs: How many of the most likely tokens are reported for each; None: nothing.
        default_reuse: What may be reused if the body does not say.
        tokenizer: Of the model.

    Raises:
        APIError: One of them is wrong; the error names it.
        ConfigError: A bad word cannot be tokenised.
    """
    sampling = SamplingParams(**sampling_fields(fields, tokenizer, max_tokens=max_tokens, logprobs=logprobs))
    stream = fields.flag("stream")
    chunks = _stream_options(fields)
    ours = fields.section("kvgraft", known=_KVGRAFT_KEYS)
    reuse = ours.choice("reuse", default_reuse, [*ReuseMode])
    request = RequestOptions(
        replace(sampling, structure=structure_of(fields)),
        reuse,
        selection=ours.choice("selection", "", _selections(ours)) or None,
        correction=ours.choice("correction", "", CORRECTIONS) or None,
        repair=ours.choice("repair", "", [*RepairTime]) or None,
        cache_salt=fields.text("cache_salt", max_chars=MAX_SALT_CHARS),
        priority=fields.integer("priority", 0, -_PRIORITY_LIMIT, _PRIORITY_LIMIT - 1),
        provisional=_provisional(ours, reuse, stream=stream),
    )
    return AnswerOptions(
        request,
        n=fields.integer("n", 1, 1, MAX_CHOICES),
        stream=stream,
        include_usage=chunks.flag("include_usage"),
        continuous_usage=chunks.flag("continuous_usage_stats"),
        tokens_as_ids=fields.flag("return_tokens_as_token_ids"),
        return_token_ids=fields.flag("return_token_ids"),
        prompt_logprobs=sampling.prompt_logprobs,
        truncation=parse_truncation(fields),
    )


def _selections(ours: Fields) -> Sequence[str]:
    """Policies that a client may name: what other packages brought is looked for where it names no built-in one."""
    return SELECTIONS if ours.text("selection") in ("", *SELECTIONS) else selection_names()


def _stream_options(fields: Fields) -> Fields:
    """Return `stream_options`, without what would change what the chunks hold and is not done."""
    options = fields.section("stream_options", known=_STREAM_KEYS)
    if options.flag("include_obfuscation"):
        raise options.error("include_obfuscation", "is not supported by this server; leave it out")
    return options


def _provisional(ours: Fields, reuse: str, *, stream: bool) -> bool:
    provisional = ours.flag("provisional")
    if provisional and not (stream and reuse == ReuseMode.VERIFIED):
        raise ours.error(
            "provisional", "needs kvgraft.reuse to be 'verified' and stream to be true; leave it out otherwise"
        )
    return provisional
