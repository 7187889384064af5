"""Providers for the semantic hook: an earlier prompt with K/V that may stand in for this one's, where users ask for it."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.errors import ConfigError
from kvgraft.semantic.decoder import decoder_of
from kvgraft.semantic.discovery import Discovery
from kvgraft.semantic.ready import content_digests
from kvgraft.semantic.registry import create_embedder
from kvgraft.substitution import SemanticPrefixProvider, SemanticPrefixResult

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvgraft.semantic.base import Decoder
    from kvgraft.semantic.discovery import DiscoveryCounters
    from kvgraft.types import TokenArray

THRESHOLD = 0.60
"""Least cosine of a donor, as SemBlend has it."""

_EVERYONE = None
"""The hook does not name the owner of a prompt, so all share one namespace here; the prefix cache keeps them apart."""

_CANDIDATES = 4
"""Nearest texts that are looked at: the first may be the prompt itself, cached for another request."""


class EmbeddingProvider(SemanticPrefixProvider):
    """Proposes the stored prompt with the nearest vector.

    Similar is not equal: a prompt that says the opposite is as near as one that says the same (docs/semantic.md). What an
    engine does with a proposal is never exact, is reported as substituted and is not stored.

    Isolation: the hook hands over tokens alone. A donor may therefore be another tenant's prompt; the prefix cache
    looks its tokens up under the asking request's own key and finds nothing of others there.

    Both calls take as long as hashing the prompt and a search; the embedding is a thread's. So without patience a prompt
    that was never asked for before gets an answer when it is asked for again, or from the vector of its first half.

    Thread-safe.
    """

    def __init__(
        self,
        embedder: str,
        *,
        threshold: float = THRESHOLD,
        capacity: int = 4_000,
        patience_s: float = 0.0,
        decode: Decoder | None = None,
    ) -> None:
        """Take the settings; the embedder is made by `on_init`, or by the first call if that gave nothing to decode with.

        Args:
            embedder: Name of a registered embedder, `NAME` or `NAME:PATH`.
            threshold: Least cosine of a donor.
            capacity: Most stored prompts to remember, 4 bytes per token and 4 per dimension each; the least recently used
                leaves.
            patience_s: Longest that a prompt waits for its vector, where its engine's deadline allows that.
            decode: Turns token ids into text; None to take it from what the engine hands to `on_init`.

        Raises:
            ConfigError: `threshold` is not in (0, 1], `capacity` is below 1 or `patience_s` below 0.
        """
        if not 0 < threshold <= 1:
            raise ConfigError(f"threshold must be above 0 and at most 1, not {threshold}")
        if capacity < 1:
            raise ConfigError(f"capacity must be at least 1, not {capacity}")
        if not 0 <= patience_s < math.inf:
            raise ConfigError(f"patience_s must be a number of seconds from 0 on, not {patience_s}")
        self._name, self._threshold, self._capacity, self._decode = embedder, threshold, capacity, decode
        self._patience_s = patience_s
        self._made: Discovery | None = None
        self._lock = threading.Lock()

    @property
    def counters(self) -> DiscoveryCounters:
        """Counters of texts and questions."""
        return self.discovery.counters

    @property
    def discovery(self) -> Discovery:
        """Embedder and search.

        Raises:
            ConfigError: The embedder cannot be made; names the remedy.
            ImportError: A package is missing; names it.
        """
        with self._lock:
            if self._made is None:
                self._made = Discovery(create_embedder(self._name, self._decode), capacity=self._capacity)
            return self._made

    def on_init(self, model_config: object = None) -> None:
        """Take the tokenizer from `model_config`, if the constructor was given none, and load the embedder.

        Without either the first prompt raises.

        Raises:
            ConfigError: The embedder cannot be made.
            ImportError: A package is missing.
        """
        if self._decode is None:
            self._decode = decoder_of(model_config)
        if self._decode is not None:
            _ = self.discovery

    def on_request_cached(self, rid: str, token_ids: TokenArray) -> None:
        """Remember a prompt by its content; it is embedded beside the requests."""
        del rid
        tokens = token_ids.astype(np.int32) if token_ids.max(initial=0) < 1 << 31 else token_ids.copy()
        key = content_digests(tokens).whole
        if self.discovery.text(_EVERYONE, key) is None:
            self.discovery.add(_EVERYONE, key, tokens)

    def on_prefix_miss(self, rid: str, token_ids: TokenArray) -> SemanticPrefixResult | None:
        """Propose the nearest stored prompt that is not this one; None if none is near enough or nothing is ready yet."""
        del rid
        found = self.discovery.ready(
            _EVERYONE,
            token_ids.copy(),
            k=_CANDIDATES,
            min_similarity=self._threshold,
            patience_s=self._patience_s,
        )
        for key, similarity in found or ():
            donor = self.discovery.text(_EVERYONE, key)
            if donor is not None and not _goes_on_from(donor, token_ids):
                return SemanticPrefixResult(
                    donor.tolist(),
                    num_cached_tokens=0,
                    metadata={"similarity": similarity, "embedder": self._name},
                    source_id=key.hex() if isinstance(key, bytes) else str(key),
                )
        return None

    def reset(self) -> None:
        """Forget all prompts."""
        self.discovery.reset()

    def on_shutdown(self) -> None:
        """End the thread."""
        with self._lock:
            if self._made is not None:
                self._made.close()


class MiniLMProvider(EmbeddingProvider):
    """By the meaning of the text: all-MiniLM-L6-v2 (extra `embedder`), independent of the order of its words."""

    def __init__(
        self,
        *,
        threshold: float = THRESHOLD,
        capacity: int = 4_000,
        patience_s: float = 0.0,
        decode: Decoder | None = None,
        directory: str = "",
    ) -> None:
        """Take the settings; see `EmbeddingProvider`.

        Args:
            threshold: Least cosine of a donor.
            capacity: Most stored prompts to remember.
            patience_s: Longest that a prompt waits for its vector.
            decode: Turns token ids into text.
            directory: With `model.onnx` and `tokenizer.json`; empty for the weights of the extra.

        Raises:
            ConfigError: A setting is wrong.
        """
        name = f"minilm:{directory}" if directory else "minilm"
        super().__init__(name, threshold=threshold, capacity=capacity, patience_s=patience_s, decode=decode)


class SketchProvider(EmbeddingProvider):
    """By the tokens that prompts have in common (`tfidf`, or `minhash`); needs numpy alone and no text."""

    def __init__(self, embedder: str = "tfidf", *, threshold: float = THRESHOLD, capacity: int = 4_000) -> None:
        """Take the settings; see `EmbeddingProvider`."""
        super().__init__(embedder, threshold=threshold, capacity=capacity)

    def on_init(self, model_config: object = None) -> None:
        """Make the sketch."""
        del model_config
        _ = self.discovery


def _goes_on_from(donor: NDArray[np.integer[Any]], prompt: TokenArray) -> bool:
    """Return whether the shorter of the two begins the other: then there is nothing that the exact cache would not find."""
    size = min(len(donor), len(prompt))
    return np.array_equal(donor[:size], prompt[:size])
