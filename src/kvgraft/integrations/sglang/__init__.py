"""`--radix-cache-backend kvgraft` for a stock SGLang server: text is reused wherever it stands in a prompt.

SGLang calls `register` in each of its processes, through the entry-point group `sglang.srt.plugins`, before it builds
anything. Importing this package imports neither torch nor SGLang.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the backend and its two hooks with SGLang.

    SGLang logs what a plug-in raises and goes on, so a failure is logged here in words that say what follows from it. The
    backend is then unknown, and a server that was asked for it refuses to start.

    Raises:
        Exception: Registration failed; it was logged.
    """
    try:
        from kvgraft.integrations.sglang.plugin import install

        install()
    except Exception:
        logger.error(  # noqa: TRY400 - SGLang prints the traceback itself
            "kvgraft: the plug-in could not be installed; --radix-cache-backend kvgraft will be refused as unknown"
        )
        raise


__all__ = ["register"]
