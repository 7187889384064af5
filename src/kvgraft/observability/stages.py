"""Stages of a start as log records: the program that starts an engine decides who sees them."""

from __future__ import annotations

import logging

STAGES = logging.getLogger("kvgraft.start")
"""Gets a record of level INFO as each stage begins."""


def stage(what: str) -> None:
    """Say what begins now, in a few words: `loading graft-tiny`."""
    STAGES.info("%s ...", what)
