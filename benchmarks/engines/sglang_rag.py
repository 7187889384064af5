"""A request pack against a stock SGLang server on a CPU, with and without `--radix-cache-backend kvgraft`.

    .venv-sglang/bin/python benchmarks/engines/sglang_rag.py DIR/rag --requests 100

Requests come one after the other, each to every server in turn while the others are held still. Reports tokens reused, time
to first token, and how far the greedy answers agree with those of the server that only reuses exact prefixes, which are
those of a full prefill.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer

from kvgraft.bench.packs import load_pack
from kvgraft.models import bundled_model_path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "integration" / "sglang"))

from server import SGLangServer

OPTIONS = {
    "--max-total-tokens": 60_000,
    "--context-length": 16_384,
    "--chunked-prefill-size": 16_384,
    "--disable-overlap-schedule": None,
    "--mem-fraction-static": "0.6",
    "--watchdog-timeout": "3600",  # it would end a server that is held still
}
_AFTER_S = 0.2
"""What a server does behind an answer is not part of the next one."""
_SHORTEST_RUN = 16
SIDES: dict[str, tuple[str | None, dict[str, str]]] = {
    "stock": (None, {}),
    "kvgraft none": ("kvgraft", {"KVGRAFT_SELECTION": "none"}),
    "kvgraft first_k": ("kvgraft", {"KVGRAFT_SELECTION": "first_k"}),
    "kvgraft": ("kvgraft", {"KVGRAFT_SELECTION": "query_seam"}),
}


def main() -> int:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack", help="request pack, as for kvgraft bench reuse")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=16, help="tokens per answer")
    args = parser.parse_args()
    model = str(bundled_model_path())
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    (workload,) = load_pack(args.pack)
    texts = workload.sessions[0].requests[: args.requests]
    prompts = [tokenizer.encode(text).ids for text in texts]
    answers: dict[str, list[dict[str, object]]] = {name: [] for name in SIDES}
    servers = {name: SGLangServer(model, OPTIONS, environ, backend) for name, (backend, environ) in SIDES.items()}
    try:
        for server in servers.values():
            server.__enter__()
            ask(server, list(range(3, 200)), 2)
            server.pause()
        for prompt in prompts:
            for name, server in servers.items():
                server.resume()
                answers[name].append(ask(server, prompt, args.tokens))
                time.sleep(_AFTER_S)
                server.pause()
    finally:
        for server in servers.values():
            server.stop()
    rows = [summary(name, prompts, answers[name], answers["stock"]) for name in SIDES]
    lengths = sorted(map(len, prompts))
    facts = {"model": "graft-tiny", "dtype": "float32", "requests": len(prompts), "answer_tokens": args.tokens}
    print(json.dumps({**facts, "median_prompt_tokens": lengths[len(lengths) // 2], "rows": rows}, indent=1))
    return 0


def ask(server: SGLangServer, prompt: list[int], num_tokens: int) -> dict[str, object]:
    """Stream one answer; returns its tokens, the tokens reused and the milliseconds to the first piece."""
    sampling = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "sampling_params": sampling, "stream": True})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    started = time.perf_counter()
    connection.request("POST", "/generate", body, {"content-type": "application/json"})
    response = connection.getresponse()
    first_ms, last = 0.0, {}
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        first_ms = first_ms or 1e3 * (time.perf_counter() - started)
        last = json.loads(line[6:])
    connection.close()
    return {"tokens": last["output_ids"], "cached": last["meta_info"]["cached_tokens"], "ttft_ms": first_ms}


def summary(
    name: str, prompts: list[list[int]], answers: list[dict[str, object]], truth: list[dict[str, object]]
) -> dict[str, object]:
    """Sum one server's answers up."""
    times = sorted(float(str(answer["ttft_ms"])) for answer in answers)
    total = sum(map(len, prompts))
    without = [
        float(str(a["ttft_ms"])) / float(str(b["ttft_ms"]))
        for a, b in zip(answers, truth, strict=True)
        if int(str(a["cached"])) - int(str(b["cached"])) < _SHORTEST_RUN
    ]
    pairs = [(list(a["tokens"]), list(b["tokens"])) for a, b in zip(answers, truth, strict=True)]  # type: ignore[call-overload]
    return {
        "server": name,
        "reused_percent": round(100 * sum(int(str(answer["cached"])) for answer in answers) / total, 1),
        "ttft_median_ms": round(statistics.median(times), 1),
        "ttft_p95_ms": round(times[int(0.95 * (len(times) - 1))], 1),
        "ttft_sum_s": round(sum(times) / 1e3, 2),
        "without_reuse": len(without),
        "ttft_without_reuse_over_stock": round(statistics.median(without), 3) if without else None,
        "same_first_token_percent": round(100 * statistics.mean(a[0] == b[0] for a, b in pairs), 1),
        "same_tokens_percent": round(100 * statistics.mean(common(a, b) / len(b) for a, b in pairs), 1),
        "same_answer_percent": round(100 * statistics.mean(a == b for a, b in pairs), 1),
    }


def common(a: list[int], b: list[int]) -> int:
    """Count equal tokens before the first difference."""
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(b))


if __name__ == "__main__":
    sys.exit(main())
