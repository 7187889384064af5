"""One scenario in a process of its own: `python scenario.py '{"options": ...}'` prints answers as JSON.

Donors are read, then prompts are asked, each grafted and then computed in full. Then, if asked for: prompts while the second
rank fails at a stage; the self-check while it does; the first prompts once more behind a change of weights. Used where the
engine spawns processes.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

WORKER = "kvgraft.integrations.vllm.worker"
STAGES = {
    "donors read": (f"{WORKER}.donor_store", "DonorStore.get"),
    "job built": (f"{WORKER}.graft_worker", "GraftJob"),
    "spans written": (f"{WORKER}.group_kv", "PagedKV.prepare"),
    "batch built": (f"{WORKER}.sparse_pass", "virtual_batch"),
    "keys compared": (f"{WORKER}.group_kv", "GroupPlace.read"),
    "keys summed": (f"{WORKER}.key_deviation", "KeyDeviationPass.deviation"),
    "later layers": (f"{WORKER}.key_deviation", "LaterLayersPass.__init__"),
    "query kept": (f"{WORKER}.query_look", "QueryLook._keep"),
    "attention observed": (f"{WORKER}.query_look", "QueryLook.observe"),
    "attention summed": (f"{WORKER}.graft_job", "summed_over_ranks"),
    "drift corrected": (f"{WORKER}.drift_pass", "DriftPass._correct"),
    "gaps kept": (f"{WORKER}.graft_job", "GraftJob._keep"),
    "blocks completed": (f"{WORKER}.group_kv", "PagedKV.finish"),
    "text captured": (f"{WORKER}.graft_worker", "PagedKV"),
    "donor sealed": (f"{WORKER}.donor_store", "DonorStore.seal"),
    "layers described": (f"{WORKER}.graft_worker", "layer_groups"),
    "scratch blocks": (f"{WORKER}.attention_layer", "AttentionLayer.scratch"),
    "keys read": (f"{WORKER}.attention_layer", "AttentionLayer.read"),
    "rotations found": (f"{WORKER}.self_check", "find_rotations"),
    "gaps compared": (f"{WORKER}.self_check", "_require_equal"),
    "query looked at": (f"{WORKER}.self_check", "QueryLook"),
    "drift looked at": (f"{WORKER}.self_check", "DriftPass"),
    "layers found": (f"{WORKER}.decoder_stack", "DecoderStack.of"),
    "weights looked at": (f"{WORKER}.graft_worker", "WeightsWitness"),
}
"""Where a rank may fail, by what it does there."""

STORE_STAGES = {
    "stored text read": ("kvgraft.memory.store.file", "FileStore.read"),
    "stored text kept": (f"{WORKER}.donor_store", "DonorStore.keep"),
}
"""And with a store behind it."""


def break_rank(worker, rank, stage):
    """Let one rank fail at a stage, from now on."""
    from importlib import import_module

    if worker.rank != rank:
        return
    module, name = {**STAGES, **STORE_STAGES}[stage]
    *owners, name = name.split(".")
    owner = import_module(module)
    for part in owners:
        owner = getattr(owner, part)

    def fails(*args, **kwargs):
        raise RuntimeError(f"injected: {stage}")

    worker.mended = (
        owner,
        name,
        vars(owner)[name],
    )  # functions are sent by value: a global would be another one each time
    setattr(owner, name, fails)


def mend_rank(worker):
    """Undo `break_rank`."""
    if hasattr(worker, "mended"):
        setattr(*worker.mended)


def self_check(worker):
    """What a rank finds if it starts now: a refusal, or that it passed."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvgraft.integrations.vllm.worker.graft_worker import GraftWorker

    known = get_kv_transfer_group().worker
    fresh = GraftWorker(known._config, known._vllm_config, known._kv_cache_config)
    fresh.register({layer.name: layer.cache for group in known._groups for layer in group.layers})
    if fresh._handle is not None:
        fresh.close()
        fresh._handle.model = known._handle.model
        fresh._prepare()
    return fresh.description["self_check"] if fresh._groups else fresh.refusal


def train(worker, told):
    """Change the weights in place; with `told` "second" one row of the second rank's vocabulary, which no text has."""
    parameters = list(worker.model_runner.model.parameters())
    if told != "second":
        for parameter in parameters:
            parameter.data.mul_(1.1)
    elif worker.rank == 1:
        parameters[0].data[-1] += 1.0


def main():
    asked = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        model=asked["model"],
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=asked.get("enforce_eager", True),
        block_size=32,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        max_num_seqs=4,
        tensor_parallel_size=asked.get("ranks", 1),
        kv_transfer_config=KVTransferConfig(
            kv_connector="GraftConnector",
            kv_connector_module_path="kvgraft.integrations.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"lookup_deadline_ms": 1e9, "repair_below_margin": 0, **asked.get("options", {})},
        ),
    )

    def ask(prompt, mode):
        sampling = SamplingParams(
            temperature=0,
            max_tokens=6,
            ignore_eos=True,
            logprobs=5,
            detokenize=False,
            extra_args={"kv_transfer_params": {"kvgraft": mode}},
        )
        llm.reset_prefix_cache()
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        completion = output.outputs[0]
        return {
            "tokens": list(completion.token_ids),
            "logprobs": [{str(token): entry.logprob for token, entry in step.items()} for step in completion.logprobs],
            "num_cached": output.num_cached_tokens,
            "report": output.kv_transfer_params["kvgraft"],
        }

    for prompt in asked["donors"]:
        ask(prompt, "exact")
    if "await_files" in asked:
        folder, count = asked["await_files"]
        while len(list(Path(folder).glob("*/*.safetensors"))) < count:
            time.sleep(0.1)
        filler = list(range(3, 20))  # too short to become a donor
        while not asked["donors"] and ask(filler, "graft")["report"]["miss"]["reason"] == "no_donors":
            time.sleep(0.3)
    answers = [{"warm": ask(prompt, "graft"), "cold": ask(prompt, "off")} for prompt in asked["prompts"]]
    for stage, prompt in asked.get("broken", {}).items():
        llm.collective_rpc(break_rank, args=(1, stage))
        warm = ask(prompt, "graft")
        llm.collective_rpc(mend_rank)
        answers.append({"warm": warm, "cold": ask(prompt, "off")})
    checks = {}
    for stage in asked.get("checked", []):
        llm.collective_rpc(break_rank, args=(1, stage))
        checks[stage] = llm.collective_rpc(self_check)
        llm.collective_rpc(mend_rank)
    if "trained" in asked:
        llm.collective_rpc(train, args=(asked["trained"],))
        if asked["trained"] != "nothing":
            assert llm.reset_prefix_cache(reset_connector=True)
        answers += [{"warm": ask(prompt, "graft"), "cold": ask(prompt, "off")} for prompt in asked["prompts"]]
    print("ANSWERS" + json.dumps({"answers": answers, "checks": checks}), flush=True)


if __name__ == "__main__":
    main()
