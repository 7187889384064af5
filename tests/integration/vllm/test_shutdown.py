"""What an engine leaves in its process when it has ended."""

from __future__ import annotations

import weakref

from engines import engine, text

DOCUMENT = text(1, 200)


def test_the_cache_of_an_engine_goes_with_it(model_folder):
    """A gigabyte in these tests: what remembers a layer beyond its engine runs a process out of memory that starts others."""
    with engine(model_folder) as one:
        one.donate(text(2, 40) + DOCUMENT + text(3, 20))
        assert one.ask(text(4, 70) + DOCUMENT + text(5, 20)).shifted
        caches = [weakref.ref(layer.cache) for group in one.worker._groups for layer in group.layers]
        del one
    assert not [cache for cache in caches if cache() is not None]
