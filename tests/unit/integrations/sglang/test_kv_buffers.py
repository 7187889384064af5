"""Copies in the pool: values bit for bit, keys as if computed at the new position, from any slots or host memory."""

from __future__ import annotations

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


def test_bytes_are_those_of_all_layers():
    buffers = [torch.zeros(8, HEADS, DIM, dtype=torch.bfloat16) for _ in range(6)]
    pool = KVBuffers(buffers[:3], buffers[3:], [RopeSpec(INV_FREQ, RopePairing.HALF)] * 3)
    assert pool.bytes_per_token == 6 * HEADS * DIM * 2
    assert pool.num_slots == 8


class FakeStream:
    """Records that the scheduler's stream is waited for."""

    def __init__(self):
        self.waited = []

    def wait_stream(self, stream):
        self.waited.append(stream)


def test_work_is_queued_on_the_forward_stream_behind_the_schedulers(monkeypatch):
    """The order that a GPU needs; there is none here, so only the calls can be seen."""
    entered = []

    class Entered:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            entered.append(self.stream)

        def __exit__(self, *_):
            entered.append(None)

    stream = FakeStream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "scheduler")
    monkeypatch.setattr(torch.cuda, "stream", Entered)
    keys, values = torch.randn(64, HEADS, DIM), torch.randn(64, HEADS, DIM)
    pool = KVBuffers([keys], [values], [RopeSpec(INV_FREQ, RopePairing.HALF)], stream)
    pool.copy([SpanCopy(pool.source(torch.arange(1, 9)), 0, 5, 8)], torch.arange(20, 28))
    pool.export(torch.arange(1, 9))
    assert stream.waited == ["scheduler"] * 2
    assert entered == [stream, None] * 2
