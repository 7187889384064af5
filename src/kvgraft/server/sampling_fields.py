"""The fields of a body that say how tokens are drawn, by the names of OpenAI's API and of vLLM."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvgraft.engine.sampling.bad_words import bad_token_ids
from kvgraft.errors import about

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvgraft.http.fields import Fields

MAX_LOGPROBS = 20
MAX_STOPS, MAX_STOP_CHARS = 16, 256
_MAX_BIASES, _MAX_BIAS = 1024, 100
_MAX_BAD_WORDS, _MAX_BAD_CHARS = 256, 256
_MAX_TOKEN_IDS = 1 << 20
_MAX_PENALTY = 1e4
_GREEDY_BELOW = 1e-3
"""Lower temperatures are greedy: dividing logits by them overflows float32 and could not be distinguished from it."""
_SEED_LIMIT = 2**63
_ID_LIMIT = 2**31 - 1


def sampling_fields(
    fields: Fields, tokenizer: PreTrainedTokenizerBase | None, *, max_tokens: int, logprobs: int | None
) -> dict[str, Any]:
    """Return arguments for `SamplingParams`.

    Args:
        fields: The body.
        tokenizer: Turns `bad_words` into tokens.
        max_tokens: `max_new_tokens`; endpoints name it differently.
        logprobs: `logprobs`; endpoints write it differently.

    Raises:
        APIError: A field is wrong; the error names it.
        ConfigError: A bad word cannot be tokenised.
    """
    arguments: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "logprobs": logprobs,
        "top_k": max(0, fields.integer("top_k", 0, -1, 2**31)),
        "min_p": fields.number("min_p", 0.0, 0, 1),
        "seed": fields.integer("seed", 0, -_SEED_LIMIT, _SEED_LIMIT - 1) if fields.has("seed") else None,
        "prompt_logprobs": fields.integer("prompt_logprobs", 0, 0, MAX_LOGPROBS)
        if fields.has("prompt_logprobs")
        else None,
        "skip_special_tokens": fields.flag("skip_special_tokens", default=True),
    }
    return arguments | _heat(fields) | _penalties(fields) | _ends(fields, max_tokens) | _tokens(fields, tokenizer)


def _heat(fields: Fields) -> dict[str, Any]:
    temperature = fields.number("temperature", 1.0, 0, 2)
    top_p = fields.number("top_p", 1.0, 0, 1)
    if top_p == 0:
        raise fields.error("top_p", "must be above 0; temperature 0 is greedy")
    return {"temperature": temperature if temperature >= _GREEDY_BELOW else 0.0, "top_p": top_p}


def _penalties(fields: Fields) -> dict[str, Any]:
    repetition = fields.number("repetition_penalty", 1.0, 0, _MAX_PENALTY)
    if repetition == 0:
        raise fields.error("repetition_penalty", "must be above 0; 1 is none")
    return {
        "repetition_penalty": repetition,
        "frequency_penalty": fields.number("frequency_penalty", 0.0, -2, 2),
        "presence_penalty": fields.number("presence_penalty", 0.0, -2, 2),
        "logit_bias": _logit_bias(fields),
    }


def _ends(fields: Fields, max_tokens: int) -> dict[str, Any]:
    min_tokens = fields.integer("min_tokens", 0, 0, _ID_LIMIT)
    if min_tokens > max_tokens:
        raise fields.error("min_tokens", f"must be at most the largest number of tokens, {max_tokens}")
    return {
        "stop": fields.texts("stop", max_items=MAX_STOPS, max_chars=MAX_STOP_CHARS),
        "ignore_eos": fields.flag("ignore_eos"),
        "include_stop": fields.flag("include_stop_str_in_output"),
        "stop_token_ids": fields.token_ids("stop_token_ids", max_items=_MAX_TOKEN_IDS),
        "min_tokens": min_tokens,
    }


def _tokens(fields: Fields, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    words = fields.texts("bad_words", max_items=_MAX_BAD_WORDS, max_chars=_MAX_BAD_CHARS)
    allowed = (
        fields.token_ids("allowed_token_ids", max_items=_MAX_TOKEN_IDS) if fields.has("allowed_token_ids") else None
    )
    if allowed == ():
        raise fields.error("allowed_token_ids", "must not be empty; leave it out to allow all")
    with about("bad_words"):
        return {"allowed_token_ids": allowed, "bad_token_ids": bad_token_ids(tokenizer, words) if words else ()}


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    """Read an object with token ids as keys; keys of JSON are texts."""
    biases = fields.section("logit_bias")
    if len(biases.values) > _MAX_BIASES:
        raise fields.error("logit_bias", f"must have at most {_MAX_BIASES} tokens")
    for key in biases.values:
        if not (key.isascii() and key.isdecimal() and len(key) <= len(str(_ID_LIMIT))):
            raise fields.error("logit_bias", f"must have token ids as keys, such as '50256', not {key[:60]!r}")
    return tuple(
        (int(key), biases.number(key, math.nan, -_MAX_BIAS, _MAX_BIAS)) for key in biases.values if biases.has(key)
    )
