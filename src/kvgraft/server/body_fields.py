"""The fields that bodies can have, one row each.

A field that is implemented gets a `_read` row in place of its `_refused` one; `check_fields` lets it pass then, and the
endpoint has to read it. A new endpoint is a member of `Endpoint`, and of `SHOWN` when it is served. Tests compare with
the parameters of OpenAI's client and of vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Endpoint(StrEnum):
    """An endpoint that takes a body."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    SESSIONS = "sessions"


class Handling(StrEnum):
    """Treatment of a field."""

    READ = "read"
    REFUSED = "refused"
    LEFT_OUT = "left out"
    IGNORED = "ignored"


@dataclass(frozen=True, slots=True)
class BodyField:
    """A field of one or several endpoints.

    Attributes:
        name: As bodies spell it.
        endpoints: Endpoints that have it.
        handling: Whether it is read, refused, left out or ignored.
        text: What it does; what to do instead; why it changes nothing. In Markdown for the page, without a full stop.
        default: Of a field that is read, as the page shows it.
        nothing: Values of a field that is refused or left out that ask for nothing, and pass.
    """

    name: str
    endpoints: frozenset[Endpoint]
    handling: Handling
    text: str
    default: str = ""
    nothing: tuple[object, ...] = ()

    def asks_for_nothing(self, value: object) -> bool:
        """Return whether `value` is one that passes; true is not 1 here."""
        return any(value == passes and isinstance(value, bool) == isinstance(passes, bool) for passes in self.nothing)


_C, _H, _R = Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.RESPONSES
_M = Endpoint.MESSAGES
_T, _D, _S = Endpoint.TOKENIZE, Endpoint.DETOKENIZE, Endpoint.SESSIONS
_GENERATE = (_C, _H, _R)
_LEAVE = "leave it out"

SHOWN = frozenset({_C, _H, _R, _M, _T, _D, _S})
"""Endpoints that the server has."""
RETURN_TOKEN_IDS = "return_token_ids"
"""Bodies of responses and messages have it where their tokens are counted."""


def _read(name: str, endpoints: tuple[Endpoint, ...], text: str, default: str = "none") -> BodyField:
    return BodyField(name, frozenset(endpoints), Handling.READ, text, default)


def _refused(name: str, endpoints: tuple[Endpoint, ...], *nothing: object, instead: str = _LEAVE) -> BodyField:
    return BodyField(name, frozenset(endpoints), Handling.REFUSED, instead, nothing=nothing)


def _left_out(name: str, endpoints: tuple[Endpoint, ...], *nothing: object, instead: str) -> BodyField:
    return BodyField(name, frozenset(endpoints), Handling.LEFT_OUT, instead, nothing=nothing)


def _ignored(name: str, endpoints: tuple[Endpoint, ...], because: str) -> BodyField:
    return BodyField(name, frozenset(endpoints), Handling.IGNORED, because)


_INPUT = (
    _read("model", tuple(Endpoint), "another name is 404", "the served one"),
    _read("prompt", (_C, _T), "a string, token ids, or (completions) a list of those", "must be there"),
    _read("tokens", (_D,), "token ids", "must be there"),
    _read("messages", (_H, _M, _T), "the conversation; of tokenize in place of `prompt`", "must be there"),
    _read("system", (_M,), "what the system says before the messages"),
    _read("tools", (_H, _R, _M, _T), "functions that are shown to the model"),
    _read("input", (_R,), "a text or a list of items", "must be there"),
    _read("instructions", (_R,), "what the system says before the input"),
    _read(
        "add_special_tokens",
        (_C, _H, _T),
        "the tokenizer puts its own around a text, such as a begin-of-text token",
        "true; chat: false, templates write them",
    ),
    _refused("suffix", (_C,), "", instead="put the text into the prompt, in the form that the model was trained for"),
    _refused("prompt_embeds", (_C,), instead="give the prompt as text or token ids"),
    _read(
        "truncate_prompt_tokens",
        (_C, _H),
        "keep so many tokens of each prompt, -1: as many as fit; without sessions, `echo` and names of documents",
        "all",
    ),
    _ignored("cache_prompt", (_C, _H), "what was read is kept in any case; `kvgraft.reuse` says what is used of it"),
    _refused("typical_p", (_C, _H), 1, 1.0),
    _refused("mirostat", (_C, _H), 0),
    _read(
        "truncation_side",
        (_C, _H),
        "`left` keeps the end of a prompt that is cut, `right` its beginning",
        '`"left"`',
    ),
    _refused("truncation", (_R,), "disabled", instead="cut the input"),
    _read("documents", (_H, _T), "texts for templates that read them; others refuse them"),
    _refused("chat_template", (_H, _T), instead="give the rendered conversation to `/v1/completions`"),
    _read(
        "chat_template_kwargs",
        (_H, _R, _T),
        "what its template reads besides: [how](../server.md#chat-templates)",
        "`{}`",
    ),
    _read("add_generation_prompt", (_H, _T), "the prompt ends where the assistant begins to speak", "true"),
    _read("continue_final_message", (_H, _T), "the answer goes on with the last message", "false"),
    _read("reasoning_effort", (_H, _T), "given to templates that read it; for others it is left out"),
    _read("reasoning", (_R,), "`effort` is given to templates that read `reasoning_effort`; the rest is left out"),
    _left_out("reasoning", (_H,), {}, instead="use `reasoning_effort`"),
    _left_out("thinking", (_H, _M), {"type": "disabled"}, instead="use `chat_template_kwargs` of chats"),
    _read("output_config", (_M,), "`format`: the schema of the answer; `effort` as `reasoning_effort` of chats"),
    _refused("output_format", (_M,), instead="use `output_config.format`"),
    _refused("audio", (_H,), {}),
    _refused("modalities", (_H,), ["text"], instead="answers are text"),
    _refused("image", (_R,)),
    _left_out("web_search_options", (_H,), instead="give what was found as a message"),
    _refused("functions", (_H,), [], instead="use `tools`"),
    _refused("function_call", (_H,), "none", "auto", instead="use `tool_choice`"),
    _read("tool_choice", (_H, _R, _M, _T), "whether tools are called, and which: [how](../server.md#tools)", "auto"),
    _read("parallel_tool_calls", (_H, _R), "false allows one call at most", "true"),
    _left_out("max_tool_calls", (_R,), instead="it counts calls of tools that a server runs, of which there are none"),
    _refused("previous_response_id", (_R,), instead="responses are not stored; send the whole conversation as `input`"),
    _refused("conversation", (_R,), instead="conversations are not stored; send the whole one as `input`"),
    _refused("prompt", (_R,), instead="prompts are not stored; send the text as `input`"),
    _refused("previous_input_messages", (_R,), instead="send the whole conversation as `input`"),
    _left_out("context_management", (_R, _M), [], instead="shorten the input"),
    _left_out("container", (_M,), instead="the server runs no tools of its own"),
    _left_out("mcp_servers", (_M,), [], instead="the server runs no tools of its own"),
    _refused("access_programs", (_R,)),
    _ignored("media_io_kwargs", (_H, _R, _T), "there are no media"),
    _ignored("mm_processor_kwargs", (_H, _R, _T), "there are no media"),
    _ignored("mm_payload", _GENERATE, "there are no media"),
    _ignored("return_mm_kwargs", _GENERATE, "there are no media"),
)

_SAMPLING = (
    _read(
        "max_tokens", (_C, _H, _M), "cut to what fits after the prompt; -1: as many as fit", "16; chat, messages: 2048"
    ),
    _read("n_predict", (_C, _H), "llama.cpp's name of `max_tokens`"),
    _read("max_completion_tokens", (_H,), "the newer name of `max_tokens`; both must be equal"),
    _read("max_output_tokens", (_R,), "cut to what fits after the input", "as many as fit"),
    _read("temperature", (*_GENERATE, _M), "0 to 2; below 0.001 is greedy", "1.0"),
    _read("top_p", (*_GENERATE, _M), "above 0, at most 1", "1.0"),
    _read("top_k", (*_GENERATE, _M), "not in OpenAI's API", "0 (all)"),
    _read("seed", _GENERATE, "choice i of a request draws with `seed + i`"),
    _read("n", (_C, _H), "prompts times `n` is at most 128", "1"),
    _read("stop_sequences", (_M,), "up to 16 texts of up to 256 characters; the answer names the one that ended it"),
    _read("stop", _GENERATE, "up to 16 texts of up to 256 characters"),
    _read("ignore_eos", _GENERATE, "go on after the end-of-text token; not in OpenAI's API", "false"),
    _read("presence_penalty", _GENERATE, "-2 to 2: subtracted from logits of tokens that the output has", "0"),
    _read("frequency_penalty", _GENERATE, "-2 to 2: subtracted as often as the output has the token", "0"),
    _read("repetition_penalty", _GENERATE, "above 0: divides logits of tokens that prompt or output have", "1"),
    _read("repeat_penalty", (_C, _H), "llama.cpp's name of `repetition_penalty`"),
    _read("logit_bias", _GENERATE, "object of token ids: what is added to their logits, -100 to 100"),
    _read("min_p", _GENERATE, "0 to 1: draw from tokens that are this times as likely as the likeliest", "0"),
    _read("min_tokens", _GENERATE, "draw neither end-of-text tokens nor `stop_token_ids` before so many tokens", "0"),
    _read("stop_token_ids", _GENERATE, "tokens that end the answer, also with `ignore_eos`"),
    _read("allowed_token_ids", _GENERATE, "draw no others", "all"),
    _read("bad_words", _GENERATE, "texts that must not come about, as the tokenizer cuts them into tokens"),
    _read("include_stop_str_in_output", _GENERATE, "leave the stop text that ended the answer in it", "false"),
    _read("skip_special_tokens", _GENERATE, "leave special tokens out of the text", "true"),
    _refused("spaces_between_special_tokens", _GENERATE, True),
    _read("best_of", (_C,), "equal to `n`, if it is there: choices are not ranked", "`n`"),
    _refused("best_of", (_H,), 1, instead="ask for `n` choices, and take the best"),
    _refused("use_beam_search", (_C, _H), False),
    _refused("length_penalty", (_C, _H), 1, instead="there is no beam search"),
    _refused("watermarking", _GENERATE, False),
    _refused("repetition_detection", (_C, _H)),
    _refused("thinking_token_budget", (_C, _H), -1, instead="use `max_tokens`"),
    _refused("logits_processors", (_C, _H), []),
    _refused("vllm_xargs", _GENERATE, {}),
    _read(
        "response_format", (_C, _H), "[what the answer has to be](../server.md#structured-output)", '`{"type": "text"}`'
    ),
    _read(
        "structured_outputs",
        (_C, _H),
        "[the same, as vLLM says it](../server.md#structured-output); not in OpenAI's API",
    ),
    _refused("structured_outputs", (_R,), instead="say it in `text.format`"),
    _refused("guided_json", (_C, _H), instead='use `structured_outputs`: `{"json": ...}`'),
    _refused("guided_regex", (_C, _H), instead='use `structured_outputs`: `{"regex": ...}`'),
    _refused("guided_choice", (_C, _H), instead='use `structured_outputs`: `{"choice": ...}`'),
    _refused("guided_grammar", (_C, _H), instead='use `structured_outputs`: `{"grammar": ...}`'),
    _refused("guided_decoding_backend", (_C, _H), instead="there is one"),
    _refused("guided_whitespace_pattern", (_C, _H), instead="whitespace is bounded already"),
    _refused("structural_tag", (_C, _H), instead="use `tools`"),
    _read("text", (_R,), "`format` says what the text has to be", '`{"format": {"type": "text"}}`'),
    _left_out("verbosity", (_H,), "medium", instead="ask for it in a message"),
    _left_out("prediction", (_H,), instead="nothing is gained by it here"),
    _refused("moderation", (_H, _R), instead="ask a moderation service"),
)

_ANSWER = (
    _read("stream", (*_GENERATE, _M), "answer in server-sent events", "false"),
    _read(
        "stream_options",
        (_C, _H),
        "`include_usage`: a last chunk carries `usage`; `continuous_usage_stats`: each chunk that of all tokens so far",
    ),
    _read("logprobs", (_C, _H), "up to 20; chat: true, with `top_logprobs`"),
    _read("top_logprobs", (_H,), "0 to 20", "0"),
    _read(
        "echo",
        (_C,),
        "the answer begins with the prompt, and `logprobs` with those of its tokens; `max_tokens` may be 0",
        "false",
    ),
    _refused("echo", (_H,), False, instead="put the last message of the request before the answer"),
    _read(
        "prompt_logprobs",
        (_C, _H),
        "0 to 20: as many likely tokens for each of the prompt, which is computed in full for it",
    ),
    _refused("prompt_logprobs", (_R,)),
    _refused("logprob_token_ids", (_C, _H), []),
    _read(RETURN_TOKEN_IDS, (_C, _H), "`token_ids` in choices and chunks, and `prompt_token_ids`", "false"),
    _refused(
        RETURN_TOKEN_IDS, (_R, _M), False, instead="ask `/v1/responses/input_tokens` or `/v1/messages/count_tokens`"
    ),
    _read("return_tokens_as_token_ids", (_C, _H), "log-probabilities name tokens `token_id:N`", "false"),
    _refused("return_token_offsets", (_C, _H), False),
    _read("return_token_strs", (_T,), "texts of the single tokens, too", "false"),
    _refused("return_prompt_text", (_H,), False),
    _refused("include_reasoning", (_H, _R), True, instead="reasoning is part of the text; cut it out there"),
    _refused("top_logprobs", (_R,), 0),
    _left_out("include", (_R,), [], ["reasoning.encrypted_content"], instead="responses have what they have"),
    _left_out("stream_options", (_R,), {}, {"include_obfuscation": False}, instead="there is no padding"),
    _refused("enable_response_messages", (_R,), False),
    _refused("routed_experts_prompt_start", (_C, _H), 0),
    _refused("return_weight_versions", (_C, _H), False),
    _refused("background", (_R,), False, instead="wait for the answer, or stream it"),
    _refused(
        "background_options", (_R,), {}, {"completion_window": "soonest"}, instead="wait for the answer, or stream it"
    ),
    _ignored("stream_interval", (_C, _H), "how a stream is cut into chunks is not part of the answer"),
)

_SERVING = (
    _read("cache_salt", (*_GENERATE, _M, _S), "K/V are shared only among requests of the same salt"),
    _read(
        "session_id",
        (_C, _H),
        "the session that it is a turn of ([sessions](../server.md#sessions)); one prompt, `n` of 1",
    ),
    _refused("session_id", (_R,), instead="sessions are for `/v1/completions` and `/v1/chat/completions`"),
    _read(
        "priority",
        (*_GENERATE, _M),
        "with `eviction_policy: priority`, prefixes of higher ones stay longer in the cache; orders no requests",
        "0",
    ),
    _read("kvgraft", (*_GENERATE, _M), "what may be reused for this request: [how](../server.md#options-of-kvgraft)"),
    _read("id", (_S,), "1 to 128 letters, digits and `._:-`", "made up"),
    _read("ttl_s", (_S,), "seconds without a turn after which it is closed", "`session_ttl_s`"),
    _refused(
        "kv_transfer_params",
        _GENERATE,
        instead="servers share K/V by the setting `store`; completions and chat take `kvgraft` and `kvgraft_repair` in it",
    ),
    _refused("ec_transfer_params", _GENERATE),
    _ignored("store", _GENERATE, "answers are not kept in any case"),
    _ignored("metadata", (*_GENERATE, _M), "it describes the request to its sender"),
    _ignored("client_metadata", (_R,), "it describes the client to its sender"),
    _ignored("user", _GENERATE, "it says who asks; tenants are kept apart by `cache_salt`"),
    _ignored("safety_identifier", _GENERATE, "it says who asks"),
    _ignored("service_tier", (*_GENERATE, _M), "there is one tier"),
    _ignored("prompt_cache_key", _GENERATE, "it says where to look for cached text; this server looks everywhere"),
    _ignored("prompt_cache_retention", _GENERATE, "it says how long to keep cached text"),
    _ignored("prompt_cache_options", _GENERATE, "they say which cached text to keep, and how long"),
    _ignored("speed", (_M,), "there is one tier"),
    _ignored("inference_geo", (_M,), "answers are computed here"),
    _ignored("cache_control", (_M,), "it says which cached text to keep, and how long"),
    _ignored("diagnostics", (_M,), "reports say what was reused"),
    _ignored("anthropic_beta", (_M,), "it names forms that are not known here"),
    _ignored("anthropic_version", (_M,), "there is one"),
    _ignored("user_profile_id", (_M,), "it says who asks"),
    _ignored("workspace_id", (_M,), "it says who asks"),
    _ignored("request_id", _GENERATE, "send the header `X-Request-Id`, which logs and responses carry"),
)

BODY_FIELDS: tuple[BodyField, ...] = (*_INPUT, *_SAMPLING, *_ANSWER, *_SERVING)
"""All rows; a name stands once for an endpoint."""
