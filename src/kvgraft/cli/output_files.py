"""Files that commands write."""

from __future__ import annotations

import os
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


def check_output_folder(option: str, folder: Path) -> None:
    """Refuse a folder in which nothing could be written.

    Raises:
        ConfigError: Names option and remedy.
    """
    if not folder.is_dir():
        raise ConfigError(f"--{option} {folder}: there is no such folder; create it first")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--{option} {folder} cannot be written; choose a place that is yours")
