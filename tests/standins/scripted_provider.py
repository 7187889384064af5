"""A semantic provider whose answers a test writes and whose calls it reads: through files, for it lives in a server."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from kvgraft.substitution import SemanticPrefixProvider, SemanticPrefixResult

FOLDER = "SCRIPTED_PROVIDER"
"""Environment variable with the folder of `answer.json` and `calls.jsonl`."""


class Scripted(SemanticPrefixProvider):
    """Answers as the file says."""

    def __init__(self):
        self._folder = Path(os.environ[FOLDER])

    def on_init(self, model_config=None):
        self._log("init", has_config=model_config is not None)

    def on_prefix_miss(self, *, rid, token_ids):
        assert not token_ids.flags.writeable
        self._log("miss", rid=rid, token_ids=token_ids.tolist())
        answer = json.loads((self._folder / "answer.json").read_text())
        if answer is None:
            return None
        time.sleep(answer.pop("seconds", 0))
        if answer.pop("fails", False):
            raise RuntimeError("the index is down")
        return SemanticPrefixResult(**answer)

    def on_request_cached(self, *, rid, token_ids):
        self._log("cached", rid=rid, token_ids=token_ids.tolist())

    def on_shutdown(self):
        self._log("shutdown")

    def _log(self, call, **fields):
        with (self._folder / "calls.jsonl").open("a") as calls:
            calls.write(json.dumps({"call": call, **fields}) + "\n")


class Script:
    """The test's side of a `Scripted` provider in another process."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self._num_read = 0
        self.answer(None)

    def answer(self, token_ids, num_cached_tokens=0, **fields):
        """Propose these tokens from now on; None for nothing."""
        result = {"alternate_token_ids": token_ids, "num_cached_tokens": num_cached_tokens, **fields}
        written = self.folder / "answer.new"
        written.write_text(json.dumps(None if token_ids is None else result))
        written.replace(self.folder / "answer.json")  # the provider never reads half of it

    def calls(self, kind=None):
        """Calls since the last time, of one kind or all; what was stored is told behind the answer, so wait for it."""
        path = self.folder / "calls.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last line may be on its way
        new, self._num_read = lines[self._num_read :], len(lines)
        told = [json.loads(line) for line in new]
        return [call for call in told if kind in (None, call["call"])]

    def stored(self, prompt=()):
        """Wait until a text that begins with `prompt` was told of; return what was told since the last time, in order."""
        told = self.awaited("cached")
        while not any(call["token_ids"][: len(prompt)] == list(prompt) for call in told):
            told += self.awaited("cached")
        return told

    def awaited(self, kind, patience_s=60):
        """Wait for calls of a kind, and return them; other kinds are passed over."""
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            found = self.calls(kind)
            if found:
                return found
            time.sleep(0.02)
        raise AssertionError(f"the provider never heard of: {kind}")
