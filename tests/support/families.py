"""Families of models as parameters of a test: some in every run, the others in `make test-slow`."""

from __future__ import annotations

import pytest


def families(names, *, quick):
    """Parametrize `family`; all but the `quick` ones of `names` are slow."""
    return pytest.mark.parametrize(
        "family", [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
    )
