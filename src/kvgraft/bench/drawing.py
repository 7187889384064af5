"""Names of matplotlib, which is an extra."""

from __future__ import annotations

try:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
except ModuleNotFoundError as missing:
    raise ImportError("--plot needs matplotlib: pip install 'kvgraft[bench]'") from missing

__all__ = ["Figure", "FuncFormatter", "LogLocator", "NullFormatter"]
