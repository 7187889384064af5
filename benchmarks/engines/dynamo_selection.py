"""Dynamo's selection service on the KV events of workers, answering on standard output what is asked on standard input.

    .venv-dynamo/bin/python benchmarks/engines/dynamo_selection.py --block-size 16 tcp://127.0.0.1:5557 tcp://127.0.0.1:5558

`.venv-dynamo` holds `ai-dynamo-runtime==1.6.1` and nothing of ours. A line `{"token_ids": [...]}` is answered by a line
`{"worker": 0, "blocks": [4, 0]}`: the worker that the service selects, and the blocks that it believes each one holds, in
whichever tier it has most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys

_TIERS = ("device_blocks", "host_pinned_blocks", "disk_blocks", "host_pinned_extension_blocks", "disk_extension_blocks")


async def answer(service: object, model: str, num_workers: int) -> None:
    """Answer one line after the other until the input ends."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        request = {"model_name": model, "token_ids": json.loads(line)["token_ids"]}
        scores = await service.overlap_scores(request)  # type: ignore[attr-defined]
        selected = await service.select(request)  # type: ignore[attr-defined]
        blocks = [0] * num_workers
        for each in scores["workers"]:
            blocks[each["worker_id"]] = max(each[tier] for tier in _TIERS)
        print(json.dumps({"worker": selected["worker_id"], "blocks": blocks}), flush=True)


async def serve(endpoints: list[str], block_size: int) -> None:
    """Listen to the workers and answer."""
    from dynamo._core import SelectionService

    service = SelectionService(indexer_threads=1)
    for number, endpoint in enumerate(endpoints):
        await service.upsert_worker(
            {
                "worker_id": number,
                "model_name": "model",
                "endpoint": f"http://worker-{number}",
                "kv_events_endpoint": endpoint,
                "block_size": block_size,
                "total_kv_blocks": 1 << 20,
            }
        )
    print(json.dumps({"ready": True}), flush=True)
    await answer(service, "model", len(endpoints))
    service.shutdown()


def main() -> int:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("endpoints", nargs="+", help="ZMQ endpoints of the workers' KV events, in order")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block, as the workers have it")
    args = parser.parse_args()
    # The service writes its log to standard output, where the answers go.
    os.environ.setdefault("DYN_LOG", "off")
    asyncio.run(serve(args.endpoints, args.block_size))
    return 0


if __name__ == "__main__":
    sys.exit(main())
