"""llama.cpp's own HTTP server from the wheel `xllamacpp`, with `--cache-reuse`; for suite_peers.py.

    PYTHONPATH=.venv-peers-suite/xllamacpp .venv/bin/python benchmarks/peers/llama_cpp_server.py --model FILE.gguf --port N

One slot, so that every prompt meets the K/V of the prompt before it, keys and values in float32, and no cache of prompts in
host memory: that one brings whole prompts back and is not what is measured. `--cache-reuse` in llama.cpp reuses equal runs
of the slot's text that has moved to the front because something before them was deleted.
"""

from __future__ import annotations

import argparse
import signal
import sys

import xllamacpp

_CONTEXT_TOKENS = 8192


def main() -> int:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache-reuse", type=int, default=32, help="shortest run that is reused, in tokens")
    args = parser.parse_args()
    endings = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, endings)  # in the server's threads, too, which begin below
    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.port = args.port
    params.n_ctx = _CONTEXT_TOKENS
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.n_cache_reuse = args.cache_reuse
    params.cache_ram_mib = 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait(endings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
