"""kvboost behind HTTP on a loopback port, asked for some tokens after a prompt of token ids; for suite_peers.py.

    PYTHONPATH=.venv-peers-suite/kvboost .venv/bin/python benchmarks/peers/kvboost_worker.py --model FOLDER --port N

Its engine takes text and its own server gives no probabilities. So it is given a tokenizer that reads token ids, the model
in float32 where its own loader takes float16, and its defaults otherwise. `seconds` run from the call to the first token;
its own `ttft_ms` leaves out the assembly of cached chunks and their recomputation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_LOGPROBS = 20
_CACHE_BYTES = 2 << 30


class IdTokenizer:
    """A tokenizer whose text is token ids with spaces between; all else is that of the model's tokenizer."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - of transformers
        self._tokenizer = tokenizer

    def encode(self, text: str, **_: object) -> list[int]:
        """Read the ids."""
        return [int(word) for word in text.split()]

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)


class Worker:
    """One engine and its questions."""

    def __init__(self, model: str) -> None:
        from kvboost.engine import GenerationMode, InferenceEngine

        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        tokenizer = IdTokenizer(AutoTokenizer.from_pretrained(model))
        self._engine = InferenceEngine(loaded, tokenizer, max_cache_bytes=_CACHE_BYTES, device="cpu")
        self._modes = {False: GenerationMode.CHUNK_KV_REUSE, True: GenerationMode.BASELINE}

    def ask(self, token_ids: Sequence[int], max_tokens: int, *, cold: bool) -> dict[str, object]:
        """Generate tokens and time the first; `cold` without its cache, which keeps nothing of the prompt either."""
        first: list[float] = []
        started = time.perf_counter()
        found = self._engine.generate(
            " ".join(map(str, token_ids)),
            max_new_tokens=max_tokens,
            mode=self._modes[cold],
            on_token=lambda _: first.append(time.perf_counter() - started),
        )
        return {
            "seconds": first[0],
            "prompt_tokens": found.prompt_tokens,
            "cached_tokens": 0 if cold else found.cached_tokens,
            "logprobs": likeliest(found.first_token_logits),
        }


def likeliest(logits: np.ndarray) -> dict[str, float]:
    """Log-probabilities of the likeliest tokens, by id."""
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    return {str(token): float(values[token]) for token in np.argsort(-values)[:NUM_LOGPROBS]}


def handler_of(worker: Worker) -> type[BaseHTTPRequestHandler]:
    """Answers GET with 200, POST with what becomes of a question."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({})

        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(worker.ask(question["token_ids"], question["max_tokens"], cold=question["cold"]))

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def _send(self, value: dict[str, object]) -> None:
            content = f"data: {json.dumps(value)}\n\n".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler


def main() -> int:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    worker = Worker(args.model)
    HTTPServer(("127.0.0.1", args.port), handler_of(worker)).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
