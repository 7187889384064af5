"""One scenario in a process of its own: `python scenario.py '{"options": ...}'` prints answers as JSON.

Donors are read, then prompts are asked, each grafted and then computed in full; with a `broken_rank` once more, after it
lost its donors. Used where the engine spawns processes.
"""

from __future__ import annotations

import json
import sys


def break_rank(worker, rank):
    """Make one rank unable to read donors."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if worker.rank == rank:

        def gone(*args, **kwargs):
            raise RuntimeError(f"rank {rank} lost its donors")

        get_kv_transfer_group().worker._donors.get = gone


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
            kv_connector_extra_config=asked.get("options", {}),
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
    answers = [{"warm": ask(prompt, "graft"), "cold": ask(prompt, "off")} for prompt in asked["prompts"]]
    if "broken_rank" in asked:
        llm.collective_rpc(break_rank, args=(asked["broken_rank"],))
        answers += [{"warm": ask(prompt, "graft"), "cold": ask(prompt, "off")} for prompt in asked["prompts"]]
    print("ANSWERS" + json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
