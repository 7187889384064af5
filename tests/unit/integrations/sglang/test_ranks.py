"""Tensor-parallel ranks as processes: one plan for all, loads only where all agree."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os

import numpy as np
import pytest
import torch.distributed as dist
from tests.unit.integrations.sglang.rank_threads import FailsElsewhere

from kvgraft.donors import Donor
from kvgraft.integrations.sglang.planning.ranks import Chosen, Ranks, TensorParallelRanks, encoded, shared_secret
from kvgraft.integrations.sglang.planning.spans import LoadSpan
from kvgraft.reuse.together import FailedTogetherError
from kvgraft.types import DonorId, Fidelity, Namespace

NAMESPACE = Namespace("m")


def make_donor(number, shift=0):
    return Donor(DonorId(number), NAMESPACE, np.arange(100, dtype=np.int32) + shift, None)


def failed_in(ranks):
    """Rank 0 fails before an exchange that rank 1 makes; returns what each raises."""

    def act():
        if ranks.rank == 0:
            raise MemoryError("no memory")
        ranks.lowest([3])

    try:
        ranks.together(act)
    except FailedTogetherError as error:
        return str(error)


def worker(rank, path, results):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    donors = {DonorId(5): make_donor(5), DonorId(8): make_donor(8, shift=rank)}
    if rank == 0:
        donors[DonorId(7)] = make_donor(7)
    ranks = TensorParallelRanks(dist.group.WORLD, donors.get)
    spans = (LoadSpan(10, 20, donors[DonorId(5)], 3),)
    if rank == 0:
        spans += (LoadSpan(40, 16, donors[DonorId(7)], 0), LoadSpan(60, 16, donors[DonorId(8)], 0))
    kept = ranks.chosen(None, 3)
    planned = ranks.chosen(spans, 2**62 - 1)
    empty = ranks.chosen((), 0)
    unlike = ranks.chosen(spans, 3 + rank)
    results.put(
        {
            "rank": rank,
            "kept": kept,
            "empty": empty,
            "planned": [
                (s.start, s.length, None if s.donor is None else s.donor.donor_id, s.donor_start) for s in planned.spans
            ],
            "unlike": unlike,
            "secret": shared_secret(dist.group.WORLD),
            "place": (ranks.rank, ranks.size),
            "lowest": ranks.lowest([rank, 5 - rank, 7]),
            "shared": ranks.shared(lambda: f"of rank {rank}"),
            "gathered": ranks.gathered(f"of rank {rank}"),
            "failed": failed_in(ranks),
            "after it": ranks.gathered(f"of rank {rank}"),
        }
    )
    results.close()
    results.join_thread()
    # Gloo's threads may still hold tensors of the last collective, and abort a process whose interpreter ends first (1 of 42
    # ends on a busy machine): https://github.com/pytorch/pytorch/pull/179291.
    os._exit(0)


def test_rank_zero_decides_and_loads_need_all(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=worker, args=(rank, tmp_path / "store", results)) for rank in range(2)]
    for process in processes:
        process.start()
    found = sorted((results.get(timeout=600) for _ in processes), key=lambda entry: entry["rank"])
    for process in processes:
        process.join(600)
        assert process.exitcode == 0
    assert [entry["planned"] for entry in found] == [
        [(10, 20, 5, 3), (40, 16, 7, 0), (60, 16, 8, 0)],
        # Rank 1 does not know donor 7, and donor 8 is another text there: no rank's load of these will count.
        [(10, 20, 5, 3), (40, 16, None, 0), (60, 16, None, 0)],
    ]
    assert found[0]["secret"] == found[1]["secret"]
    assert len(set(found[0]["secret"])) > 8
    for entry in found:
        assert entry["kept"] == Chosen(None)
        assert entry["empty"] == Chosen(())
        assert entry["unlike"] == Chosen(None, are_alike=False)
        assert entry["place"] == (entry["rank"], 2)
        assert entry["lowest"] == [0, 4, 7]
        assert entry["shared"] == "of rank 0"
        assert entry["gathered"] == entry["after it"] == ["of rank 0", "of rank 1"]
    assert [entry["failed"] for entry in found] == ["MemoryError: no memory", "another rank failed; its log says why"]


def test_one_rank_agrees_with_itself():
    assert Ranks().chosen((), 3) == Chosen(())
    assert Ranks().chosen(None, 3) == Chosen(None)
    assert Ranks().lowest([3, 1]) == [3, 1]
    assert Ranks().shared(lambda: "made here") == "made here"
    assert Ranks().gathered("alone") == ["alone"]


def test_disagreement_frees_what_was_loaded(make_world, make_tokens):
    from kvgraft.integrations.sglang.donors.loader import Loader
    from kvgraft.integrations.sglang.requests.request import SGLangRequest

    world, document = make_world(), make_tokens(100)
    world.publish("donor", document)
    (donor,) = world.keeper.catalogue
    state = SGLangRequest("query", donor.namespace)
    state.load_only([LoadSpan(0, 50, donor, 10)])
    elsewhere = FailsElsewhere(lambda: bool(state.lineage.spans))  # once it is loaded here
    loader = Loader(world.tree, world.pool, world.keeper, None, ranks=elsewhere, log=world.log)
    assert loader.load(state, 0, 50) is None
    assert state.miss.detail == "tensor-parallel ranks disagree"
    assert world.log.num_errors == 1
    assert not state.lineage.spans
    world.conserved()


def test_only_catalogued_donors_can_be_sent():
    span = LoadSpan(0, 10, make_donor(1), 0, fidelity=Fidelity.SUBSTITUTED)
    ranks = object.__new__(TensorParallelRanks)
    with pytest.raises(AssertionError, match="catalogued"):
        encoded(span)
    sent = encoded(LoadSpan(0, 10, make_donor(1), 2, 3))
    assert sent[:-1] == [0, 10, 1, 2, 3, 0, 0]
    sent = encoded(LoadSpan(0, 10, make_donor(1), 0, fidelity=Fidelity.EXACT))
    ranks._donor_of = {1: make_donor(1)}.get
    received = ranks._decoded(sent)
    assert (received.fidelity, received.donor.donor_id) == (Fidelity.EXACT, 1)


def test_an_exact_span_is_of_the_same_beginning_on_every_rank():
    """Its donor on another rank has the same tokens in the span, and others in front of it."""
    ranks, other = object.__new__(TensorParallelRanks), make_donor(1)
    tokens = other.token_ids.copy()
    tokens[0] += 1  # K/V of the others would be of another text on this rank
    for difference in ({"token_ids": tokens}, {"front": b"f" * 32}):
        ranks._donor_of = {1: dataclasses.replace(other, **difference)}.get
        for fidelity, is_taken in ((Fidelity.EXACT, False), (Fidelity.SHIFTED, True)):
            received = ranks._decoded(encoded(LoadSpan(10, 20, make_donor(1), 10, fidelity=fidelity)))
            assert (received.donor is not None) is is_taken
