"""Prompts as a chat sees them: the text as a user's message, in the words of the model's own template."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import ConfigError, one_line

if TYPE_CHECKING:
    from kvgraft.engine import LLM
    from kvgraft.types import TokenArray


def has_chat_template(llm: LLM) -> bool:
    """Return whether the model was made for conversations."""
    return bool(getattr(llm.loaded.tokenizer, "chat_template", None))


def user_message(llm: LLM, text: str) -> TokenArray:
    """Return the tokens of a conversation in which a user says `text` and the assistant speaks next.

    Raises:
        ConfigError: The model has no chat template, or it refuses the text.
    """
    tokenizer = llm.loaded.tokenizer
    if tokenizer is None or not has_chat_template(llm):
        raise ConfigError(f"model {llm.loaded.name} has no chat template; give its prompts as they are")
    try:
        turns = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs of the model's author and fail in any way
        raise ConfigError(f"the model's chat template refuses a prompt: {one_line(error)}") from error
    return np.asarray(tokenizer(str(prompt), add_special_tokens=False)["input_ids"], np.int64)
