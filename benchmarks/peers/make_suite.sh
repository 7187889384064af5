#!/usr/bin/env bash
# Puts what suite_peers.py compares us with into folders beside the environments that have the rest: .venv-peers-suite/NAME.
#
#     benchmarks/peers/make_suite.sh
#
# kvboost runs in .venv (torch, transformers, accelerate), xllamacpp there too: a wheel with llama.cpp's own server, compiled without the
# machine's vector instructions beyond AVX2. semblend-vllm-connector runs in .venv-vllm, and LMCache in the folder that
# `make .venv-vllm/.lmcache` makes. 80 MB, nothing is resolved (--no-deps).
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
for package in kvboost==0.9.0 xllamacpp==2026.10.11549 semblend-vllm-connector==0.2.8; do
    folder=$root/.venv-peers-suite/${package%%==*}
    [ -e "$folder/.installed" ] && continue
    "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --only-binary :all: \
        --target "$folder" "$package"
    touch "$folder/.installed"
done
