"""Private block hashes, against a stand-in for vLLM's request that hashes as vLLM does: chained, as blocks fill up."""

from __future__ import annotations

import hashlib

import pytest

from kvgraft.errors import IntegrationError
from kvgraft.integrations.vllm.scheduler.private_hashes import PrivateBlockHashes, make_private

BLOCK = 4


class Request:
    def __init__(self, tokens):
        self.tokens, self.block_hashes = [], []
        self.grow(tokens)

    def grow(self, tokens):
        self.tokens += tokens
        new = []
        for start in range(len(self.block_hashes) * BLOCK, len(self.tokens) - BLOCK + 1, BLOCK):
            parent = (self.block_hashes + new)[-1:] or [b"root"]
            new.append(hashlib.sha256(parent[0] + repr(self.tokens[start : start + BLOCK]).encode()).digest())
        self.block_hashes.extend(new)


@pytest.mark.parametrize("first", range(5))
@pytest.mark.parametrize("num_tokens", range(14))
def test_every_block_from_the_first_on_is_private_whenever_it_fills_up(first, num_tokens):
    tokens = list(range(24))
    request, plain = Request(tokens[:num_tokens]), Request(tokens)
    make_private(request, first)
    for token in tokens[num_tokens:]:
        request.grow([token])
    assert len(request.block_hashes) == 6
    for block, (mine, public) in enumerate(zip(request.block_hashes, plain.block_hashes, strict=True)):
        assert len(mine) == len(public)
        assert (mine == public) == (block < first)


def test_two_requests_with_the_same_text_share_nothing_private():
    requests = [Request(list(range(20))) for _ in range(2)]
    for request in requests:
        make_private(request, 2)
    one, other = (request.block_hashes for request in requests)
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])


def test_renewed_hashes_are_not_found_again():
    request = Request(list(range(20)))
    hashes = make_private(request, 2)
    before = list(hashes)
    hashes.renew()
    assert hashes[:2] == before[:2]
    assert not set(hashes[2:]) & set(before)


def test_a_later_graft_can_only_make_more_private():
    request = Request(list(range(20)))
    public = list(request.block_hashes)
    hashes = make_private(request, 3)
    make_private(request, 4)
    assert request.block_hashes is hashes
    assert hashes.first_private == 3
    make_private(request, 1)
    assert [mine == theirs for mine, theirs in zip(hashes, public, strict=True)] == [True] + [False] * 4


def test_a_deleted_tail_is_private_again_when_it_is_written_anew():
    """vLLM deletes hashes where a streaming session drops its last token."""
    request = Request(list(range(20)))
    public = list(request.block_hashes)
    make_private(request, 2)
    del request.block_hashes[1:], request.tokens[4:]
    request.grow(list(range(4, 20)))
    assert [mine == theirs for mine, theirs in zip(request.block_hashes, public, strict=True)] == [True] * 2 + [
        False
    ] * 3


def test_entries_that_are_added_one_by_one_are_private_too():
    hashes = PrivateBlockHashes([b"a" * 32], 1)
    hashes.append(b"b" * 32)
    hashes += [b"c" * 32]
    assert hashes[0] == b"a" * 32
    assert b"b" * 32 not in hashes
    assert b"c" * 32 not in hashes


@pytest.mark.parametrize("form", [(b"a",), ["a"], [1], None])
def test_hashes_of_another_form_are_refused_and_left_alone(form):
    request = Request([])
    request.block_hashes = form
    with pytest.raises(IntegrationError, match="another form"):
        make_private(request, 0)
    assert request.block_hashes is form


@pytest.mark.parametrize("first", range(6))
@pytest.mark.parametrize("kept", range(6))
def test_a_session_that_takes_back_its_last_blocks_goes_on_in_private(first, kept):
    request = Request(list(range(20)))
    make_private(request, first)
    before = list(request.block_hashes)
    del request.block_hashes[kept:]  # as vLLM does where a streamed session drops what it generated
    del request.tokens[kept * BLOCK :]
    request.grow(list(range(100, 120)))
    plain = Request([*range(kept * BLOCK), *range(100, 120)])
    assert request.block_hashes[:kept] == before[:kept]
    for block, (mine, public) in enumerate(zip(request.block_hashes, plain.block_hashes, strict=True)):
        # What was taken back from in front of the graft is computed anew behind exact text, and may be shared again.
        assert (mine == public) == (block < first)
