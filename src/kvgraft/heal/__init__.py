"""Requests that have idle engines compute approximate text again: `kvgraft heal`. Needs the extra `router`.

An engine announces its donors among its KV events (`announce_donors`). The text of those that attended to grafts is sent
back to it as a request that grafts nothing, and what the engine registers of that replaces them.

Public modules: `healer`, `process`.
"""

from __future__ import annotations

from kvgraft.heal.texts import Text, Texts

__all__ = ["Text", "Texts"]
