"""Whether workers make of bodies what the router makes of them: asked when a worker begins to answer.

Engines have `/tokenize` (vLLM's form; SGLang and `kvgraft serve` take it, too), `/v1/messages/count_tokens` and, here,
`/v1/responses/input_tokens`. A handful of bodies is sent there, a kind each. Tokens are compared; of engines that count
alone, as vLLM's do at these two paths, how many there are. The router renders as most of the workers do; what some worker
renders otherwise is not read, for its score would be that of another prompt.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.literal_text import shield_of
from kvgraft.router.prompts import (
    CHAT_PATH,
    COMPLETION_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    BodyKind,
    EngineRendering,
    UnreadPromptError,
)
from kvgraft.server.body_fields import RETURN_TOKEN_IDS
from kvgraft.server.rendering import TEMPLATE_ALONE, Rendering

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kvgraft.router.metrics import RouterMetrics
    from kvgraft.router.prompts import PromptReader

    Ask = Callable[[str, dict[str, object]], Awaitable[tuple[int, str]]]

logger = logging.getLogger(__name__)

RENDERINGS = tuple(
    Rendering(parser, special_tokens_are_text=is_text)
    for parser in ("auto", TEMPLATE_ALONE)
    for is_text in (True, False)
)
"""What engines do by default or by a setting; the first is what `kvgraft serve` does."""
TOKENIZE_PATH = "/tokenize"
_COUNTED = {MESSAGES_PATH: "/v1/messages/count_tokens", RESPONSES_PATH: "/v1/responses/input_tokens"}
"""Where a worker says how many tokens it makes of a body, and ours which, if they are asked."""
_OK, _MOST_SPECIAL = 200, 3

Made = tuple[int, ...] | int | None
"""Tokens of a probe, or how many there are, if that is all that is said; None if nothing is made of it."""
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_FUNCTION = {"name": "weather_of", "description": "Tell the weather.", "parameters": _PARAMETERS}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_CALL = {"id": "probe0001", "type": "function", "function": {"name": "weather_of", "arguments": '{"city": "Rome"}'}}
_USE = {"id": "probe0001", "name": "weather_of", "input": {"city": "Rome"}}
_TEXT = {"type": "text", "text": "Two."}
_PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
_QUESTION: dict[str, object] = {"role": "user", "content": "What is this?\n\n  Größe 世界"}


@dataclass(frozen=True, slots=True)
class ProbeBody:
    """A body that workers are asked about.

    Attributes:
        kind: What it stands for.
        path: Whose body it is.
        body: The body.
    """

    kind: BodyKind
    path: str
    body: dict[str, object]

    @property
    def asked_at(self) -> str:
        """Return the path where workers say what they make of it."""
        return _COUNTED.get(self.path, TOKENIZE_PATH)

    def asked_of(self, model: str) -> dict[str, object]:
        """Return what is sent there; `model` is the name that a worker serves, or empty."""
        named: dict[str, object] = {"model": model} if model else {}
        return self.body | named | ({RETURN_TOKEN_IDS: True} if self.path in _COUNTED else {})

    def said(self, answer: str) -> Made:
        """Return what a worker says, or None if that is not to be understood."""
        try:
            read = json.loads(answer)
            tokens = read.get("prompt_token_ids") if self.path in _COUNTED else read["tokens"]
            return int(read["input_tokens"]) if tokens is None else tuple(int(token) for token in tokens)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


def probes(special_tokens: Sequence[str] = ()) -> tuple[ProbeBody, ...]:
    """Return the bodies; `special_tokens` are some of the model's."""
    text, history = _QUESTION["content"], [{"role": "assistant", "content": "A question."}, _QUESTION]
    system: dict[str, object] = {"role": "system", "content": "Be brief."}
    spelled = {"role": "user", "content": f"Is {' or '.join(special_tokens)} a token?"}
    parts = {"role": "user", "content": [{"type": "text", "text": "One."}, _TEXT]}
    called = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    result = {"role": "tool", "tool_call_id": _CALL["id"], "content": "Rain."}
    used = {"role": "assistant", "content": [{"type": "tool_use", **_USE}]}
    found = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": _USE["id"], "content": "Rain."}, _TEXT]}
    chats: list[tuple[BodyKind, dict[str, object]]] = [
        (BodyKind.CHAT, {"messages": [system, _QUESTION]}),
        (BodyKind.CHAT, {"messages": [_QUESTION, *history]}),
        (BodyKind.TOOLS, {"messages": [system, _QUESTION], "tools": _TOOLS}),
        (BodyKind.CALLS, {"messages": [_QUESTION, called, result]}),
        (BodyKind.PARTS, {"messages": [parts]}),
        (BodyKind.MEDIA, {"messages": [_QUESTION, called, result | {"content": [_PICTURE]}]}),
        (
            BodyKind.OPEN,
            {"messages": [_QUESTION, history[0]], "add_generation_prompt": False, "continue_final_message": True},
        ),
    ]
    if special_tokens:
        chats.append((BodyKind.SPECIAL_TOKENS, {"messages": [spelled]}))
    return (
        ProbeBody(BodyKind.COMPLETION, COMPLETION_PATH, {"prompt": text}),
        ProbeBody(BodyKind.COMPLETION, COMPLETION_PATH, {"prompt": text, "add_special_tokens": False}),
        *(ProbeBody(kind, CHAT_PATH, body) for kind, body in chats),
        ProbeBody(BodyKind.MESSAGE, MESSAGES_PATH, {"system": "Be brief.", "messages": [_QUESTION, *history]}),
        ProbeBody(BodyKind.MESSAGE, MESSAGES_PATH, {"messages": [_QUESTION, used, found]}),
        ProbeBody(BodyKind.RESPONSE, RESPONSES_PATH, {"instructions": "Be brief.", "input": [_QUESTION]}),
    )


@dataclass(frozen=True, slots=True)
class _Said:
    """What one worker says: what it makes of each probe, and how many tokens its model takes."""

    made: tuple[Made, ...]
    max_model_len: int | None

    @property
    def is_checked(self) -> bool:
        """Whether it says anything: engines behind a key do not."""
        return any(isinstance(made, tuple) for made in self.made)


_NOTHING_SAID = _Said((), None)


class Parity:
    """Compares the router with its workers, and says to the reader of prompts what comes of it. Lives on the event loop."""

    def __init__(self, reader: PromptReader, metrics: RouterMetrics) -> None:
        """Begin without an answer of any worker."""
        self._reader = reader
        self._metrics = metrics
        self._said: dict[str, _Said] = {}
        self._differing: set[tuple[str, BodyKind]] = set()
        self._probes: tuple[ProbeBody, ...] = ()
        self._made: dict[Rendering, tuple[tuple[int, ...] | None, ...]] = {}
        if reader.tokenizer is not None:
            self._probes = probes(shield_of(reader.tokenizer).names[:_MOST_SPECIAL])
            self._made = {each: tuple(self._of_probe(each, probe) for probe in self._probes) for each in RENDERINGS}

    async def check(self, worker: str, model: str, ask: Ask) -> None:
        """Ask a worker, and settle how prompts are read from now on.

        Args:
            worker: Its name.
            model: Name of the model that it serves; empty if it is not known.
            ask: Sends a body to one of its paths; returns status and body of the answer. What it raises is raised here,
                and nothing is known of the worker then.
        """
        if not self._probes:
            return
        answers: list[tuple[int, str]] = []
        try:
            for probe in self._probes:
                answers.append(await ask(probe.asked_at, probe.asked_of(model)))  # noqa: PERF401
        except BaseException:
            self._note(worker, _NOTHING_SAID)
            raise
        made = tuple(
            probe.said(answer) if status == _OK else None
            for probe, (status, answer) in zip(self._probes, answers, strict=True)
        )
        said = _Said(made, _max_model_len(answers[0][1]))
        if not said.is_checked:
            logger.warning(
                "worker %s does not say how it renders prompts, %s answers %d: those are not read that engines render in "
                "different ways",
                worker,
                TOKENIZE_PATH,
                answers[0][0],
            )
        self._note(worker, said if said.is_checked else _NOTHING_SAID)

    def _of_probe(self, rendering: Rendering, probe: ProbeBody) -> tuple[int, ...] | None:
        try:
            return tuple(self._reader.tokens(probe.path, probe.body, EngineRendering(rendering)).tolist())
        except UnreadPromptError:
            return None

    def _note(self, worker: str, said: _Said) -> None:
        """Choose the rendering that most workers have, and say which of them render which kinds otherwise."""
        self._said[worker] = said
        checked = {name: each for name, each in self._said.items() if each.is_checked}
        chosen = max(RENDERINGS, key=lambda each: sum(self._num_alike(each, said) for said in checked.values()))
        differing = {(name, kind) for name, each in checked.items() for kind in self._differ(chosen, each)}
        unlike = {kind for _, kind in differing}.union(*(self._unsaid(each) for each in self._said.values()))
        most = min((each.max_model_len for each in checked.values() if each.max_model_len), default=None)
        self._reader.engines = EngineRendering(chosen, frozenset(unlike), most)
        for name, kind in sorted(differing - self._differing):
            self._metrics.renders_otherwise(name, kind)
            logger.warning(
                "worker %s renders %s otherwise than the router, or refuses it: such requests go to the least loaded worker",
                name,
                kind.replace("_", " "),
            )
        self._differing = differing

    def _num_alike(self, rendering: Rendering, said: _Said) -> int:
        pairs = zip(self._made[rendering], said.made, strict=True)
        return sum(theirs is not None and _is_alike(ours, theirs) for ours, theirs in pairs)

    def _differ(self, rendering: Rendering, said: _Said) -> set[BodyKind]:
        """Return the kinds of which a worker makes something else; what it does not have is none."""
        pairs = zip(self._probes, self._made[rendering], said.made, strict=True)
        return {
            probe.kind for probe, ours, theirs in pairs if not (_is_alike(ours, theirs) or _is_absent(probe, theirs))
        }

    def _unsaid(self, said: _Said) -> set[BodyKind]:
        """Return the kinds that cannot be read because a worker does not say what it makes of them."""
        if said.is_checked:
            return {
                probe.kind for probe, theirs in zip(self._probes, said.made, strict=True) if _is_absent(probe, theirs)
            }
        each = zip(self._probes, *self._made.values(), strict=True)
        return {probe.kind for probe, *made in each if _is_absent(probe, None) or len(set(made)) > 1}


def _is_alike(ours: tuple[int, ...] | None, theirs: Made) -> bool:
    if isinstance(theirs, int):
        return ours is not None and len(ours) == theirs
    return ours == theirs


def _is_absent(probe: ProbeBody, theirs: Made) -> bool:
    """Return whether a worker has no such path, or serves nothing of that kind: both are usual, and no mismatch."""
    return theirs is None and (probe.path in _COUNTED or probe.kind is BodyKind.MEDIA)


def _max_model_len(answer: str) -> int | None:
    try:
        said = json.loads(answer).get("max_model_len")
    except (ValueError, AttributeError):
        return None
    return said if type(said) is int and said > 1 else None
