"""What clients that take classes are asked to fill in; apart from `served`, which needs nothing but the standard library."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Weather(BaseModel):
    """The weather of a day."""

    model_config = ConfigDict(extra="forbid")
    day: Literal["today", "tomorrow"]
