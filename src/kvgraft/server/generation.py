"""Run the choices of one HTTP request side by side."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvgraft.engine.requests.document_names import DocumentLabel
from kvgraft.errors import about

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from kvgraft.engine.async_llm import AsyncLLM
    from kvgraft.engine.requests.request import Request, StreamPart
    from kvgraft.engine.requests.request_builder import Prompt
    from kvgraft.engine.sampling.sampling_params import SamplingParams
    from kvgraft.server.options import AnswerOptions

_SEED_RANGE = 2**63


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceRequest:
    """One answer that is being generated.

    Attributes:
        index: Its place in the response.
        prompt_index: Which prompt it answers.
        request: The engine's request.
    """

    index: int
    prompt_index: int
    request: Request


async def prepare_choices(
    engine: AsyncLLM, prompts: Sequence[str | list[int]], options: AnswerOptions, answer_id: str
) -> list[ChoiceRequest]:
    """Tokenise and check every prompt, `n` choices each; raises `ConfigError` for one that cannot be computed."""
    choices: list[ChoiceRequest] = []
    asked = options.request
    for prompt_index, prompt in enumerate(prompts):
        source: Prompt = prompt
        if options.truncation is not None:
            with about("prompt"):
                if isinstance(prompt, str):  # all of it is tokenised, however little is kept
                    await engine.check_length(prompt)
                token_ids = await engine.tokenize(prompt, add_special_tokens=asked.add_special_tokens)
            source = options.truncation.cut(token_ids, engine.max_model_len - 1)
        for _ in range(options.n):
            index = len(choices)
            of_choice = replace(asked, sampling=_of_choice(options.sampling, index), request_id=f"{answer_id}-{index}")
            request = await engine.build(source, of_choice)
            source = request.token_ids  # further choices need no tokeniser
            labels = [DocumentLabel(part.document_id, part.start, part.stop) for part in request.documents]
            asked = replace(asked, documents=labels)
            choices.append(ChoiceRequest(index, prompt_index, request))
    return choices


def _of_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return how choice `index` is sampled: seeds count on from the first's."""
    if sampling.seed is None or not index:
        return sampling
    return replace(sampling, seed=(sampling.seed + index) % _SEED_RANGE)


async def run_choices(
    engine: AsyncLLM,
    choices: Sequence[ChoiceRequest],
    admitted: Callable[[], None] | None = None,
    *,
    share_prompts: bool = False,
) -> AsyncGenerator[tuple[ChoiceRequest, StreamPart]]:
    """Yield parts as they come. Closing the generator, or an error of one choice, cancels all of them.

    Args:
        engine: Computes them.
        choices: Of one request.
        admitted: Called once the engine has accepted all that begin at once.
        share_prompts: Further choices of a prompt begin when the first has computed it: they find it in the cache.
    """
    computed = {choice.prompt_index: asyncio.Event() for choice in choices}
    first = {choice.prompt_index: choice for choice in reversed(choices)}
    waits = [share_prompts and choice is not first[choice.prompt_index] for choice in choices]
    num_left = waits.count(False)

    def one_admitted() -> None:
        nonlocal num_left
        num_left -= 1
        if not num_left and admitted is not None:
            admitted()

    if len(choices) == 1:
        async with aclosing(engine.stream(choices[0].request, one_admitted)) as parts:
            async for part in parts:
                yield choices[0], part
        return
    queue: asyncio.Queue[tuple[ChoiceRequest, StreamPart] | Exception | None] = asyncio.Queue()
    tasks = [
        asyncio.create_task(
            _pump(engine, choice, queue, None if is_late else one_admitted, computed[choice.prompt_index])
        )
        for choice, is_late in zip(choices, waits, strict=True)
    ]
    try:
        open_choices = len(tasks)
        while open_choices:
            item = await queue.get()
            if item is None:
                open_choices -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    engine: AsyncLLM,
    choice: ChoiceRequest,
    queue: asyncio.Queue[tuple[ChoiceRequest, StreamPart] | Exception | None],
    admitted: Callable[[], None] | None,
    computed: asyncio.Event,
) -> None:
    """Pass the parts of a choice on; without `admitted` it begins when its prompt is computed."""
    try:
        if admitted is None:
            await computed.wait()
        async with aclosing(engine.stream(choice.request, admitted)) as parts:
            async for part in parts:
                computed.set()
                queue.put_nowait((choice, part))
    except Exception as error:  # noqa: BLE001 - raised again where the choices come together
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)
