"""The setting `store`: donors live in a store of somebody else's, and its failures are misses."""

from __future__ import annotations

import pytest
from tests.conformance.file_store import FileStore

from engines import engine, text
from kvgraft.memory import register_store
from kvgraft.memory.store import registry

DOCUMENT, QUESTION = text(5, 300), text(3, 40)


@pytest.fixture(scope="module")
def made():
    """The stores that the engine asked for."""
    stores: list[FileStore] = []

    def factory(*, budget_bytes, pin_memory):
        stores.append(FileStore(budget_bytes=budget_bytes, pin_memory=pin_memory))
        return stores[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
        register_store("toy", factory)
        yield stores


@pytest.fixture(scope="module")
def served(made, model_folder):
    options = {"selection": "none", "host_bytes": "64MiB", "store": "toy"}
    with engine(model_folder, "llama", options=options) as one:
        yield one


def test_a_donor_is_grafted_from_the_store_and_forgotten_there(served, made):
    served.donate(text(1, 50) + DOCUMENT + QUESTION)
    (store,) = made
    assert store.budget_bytes == 64 << 20
    assert len(store) > 0
    prompt = text(2, 130) + DOCUMENT + QUESTION
    assert served.ask(prompt).shifted == len(DOCUMENT + QUESTION) - 1
    served.check()
    served.forget_donors()
    served.ask(text(9, 20), "off")  # a step, in which workers hear of it
    assert (len(store), store.used_bytes) == (0, 0)


def test_a_store_that_loses_blocks_costs_nothing_but_time(served, made):
    served.forget_donors()
    served.donate(text(11, 50) + DOCUMENT + QUESTION)
    (store,) = made
    for path, _ in store._files.values():
        path.write_bytes(b"")
    prompt = text(12, 130) + DOCUMENT + text(13, 45)
    cold = served.cold(prompt)
    answer = served.ask(prompt)
    assert answer.shifted == 0
    answer.assert_like(cold)
