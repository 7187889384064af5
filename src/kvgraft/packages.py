"""Packages that an extra of kvgraft installs, asked for before they are used."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def require_packages(what: str, packages: Iterable[str], extra: str) -> None:
    """Refuse early what would fail for want of a package when it is made; imports nothing.

    Args:
        what: What needs them, for the message.
        packages: Names as imported.
        extra: What of kvgraft installs them.

    Raises:
        ImportError: One is not installed.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ImportError(f"{what} needs {' and '.join(missing)}: pip install 'kvgraft[{extra}]'", name=missing[0])
