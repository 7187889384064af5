"""Try a tokenizer once before a request needs it: one that is broken fails at the start and not with the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.errors import ModelError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE_TEXT = "Grüße aus 東京: naïve café, ½ µm 🙂\n"
"""Of one, two, three and four bytes a character."""


def probe_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> str:
    """Encode and decode `PROBE_TEXT`; returns the result in a few words.

    Args:
        name: What the user called the model.
        tokenizer: Its tokenizer.
        vocab_size: Token ids that the model knows.

    Raises:
        ModelError: It cannot do either, gives no tokens, or tokens that the model does not know.
    """
    remedy = "fetch its files again, or remove them to serve token ids"
    try:
        token_ids = [int(token_id) for token_id in tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]]
        text = str(tokenizer.decode(token_ids))
    except Exception as error:
        raise ModelError(f"the tokenizer of model {name} cannot encode a text: {one_line(error)}; {remedy}") from error
    if not token_ids or min(token_ids) < 0 or max(token_ids) >= vocab_size:
        found = f"token {max(token_ids)}" if token_ids else "no token"
        raise ModelError(
            f"the tokenizer of model {name} gives {found} for a text, and the model knows {vocab_size:,}; {remedy}"
        )
    changed = "" if text.strip() == PROBE_TEXT.strip() else ", which decode to another text"
    return f"{len(PROBE_TEXT)} characters are {len(token_ids)} tokens{changed}"
