"""What the setting `store` names, read without anything of a store."""

from __future__ import annotations

HOST = "host"
"""The setting of an engine that has no store: what leaves host memory is gone."""


def store_urls(setting: str) -> list[str]:
    """Return the stores of a setting, joined there by commas, in the order in which they are asked; none for `host`."""
    return [url.strip() for url in setting.split(",") if url.strip() not in ("", HOST)]
