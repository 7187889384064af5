"""A server's record of one HTTP request for an answer; the engine's records have the rest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerAsked:
    """The request to the engine, known once all prompts were checked.

    Attributes:
        answer_id: Of the response.
        choices: Ids of the engine's requests, each with the number of the prompt that it answers.
        reuse: What may be reused.
        max_tokens: Tokens that a choice may have.
        temperature: Of its sampling.
        top_p: Of its sampling.
        stream: Whether the answer is streamed.
        has_output: Whether the answer holds the generated tokens; False where only the prompt is scored.
    """

    answer_id: str
    choices: tuple[tuple[str, int], ...]
    reuse: str
    max_tokens: int
    temperature: float
    top_p: float
    stream: bool
    has_output: bool = True


@dataclass(frozen=True, slots=True)
class Exchange:
    """One HTTP request that has ended, however it did. Moments are `time.perf_counter()`.

    Attributes:
        request_id: Value of `x-request-id`.
        method: Of HTTP.
        route: Such as `/v1/completions`; never a path that a client made up.
        status: Of the response; None if the client left before its end.
        error: What kind of error ended it, None for none; a fixed word or the name of a class, never a message.
        started: Its head had been read.
        ended: Its response had been sent.
        traceparent: Header of that name; empty for none.
        tracestate: Header of that name; empty for none.
        asked: None if it was refused before the engine was asked.
    """

    request_id: str
    method: str
    route: str
    status: int | None
    error: str | None
    started: float
    ended: float
    traceparent: str = ""
    tracestate: str = ""
    asked: AnswerAsked | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it ended in an error that is the server's: not the client's, and not that the client left."""
        is_refusal = self.status is not None and 400 <= self.status < 500
        return self.error is not None and self.status is not None and not is_refusal
