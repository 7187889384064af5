"""The words of a prompt, for those who ask to see them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraft.errors import ConfigError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.explain.requests import ExplainedRequest


class PromptText:
    """A prompt cut at tokens.

    Args:
        tokenizer: Of `tokenizers`.
        token_ids: The prompt's.
        prompt: Its text, where it is known: characters of several tokens are whole then.
        offsets: Where each token begins in `prompt`.
    """

    def __init__(self, tokenizer: Any, token_ids: Sequence[int], prompt: str = "", offsets: Sequence[int] = ()) -> None:  # noqa: ANN401
        self._tokenizer = tokenizer
        self._token_ids = list(token_ids)
        self._prompt = prompt
        self._offsets = [*offsets, len(prompt)]

    def between(self, start: int, stop: int) -> str:
        """Return the words of tokens `[start, stop)`."""
        if self._prompt:
            return self._prompt[self._offsets[start] : self._offsets[stop]]
        return str(self._tokenizer.decode(self._token_ids[start:stop], skip_special_tokens=False))


def prompt_text(request: ExplainedRequest, tokenizer: str, prompt: Path | None) -> PromptText:
    """Return the words of a request's prompt, out of its file, or of the token ids that its report has.

    Args:
        request: The request.
        tokenizer: Folder with a `tokenizer.json`, or that file.
        prompt: File with the prompt as the model read it, chat template applied.

    Raises:
        ConfigError: The file's text is not the request's, or a file cannot be read.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("showing text needs tokenizers: pip install 'kvgraft[torch]'", name="tokenizers") from error
    path = Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        known = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise ConfigError(
            f"{path} cannot be read as a tokenizer ({one_line(error)}); give a folder with a tokenizer.json"
        ) from error
    length = request.last.num_tokens
    if prompt is None:
        if request.prompt_token_ids is None:
            raise ConfigError("the report has no text; give the prompt as the model read it with --prompt")
        return PromptText(known, request.prompt_token_ids)
    try:
        text = prompt.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{prompt} cannot be read ({error})") from error
    for special in (True, False):
        encoded = known.encode(text, add_special_tokens=special)
        if len(encoded.ids) == length:
            return PromptText(known, encoded.ids, text, _starts(encoded.offsets))
    raise ConfigError(
        f"{prompt} has {len(encoded.ids):,} tokens and the request had {length:,}; give the prompt as the model read it, "
        "chat template applied, and the model's own tokenizer"
    )


def _starts(offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Return where each token begins; a token without text begins where the one before it ends."""
    starts, end = [], 0
    for start, stop in offsets:
        starts.append(start if stop > start else end)
        end = max(end, stop)
    return starts
