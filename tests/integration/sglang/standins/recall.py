"""A semantic provider for tests: names the last prompt of 200 tokens that was stored, for prompts of 150 tokens."""

from kvgraft.prefix.semantic import SemanticPrefixProvider, SemanticPrefixResult


class Recall(SemanticPrefixProvider):
    """Remembers one prompt."""

    def __init__(self):
        self._stored = None

    def on_prefix_miss(self, rid, token_ids):
        """Stand in, where asked by such a prompt."""
        if self._stored is None or len(token_ids) != 150 or rid == "plain":
            return None
        return SemanticPrefixResult(self._stored, 0, source_id="recall")

    def on_request_cached(self, rid, token_ids):
        """Remember."""
        if len(token_ids) >= 200:
            self._stored = token_ids[:200].tolist()
