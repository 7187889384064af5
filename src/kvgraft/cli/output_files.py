"""Files that commands write."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def check_output(option: str, file: Path) -> None:
    """Refuse a file that could not be written, before what takes an hour is measured.

    Raises:
        ConfigError: Names option and remedy.
    """
    if not file.parent.is_dir():
        raise ConfigError(f"--{option} {file}: the folder does not exist; create it first")
    if file.is_dir():
        raise ConfigError(f"--{option} {file} is a folder; give the name of a file in it")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"--{option} {file} cannot be written; choose a place that is yours")


def write_whole(file: Path, text: str) -> None:
    """Replace a file by `text` in one step: without room for it, or interrupted, it stays what it was.

    What is no plain file (`/dev/stdout`, a pipe), or lies in a folder that is another's, is written to in place.

    Raises:
        OSError: It cannot be written.
    """
    target = file.resolve()
    if (target.exists() and not target.is_file()) or not os.access(target.parent, os.W_OK):
        file.write_text(text, encoding="utf-8", errors="replace")
        return
    begun = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        begun.write_text(text, encoding="utf-8", errors="replace")
        if target.exists():
            shutil.copymode(target, begun)
        begun.replace(target)
    except BaseException:
        begun.unlink(missing_ok=True)
        raise


def check_output_folder(option: str, folder: Path) -> None:
    """Refuse a folder in which nothing could be written.

    Raises:
        ConfigError: Names option and remedy.
    """
    if not folder.is_dir():
        raise ConfigError(f"--{option} {folder}: there is no such folder; create it first")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--{option} {folder} cannot be written; choose a place that is yours")
