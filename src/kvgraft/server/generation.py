"""Run the choices of one HTTP request side by side."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from kvgraft.engine.document_names import DocumentLabel
from kvgraft.errors import about

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from kvgraft.engine.async_llm import AsyncLLM
    from kvgraft.engine.request import Request, StreamPart
    from kvgraft.engine.request_builder import Prompt
    from kvgraft.server.options import Options
    from kvgraft.server.sessions import SessionFields

_SEED_RANGE = 2**63


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
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
    engine: AsyncLLM,
    prompts: Sequence[str | list[int]],
    options: Options,
    answer_id: str,
    *,
    add_special_tokens: bool = True,
    session: SessionFields | None = None,
    documents: Sequence[DocumentLabel] = (),
) -> list[Choice]:
    """Tokenise and check every prompt, `n` choices each; raises `ConfigError` for one that cannot be computed."""
    turn = {} if session is None else asdict(session)
    choices: list[Choice] = []
    for prompt_index, prompt in enumerate(prompts):
        source: Prompt = prompt
        if options.truncation is not None:
            with about("prompt"):
                token_ids = await engine.tokenize(prompt, add_special_tokens=add_special_tokens)
            source = options.truncation.cut(token_ids, engine.max_model_len - 1)
        for _ in range(options.n):
            index = len(choices)
            sampling = options.sampling
            if sampling.seed is not None:
                sampling = replace(sampling, seed=(sampling.seed + index) % _SEED_RANGE if index else sampling.seed)
            request = await engine.prepare(
                source,
                sampling,
                options.reuse,
                cache_salt=options.cache_salt,
                selection=options.selection,
                correction=options.correction,
                priority=options.priority,
                provisional=options.provisional,
                request_id=f"{answer_id}-{index}",
                add_special_tokens=add_special_tokens,
                documents=documents,
                **turn,
            )
            source = request.token_ids  # further choices need no tokeniser
            documents = [DocumentLabel(part.document_id, part.start, part.stop) for part in request.documents]
            choices.append(Choice(index, prompt_index, request))
    return choices


async def run_choices(engine: AsyncLLM, choices: Sequence[Choice]) -> AsyncGenerator[tuple[Choice, StreamPart]]:
    """Yield parts as they come. Closing the generator, or an error of one choice, cancels all of them."""
    if len(choices) == 1:
        async with aclosing(engine.stream(choices[0].request)) as parts:
            async for part in parts:
                yield choices[0], part
        return
    queue: asyncio.Queue[tuple[Choice, StreamPart] | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(engine, choice, queue)) for choice in choices]
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
    engine: AsyncLLM, choice: Choice, queue: asyncio.Queue[tuple[Choice, StreamPart] | Exception | None]
) -> None:
    try:
        async with aclosing(engine.stream(choice.request)) as parts:
            async for part in parts:
                queue.put_nowait((choice, part))
    except Exception as error:  # noqa: BLE001 - raised again where the choices come together
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)
