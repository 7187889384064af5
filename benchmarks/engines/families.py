"""Which architectures kvgraft grafts in an engine, each tried on a tiny random model of it.

    python benchmarks/record.py families-vllm -- .venv-vllm/bin/python benchmarks/engines/families.py vllm
    python benchmarks/record.py families-embedded -- .venv/bin/python benchmarks/engines/families.py embedded
    python benchmarks/engines/families.py page > docs/models.md

A process per family starts the engine, reads a text behind another one, and asks a prompt that has it at another position:
with nothing reused, with the engine's defaults, and with everything that was copied computed again. `grafts`: tokens were
copied, and what was computed over them again is the answer with nothing reused. `stands aside`: a reason was given, and
answers are the engine's own. `copies nothing`: none was. `wrong`: another answer. `not served`: our own engine does not load
it. `not tried`: the engine does not start with the random model. JSON goes to standard output, progress to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from model_families import FAMILIES, VOCABULARY, write_model
from vllm_ttft import CONNECTOR

INTRODUCTION = """# Models

Which architectures are grafted, each tried on a tiny random model of it: an engine is started with the default settings, a
text is read, and a prompt with the same text at another position is asked. *grafts*: tokens were copied, and computing them
again over the copies gives the answer of a full prefill (log-probabilities within 1e-3). A name in brackets is that of the
policy where the default cannot look at the question's attention. *exact prefixes*: equal beginnings alone are reused. *stands
aside*: the server runs as if kvgraft were not there, with the engine's own prefix cache, and says why. *not served*: our own
engine does not load it. *not tried*: the build for a CPU does not start with our tiny model of it, which says nothing about
the real one. All others were compared.

How much copies change the answers of *trained* models is another question: [fidelity.md](fidelity.md). What does not depend
on the model is in [limits.md](limits.md). SGLang grafts Llama, Mistral, Qwen2 and Qwen3 (dense); its column waits for a
check that admits others.

Written by `python benchmarks/engines/families.py page` from `families-vllm.json` and `families-embedded.json`.
"""
RESULTS = Path(__file__).parents[1] / "results"
ENGINES = {"vllm": "vLLM", "embedded": "`kvgraft serve`"}
GRAFTS, EXACT, ASIDE, NOTHING = "grafts", "exact prefixes", "stands aside", "copies nothing"
WRONG, FAILED, REFUSED = "wrong", "not tried", "not served"
TIMEOUT_S = 240
_TOLERANCE = 1e-3
"""Between log-probabilities of two computations of one prompt in float32."""


def text(seed: int, length: int) -> list[int]:
    """Return random tokens."""
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


DOCUMENT = text(1, 400)
DONOR, PROMPT = text(2, 50) + DOCUMENT + text(3, 20), text(4, 110) + DOCUMENT + text(5, 40)


def main() -> int:
    """Try the families that were asked for, one after the other, and print what each does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=[*ENGINES, "page"])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="NAME")
    parser.add_argument("--keep", type=Path, help="record of this engine whose other families are kept")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # of a process that tries one
    args = parser.parse_args()
    if args.engine == "page":
        print(page({engine: json.loads((RESULTS / f"families-{engine}.json").read_text()) for engine in ENGINES}))
        return 0
    if args.into is not None:
        (name,) = args.families
        args.into.write_text(json.dumps(tried(args.engine, name)))
        return 0
    found = {} if args.keep is None else json.loads(args.keep.read_text())["result"]["families"]
    for name in args.families:
        found[name] = in_a_process(args.engine, name)
        print(args.engine, name, found[name], file=sys.stderr, flush=True)
    print(json.dumps({"engine": args.engine, "families": found}, indent=1))
    return 0


def in_a_process(engine: str, name: str) -> dict[str, Any]:
    """Try a family in a process of its own, which may die."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "found.json"
        command = [sys.executable, __file__, engine, "--families", name, "--into", str(into)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return {"state": FAILED, "reason": f"no answer in {TIMEOUT_S} s"}
        if into.exists():
            return dict(json.loads(into.read_text()))
        return {"state": FAILED, "reason": first_error(ended.stderr)}


def first_error(printed: str) -> str:
    """Return the line of a traceback that says what went wrong, of several the first: later ones follow from it."""
    lines = [line.removeprefix("[rank0]:").strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception): .", line)]
    return (errors or lines[-1:] or ["nothing was printed"])[0][:300]


def tried(engine: str, name: str) -> dict[str, Any]:
    """Write the family's model, start the engine with it and ask."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(name, Path(folder))
        return {"vllm": in_vllm, "embedded": embedded}[engine](folder, FAMILIES[name].dtype)


def verdict(refusal: str, policy: str, copied: int, off: dict[int, float], again: dict[int, float]) -> dict[str, Any]:
    """Judge log-probabilities of the first token, with nothing reused and with all that was copied computed again."""
    if not max(off.values()) - min(off.values()) > _TOLERANCE:  # or NaN
        return {
            "state": FAILED,
            "reason": "it loads not all weights of the random model: all tokens are equally likely",
        }
    shared = off.keys() & again.keys()
    difference = max((abs(off[token] - again[token]) for token in shared), default=float("inf"))
    is_equal = difference < _TOLERANCE and max(off, key=off.__getitem__) == max(again, key=again.__getitem__)
    facts = {"copied_tokens": copied, "difference": difference, "policy": policy}
    if not is_equal:
        return {"state": WRONG, "reason": f"log-probabilities differ by {difference:.1e}", **facts}
    if refusal:
        return {"state": ASIDE, "reason": refusal, **facts}
    if copied < len(DOCUMENT) // 2:
        return {"state": NOTHING, "reason": f"{copied} tokens were copied", **facts}
    return {"state": GRAFTS, "reason": "", **facts}


def in_vllm(model: str, dtype: str) -> dict[str, Any]:
    """Ask vLLM, both halves of the connector in this process."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR"
    )
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvgraft.graft.select import FirstK

    llm = LLM(
        model=model,
        dtype=dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=4,
        kv_transfer_config=KVTransferConfig(
            **CONNECTOR, kv_connector_extra_config={"lookup_deadline_ms": 1e9, "repair_below_margin": 0}
        ),
    )

    def ask(prompt: list[int], mode: str, repair: str = "after") -> tuple[dict[int, float], dict[str, Any]]:
        extra = {"kv_transfer_params": {"kvgraft": mode, "kvgraft_repair": repair}}
        parameters = SamplingParams(temperature=0, max_tokens=1, logprobs=5, detokenize=False, extra_args=extra)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
        llm.reset_prefix_cache()
        first = {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}
        return first, (output.kv_transfer_params or {}).get("kvgraft") or {}

    off, _ = ask(PROMPT, "off")
    ask(DONOR, "exact")
    _, report = ask(PROMPT, "graft")
    worker = get_kv_transfer_group().worker
    worker._policy = FirstK(1 << 30)
    llm.reset_prefix_cache(reset_connector=True)  # what the graft computed is known otherwise
    ask(DONOR, "exact")
    again, _ = ask(PROMPT, "graft", "before")
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler
    refusal = scheduler.refusal or worker.refusal
    policy = worker.description.get("selection") or "query_seam"
    return verdict(refusal, "" if refusal else str(policy), report.get("shifted_tokens", 0), off, again)


def embedded(model: str, dtype: str) -> dict[str, Any]:
    """Ask the engine that is our own."""
    from kvgraft.engine import LLM, SamplingParams
    from kvgraft.errors import KVGraftError
    from kvgraft.graft.select import FirstK

    settings = {"dtype": dtype, "num_slots": 4096, "heal": "off", "repair_below_margin": 0.0}
    try:
        llm = LLM(model, **settings)
    except KVGraftError as error:
        return {"state": REFUSED, "reason": str(error).splitlines()[0][:300]}

    def first(mode: str, **options: object) -> tuple[dict[int, float], int]:
        with llm.probe(np.array(PROMPT), 2, mode, **options) as probe:
            found = probe.logits(np.array([0, 0]))[0].double().log_softmax(-1).tolist()
            return dict(enumerate(found)), probe.report.shifted_tokens

    off, _ = first("off")
    llm.generate(np.array(DONOR), SamplingParams(1), "graft")  # in `exact` windows leave no donors
    _, copied = first("graft")
    again, _ = first("graft", repair="before", selection=FirstK(1 << 30))
    refusal = llm.self_check.refusal or ""
    found = verdict(refusal, "" if refusal else "query_seam", copied, off, again)
    return {**found, "state": EXACT if found["state"] == ASIDE else found["state"]}


def page(records: dict[str, dict[str, Any]]) -> str:
    """Return docs/models.md."""
    found = {engine: record["result"]["families"] for engine, record in records.items()}
    counts = [
        f"{ENGINES[engine]}: {sum(row['state'] == GRAFTS for row in rows.values())} of {len(rows)} grafted"
        for engine, rows in found.items()
    ]
    lines = [
        INTRODUCTION,
        "; ".join(counts) + ".",
        "",
        f"| family | {' | '.join(map(ENGINES.get, found))} |",
        "|---" * (len(found) + 1) + "|",
    ]
    lines += [f"| {name} | {' | '.join(cell(rows[name]) for rows in found.values())} |" for name in FAMILIES]
    return "\n".join(lines)


def cell(row: dict[str, Any]) -> str:
    """Return what the table says of a family in an engine."""
    if row["state"] == GRAFTS:
        return GRAFTS + (f" (`{row['policy']}`)" if row["policy"] not in {"", "query_seam"} else "")
    reason = str(row["reason"]).replace("|", "/")
    return f"{row['state']}: {reason}"


if __name__ == "__main__":
    sys.exit(main())
