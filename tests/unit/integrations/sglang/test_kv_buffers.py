"""Copies in the pool: values bit for bit, keys as if computed at the new position, from any slots or host memory."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from kvgraft.graft.executor import SpanCopy
from kvgraft.graft.rope import RopePairing, RopeSpec
from kvgraft.integrations.sglang.donors.kv_buffers import KVBuffers

SLOTS, HEADS, DIM = 4096, 2, 16
INV_FREQ = 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)


def rope(raw, positions, pairing):
    angle = positions[:, None].double() * INV_FREQ.double()
    cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
    if pairing is RopePairing.HALF:
        first, second = raw.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    first, second = raw[..., ::2], raw[..., 1::2]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)


@pytest.mark.parametrize("pairing", list(RopePairing))
@pytest.mark.parametrize("order", ["ascending", "scattered", "ascending to scattered", "scattered to ascending"])
@pytest.mark.parametrize("origin", ["device", "host"])
@pytest.mark.parametrize("length", [1, 700])
def test_copy_equals_encoding_at_the_new_position(pairing, order, origin, length):
    raw, values = torch.randn(length, HEADS, DIM), torch.randn(length, HEADS, DIM)
    buffers = [torch.zeros(SLOTS, HEADS, DIM) for _ in range(2)]
    pool = KVBuffers([buffers[0]], [buffers[1]], [RopeSpec(INV_FREQ, pairing)])
    slots = torch.arange(5, 5 + length) if order.startswith("ascending") else torch.randperm(2000)[:length] + 1
    targets = torch.arange(3000, 3000 + length) if order.endswith("ascending") else torch.randperm(1000)[:length] + 3000
    buffers[0][slots] = rope(raw, torch.arange(40, 40 + length), pairing)
    buffers[1][slots] = values
    source = slots
    if origin == "host":
        source = pool.export(slots)
        buffers[0][slots] = 0
    pool.copy([SpanCopy(pool.source(source), 40, 333, length)], targets)
    expected = rope(raw, torch.arange(333, 333 + length), pairing)
    torch.testing.assert_close(buffers[0][targets], expected, atol=2e-4, rtol=0)
    assert torch.equal(buffers[1][targets], values)


def test_copy_to_the_same_position_is_bit_equal():
    keys, values = torch.randn(SLOTS, HEADS, DIM), torch.randn(SLOTS, HEADS, DIM)
    pool = KVBuffers([keys], [values], [RopeSpec(INV_FREQ, RopePairing.HALF)])
    pool.copy(
        [SpanCopy(pool.source(torch.arange(10, 50)), 7, 7, 40), SpanCopy(pool.source(torch.arange(60, 70)), 9, 9, 10)],
        torch.arange(100, 150),
    )
    assert torch.equal(keys[100:150], torch.cat([keys[10:50], keys[60:70]]))
    assert torch.equal(values[100:150], torch.cat([values[10:50], values[60:70]]))


@pytest.mark.parametrize("pairing", list(RopePairing))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extra", [0, 4])  # channels that do not rotate
def test_spans_come_out_the_same_wherever_their_slots_lie(pairing, dtype, extra):
    """Slots in a row are written to without a detour; every bit is that of the detour."""
    kept = torch.randn(2, SLOTS, HEADS, DIM + extra).to(dtype)
    spans = ((torch.arange(10, 700), 7, 900), (torch.arange(2000, 1500, -1), 40, 1590), (torch.arange(800, 810), 9, 9))
    copied = []
    for targets in (torch.arange(2500, 3700), torch.arange(3700, 2500, -1)):
        buffers = kept.clone()
        pool = KVBuffers([buffers[0]], [buffers[1]], [RopeSpec(INV_FREQ, pairing)])
        pool.copy([SpanCopy(pool.source(slots), at, to, len(slots)) for slots, at, to in spans], targets)
        copied.append(buffers[:, targets])
        untouched = torch.ones(SLOTS, dtype=torch.bool).index_fill_(0, targets, value=False)
        assert torch.equal(buffers[:, untouched], kept[:, untouched])
    assert torch.equal(*copied)


def test_bytes_are_those_of_all_layers():
    buffers = [torch.zeros(8, HEADS, DIM, dtype=torch.bfloat16) for _ in range(6)]
    pool = KVBuffers(buffers[:3], buffers[3:], [RopeSpec(INV_FREQ, RopePairing.HALF)] * 3)
    assert pool.bytes_per_token == 6 * HEADS * DIM * 2
    assert pool.num_slots == 8


class Streams:
    """A GPU's two streams, as far as calls show the order of what is queued on them."""

    def __init__(self, monkeypatch):
        self.calls = []
        self.scheduler, self.forward = (Stream(name, self.calls) for name in ("scheduler", "forward"))
        self.current = self.scheduler
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.entered)

    @contextmanager
    def entered(self, stream):
        self.current, before = stream, self.current
        self.calls.append(f"work on {stream.name}")
        try:
            yield
        finally:
            self.current = before


class Stream:
    """Says whom it waits for."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def wait_stream(self, other):
        self.calls.append(f"{self.name} waits for {other.name}")


IN_ORDER = ["forward waits for scheduler", "work on forward", "scheduler waits for forward"]
"""The model runs on the forward stream where its passes overlap with scheduling, else on the scheduler's."""


def test_work_comes_after_what_either_stream_has_and_before_what_either_gets(monkeypatch):
    """The order that a GPU needs; there is none here, so only the calls can be seen."""
    streams = Streams(monkeypatch)
    keys, values = torch.randn(64, HEADS, DIM), torch.randn(64, HEADS, DIM)
    pool = KVBuffers([keys], [values], [RopeSpec(INV_FREQ, RopePairing.HALF)], streams.forward)
    pool.copy([SpanCopy(pool.source(torch.arange(1, 9)), 0, 5, 8)], torch.arange(20, 28))
    assert streams.calls == IN_ORDER
    pool.export(torch.arange(1, 9))
    assert streams.calls == IN_ORDER * 2


def test_order_holds_where_the_work_fails(monkeypatch):
    streams = Streams(monkeypatch)
    pool = KVBuffers([torch.zeros(8, 1, 4)], [torch.zeros(8, 1, 4)], [], streams.forward)
    with pytest.raises(IndexError):
        pool.export(torch.tensor([99]))
    assert streams.calls == IN_ORDER


def test_export_that_is_not_waited_for_is_queued_and_recorded_behind(monkeypatch):
    streams, recorded = Streams(monkeypatch), []

    class Event:
        def record(self, on):
            recorded.append(on)

        def query(self):
            return len(recorded) > 1

    monkeypatch.setattr(torch.cuda, "Event", Event)
    keys, values = torch.randn(64, HEADS, DIM), torch.randn(64, HEADS, DIM)
    rope = [RopeSpec(INV_FREQ, RopePairing.HALF)]
    export = KVBuffers([keys], [values], rope, streams.forward).begin_export(torch.arange(1, 9))
    assert (streams.calls, recorded, export.num_tokens) == (IN_ORDER, [streams.forward], 8)
    assert not export.is_ready
    recorded.append("the copy has run")
    assert export.is_ready
    now = KVBuffers([keys], [values], rope).begin_export(torch.arange(1, 9))
    assert now.is_ready
    keys[1:9] = 0
    assert torch.equal(now.block.keys[0], export.block.keys[0]), "a copy, whatever becomes of the slots"


def test_rows_of_a_store_are_named_by_shapes_types_and_rotations():
    def layout(dtype=torch.float32, pairing=RopePairing.HALF, base=1.0, heads=HEADS):
        buffers = [torch.zeros(8, heads, DIM, dtype=dtype) for _ in range(4)]
        return KVBuffers(buffers[:2], buffers[2:], [RopeSpec(base * INV_FREQ, pairing)] * 2).row_layout()

    assert layout().bytes_per_token == 4 * HEADS * DIM * 4
    assert layout() == layout()
    others = [layout(torch.bfloat16), layout(pairing=RopePairing.INTERLEAVED), layout(base=2.0), layout(heads=1)]
    assert len({each.description for each in (layout(), *others)}) == 5
