"""Names of a package whose modules are imported when a name is first asked for: a process loads what it runs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def names_on_use(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package (PEP 562).

    Args:
        package: Its `__name__`.
        modules: The module of each name.
    """

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = import_module(modules[name])
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(f"{package}.{name} needs torch: pip install 'kvgraft[torch]'") from error
        return getattr(module, name)

    return get
