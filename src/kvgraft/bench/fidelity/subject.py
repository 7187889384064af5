"""The model under measurement: prompts in its own words, and what its answers say."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.bench.chat import has_chat_template, user_message
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.engine import LLM
    from kvgraft.types import TokenArray

_LONGEST_GOLD = 64
"""Tokens of a right answer that are scored; longer ones are essays, of which the first sentences say enough."""


ROOM_TOKENS = 64
"""Free tokens after a prompt: the greedy continuation, or a right answer."""


def stock_attention(llm: LLM) -> str:
    """Return transformers' own attention for references: the fused one where the model has it."""
    return "sdpa" if getattr(llm.adapter.model, "_supports_sdpa", False) else "eager"


class Subject:
    """Tokenises prompts, through the chat template where the model has one, and reads answers.

    Args:
        llm: Must have a tokenizer.
        max_prompt_tokens: Longer prompts do not fit.

    Raises:
        ConfigError: The model has no tokenizer, or no room for prompts.
    """

    def __init__(self, llm: LLM, max_prompt_tokens: int) -> None:
        if llm.loaded.tokenizer is None:
            raise ConfigError(
                f"model {llm.loaded.name} has no tokenizer, and suites are text; choose a model that has one"
            )
        self._llm = llm
        self._tokenizer = llm.loaded.tokenizer
        self._chat = has_chat_template(llm)
        space = llm.usage().total
        # Donors, the prompt and its continuations have to lie in the pool together.
        self.longest = min(max_prompt_tokens, llm.max_model_len - ROOM_TOKENS, space // 3 - ROOM_TOKENS)
        if self.longest < 1:
            raise ConfigError(f"{space} KV slots leave no room for prompts; raise --num-slots")
        self.encode = lru_cache(maxsize=4096)(self._encode)

    def fits(self, prompt: str) -> bool:
        """Return whether a prompt is not too long."""
        return len(self.encode(prompt)) <= self.longest

    def gold(self, answers: Sequence[str]) -> TokenArray:
        """Return token ids of the first right answer as it would follow the prompt; none where there is no answer."""
        if not answers:
            return np.empty(0, np.int64)
        text = answers[0] if self._chat else " " + answers[0]
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.asarray(ids[:_LONGEST_GOLD], np.int64)

    def answer_len(self, token_ids: Sequence[int]) -> int:
        """Count tokens up to and with the first that ends an answer; all where none does."""
        ends = [number for number, token in enumerate(token_ids) if int(token) in self._llm.eos_token_ids]
        return ends[0] + 1 if ends else len(token_ids)

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode the answer in `token_ids`, up to its end."""
        cut = [int(token) for token in token_ids[: self.answer_len(token_ids)]]
        return str(self._tokenizer.decode(cut, skip_special_tokens=True)).strip()

    def _encode(self, prompt: str) -> TokenArray:
        return user_message(self._llm, prompt) if self._chat else self._llm.tokenize(prompt)
