#!/usr/bin/env bash
# Build wheel and sdist, install them into clean environments without extras and with [torch,server], and use both.
#   tools/try_wheel.sh PYTHON     PYTHON: of an environment that has what the extras name (.venv/bin/python); nothing of the checkout is
#                                 imported from there, it only saves downloading torch again
set -euo pipefail
cd "$(dirname "$0")/.."
given=${1:?"name the Python of an environment with torch, such as .venv/bin/python"}
python=$(cd "$(dirname "$given")" && pwd)/$(basename "$given") # used from other folders, too
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1 OMP_NUM_THREADS=1

fail() { echo "try_wheel: $1" >&2; exit 1; }

"$python" -m venv "$work/build"
"$work/build/bin/pip" install hatchling
"$work/build/bin/python" -m hatchling build -d "$work/dist" > /dev/null 2>&1
wheel=$(ls "$work"/dist/*.whl) sdist=$(ls "$work"/dist/*.tar.gz)
echo "wheel $(du -h "$wheel" | cut -f1), sdist $(du -h "$sdist" | cut -f1)"

"$work/build/bin/python" - "$wheel" << 'PYTHON' || fail "the README that an index shows has links into the checkout"
import re, sys, zipfile

archive = zipfile.ZipFile(sys.argv[1])
(name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
text = re.sub(r"^```.*?^```", "", archive.read(name).decode(), flags=re.DOTALL | re.MULTILINE)
sys.exit(any(not target.startswith(("https://", "#")) for target in re.findall(r"\]\(([^)\s]+)\)", text)))
PYTHON

# The sdist has all that a wheel is built of.
"$work/build/bin/pip" wheel --no-deps --no-build-isolation -w "$work/again" "$sdist"
cmp <(unzip -Z1 "$wheel" | sort) <(unzip -Z1 "$work"/again/*.whl | sort) || fail "wheels of checkout and sdist differ"

cd "$work" # away from the checkout's sources
try_bare() { # python, folder
  "$1" -m venv "$2"
  "$2/bin/pip" install "$wheel"
  "$2/bin/python" --version
  "$2/bin/kvgraft" --version
  "$2/bin/kvgraft" --help > help.txt
  "$2/bin/kvgraft" config show > config.txt
  "$2/bin/kvgraft" bench reuse builtin > reuse.txt
  "$2/bin/python" - << 'PYTHON'
import sys

import numpy as np
from kvgraft.prefix import RadixCache, RadixKey

cache = RadixCache()
cache.insert(RadixKey(np.arange(100)), np.arange(100))
assert cache.match_prefix(RadixKey(np.arange(60))).prefix_len == 60
assert "torch" not in sys.modules
PYTHON
  if "$2/bin/kvgraft" generate hello > out.txt 2> error.txt; then fail "generate works without its extra"; fi
  grep -q "pip install 'kvgraft\[torch\]'" error.txt || fail "a missing extra is not named: $(cat error.txt)"
  [ "$(grep -vc ' \.\.\.$' error.txt)" = 1 ] || fail "a missing extra is told in more than a line besides what the start is at: $(cat error.txt)"
}
try_bare "$python" bare
for version in 3.12 3.13; do # of the classifiers, those that are here
  for other in "python$version" ~/.pyenv/versions/"$version".*/bin/python; do
    if "$other" -c "" 2> /dev/null; then try_bare "$other" "bare-$version" && break; fi
  done
done

# Packages of the given environment without its editable kvgraft: what stands in a .pth file is a path, its own .pth files are not read.
"$python" -m venv --without-pip full # the setuptools that comes with pip would hide that of the environment
"$python" -c 'import site; print(site.getsitepackages()[0])' > "$(echo full/lib/python*/site-packages)/shared.pth"
"$python" -m pip --python full/bin/python install --no-deps --force-reinstall "$wheel"
"$python" -m pip --python full/bin/python install --dry-run --no-index "${wheel}[torch,server]" || fail "the environment of $python lacks what the extras name"
full/bin/python -c 'import kvgraft, sys; assert kvgraft.__file__.startswith(sys.prefix), kvgraft.__file__'
full/bin/kvgraft generate --model graft-tiny --num-slots 500 --max-new-tokens 4 "import " > answer.txt
grep -q "tokens" answer.txt || fail "generate says nothing of tokens: $(cat answer.txt)"
full/bin/kvgraft serve --help > serve.txt
echo "wheel and sdist work, without extras and with [torch,server]"
