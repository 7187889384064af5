"""Heads of stored donors: what they say, what names them, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvgraft.errors import StoreError
from kvgraft.memory.store.record import (
    PAGE_TOKENS,
    DonorRecord,
    decode_head,
    encode_head,
    head_size,
    object_size,
    space_name,
)

SPACE = space_name("weights", "float32")
RECORD = DonorRecord(b"k" * 16, np.arange(600, dtype=np.int32), generation=2, start_position=37, front=b"f" * 32)
SUMS = np.array([1, 2**63, 2**64 - 1], np.uint64)
HEAD = encode_head(RECORD, SPACE, '{"fields":[]}', 96, SUMS)


def test_a_head_says_what_was_written():
    head = decode_head(HEAD, SPACE, RECORD.key)
    assert (head.layout, head.bytes_per_token, head.num_bytes) == ('{"fields":[]}', 96, len(HEAD))
    assert np.array_equal(head.checksums, SUMS)
    assert np.array_equal(head.record.token_ids, RECORD.token_ids)
    assert not head.record.token_ids.flags.writeable
    assert (head.record.generation, head.record.start_position, head.record.namespace_key) == (2, 37, b"k" * 16)


def test_its_length_is_known_from_its_beginning():
    assert head_size(b"") == 8
    behind_json = head_size(HEAD[:8])
    assert 8 < behind_json < len(HEAD)
    for end in (behind_json, behind_json + 1, len(HEAD), len(HEAD)):
        assert head_size(HEAD[:end]) == len(HEAD)
        assert object_size(HEAD[:end]) == len(HEAD) + 600 * 96
    assert head_size(HEAD + bytes(100)) == len(HEAD)


@pytest.mark.parametrize("num_tokens", [1, PAGE_TOKENS, PAGE_TOKENS + 1, 5 * PAGE_TOKENS])
def test_there_is_a_checksum_per_page(num_tokens):
    record = replace(RECORD, token_ids=np.zeros(num_tokens, np.int32))
    assert record.num_pages == -(-num_tokens // PAGE_TOKENS)
    sums = np.zeros(record.num_pages + 1, np.uint64)
    decode_head(encode_head(record, SPACE, "x", 8, sums[1:]), SPACE, record.key)
    with pytest.raises(StoreError, match="damaged"):
        decode_head(encode_head(record, SPACE, "x", 8, sums), SPACE, record.key)


def test_every_part_of_a_donor_is_in_its_name():
    other_tokens = RECORD.token_ids.copy()
    other_tokens[599] += 1
    others = [
        replace(RECORD, namespace_key=b"l" * 16),
        replace(RECORD, token_ids=other_tokens),
        replace(RECORD, token_ids=RECORD.token_ids[:-1]),
        replace(RECORD, generation=3),
        replace(RECORD, start_position=38),
    ]
    names = {record.key for record in (RECORD, *others)}
    assert len(names) == 6
    assert all(len(name) == 32 and not name.strip("0123456789abcdef") for name in names)


def test_a_salt_cannot_be_guessed_from_a_name_alone():
    """The namespace keys the hash, so that equal texts of two tenants have unrelated names."""
    one, other = RECORD.key, replace(RECORD, namespace_key=b"l" * 16).key
    assert sum(a == b for a, b in zip(one, other, strict=True)) < 16


@pytest.mark.parametrize(
    ("raw", "space", "key"),
    [
        (HEAD, space_name("other"), RECORD.key),
        (HEAD, SPACE, RECORD.key[::-1]),
        (HEAD[:-1], SPACE, RECORD.key),
        (HEAD + b"\0", SPACE, RECORD.key),
        (b"", SPACE, RECORD.key),
        (b"\xff" * 100, SPACE, RECORD.key),
        (HEAD[:8] + b"[" + HEAD[9:], SPACE, RECORD.key),
        (HEAD.replace(b'"kvgraft":"4"', b'"kvgraft":"3"'), SPACE, RECORD.key),
        (HEAD.replace(b'"front":"66', b'"front":"67'), SPACE, RECORD.key),
        (HEAD.replace(b'"page_tokens":"256"', b'"page_tokens":"128"'), SPACE, RECORD.key),
        (HEAD.replace(b'"generation":"2"', b'"generation":"1"'), SPACE, RECORD.key),
    ],
)
def test_what_is_foreign_or_damaged_is_refused_in_one_line(raw, space, key):
    with pytest.raises(StoreError) as refused:
        decode_head(raw, space, key)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("raw", [b"\0" * 8, b"\xff" * 8, (10).to_bytes(8, "little") + b"not json!!", HEAD[:8] + b"[]"])
def test_what_is_no_head_has_no_length(raw):
    for told in (head_size, object_size):
        if told is head_size and len(raw) < int.from_bytes(raw[:8], "little") + 8 <= 1 << 16:
            assert told(raw) == int.from_bytes(raw[:8], "little") + 8, "more must be read first"
            continue
        with pytest.raises(StoreError):
            told(raw)


def test_spaces_depend_on_every_part_and_where_it_ends():
    names = {space_name(*parts) for parts in (("a", "b"), ("ab",), ("a", "b", ""), ("b", "a"), ("a\0b",), ())}
    assert len(names) == 6
