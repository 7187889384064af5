"""Names of blocks that requests go on from, on a stand-in for vLLM's request and a pool that is a dict."""

from __future__ import annotations

import pytest
from stand_ins import BLOCK, Request

from kvgraft.integrations.vllm.scheduler import EngineFacts
from kvgraft.integrations.vllm.scheduler.continuing import Continuing
from kvgraft.integrations.vllm.scheduler.private_hashes import is_private, is_tainted
from kvgraft.types import Namespace

NAMESPACE = Namespace("model")
TEXT = list(range(4 * BLOCK))


def make_continuing():
    facts = EngineFacts("model", (BLOCK,), BLOCK, 0, 1000, 64, 8, "")
    return Continuing(facts)


def make_request(tokens, name="one"):
    return Request(name, list(tokens), None, 10)


def found(request, pool):
    """Tokens of the longest run of blocks that the pool has under the request's hashes."""
    blocks = 0
    while blocks < len(request.block_hashes) and request.block_hashes[blocks] in pool:
        blocks += 1
    return blocks * BLOCK


def shared(continuing, tokens=TEXT, *, first=1, generation=1, answer=()):
    """The hashes of a request whose blocks from `first` on others may go on from, its answer included."""
    request = make_request(tokens)
    continuing.share(request, NAMESPACE, first, generation)
    for token in answer:
        request.extend([token])
    return request.block_hashes


def extend(continuing, request, pool, namespace=NAMESPACE):
    return continuing.extend(request, namespace, found(request, pool), lambda: found(request, pool))


def test_the_next_turn_finds_prompt_and_answer_of_the_last():
    continuing, answer = make_continuing(), list(range(900, 900 + BLOCK + 5))
    pool = set(shared(continuing, answer=answer))
    request = make_request(TEXT + answer + [7] * BLOCK)
    assert found(request, pool) == BLOCK, "the block before the graft is exact"
    assert extend(continuing, request, pool)
    assert is_tainted(request)
    assert found(request, pool) == 5 * BLOCK
    assert (continuing.exact_len(request, 5 * BLOCK), continuing.generation(request, 5 * BLOCK)) == (BLOCK, 1)
    assert continuing.is_found_rightly(request, 5 * BLOCK)


def test_names_are_private_and_public_hashes_stay():
    continuing = make_continuing()
    hashes, plain = shared(continuing), make_request(TEXT).block_hashes
    assert [is_private(value) for value in hashes] == [False, True, True, True]
    assert hashes[0] == plain[0]
    assert {len(value) for value in hashes} == {len(plain[0])}


@pytest.mark.parametrize("kind", ["other text", "another namespace", "another process", "after a reset"])
def test_what_must_not_be_found_is_not(kind):
    continuing, tokens, namespace = make_continuing(), list(TEXT), NAMESPACE
    pool = set(shared(continuing))
    if kind == "other text":
        tokens[0] = -1
    elif kind == "another namespace":
        namespace = Namespace("model", tenant_salt="other")
    elif kind == "another process":
        continuing = make_continuing()
        shared(continuing, [5] * 100)
    else:
        continuing.forget()
    request = make_request([*tokens, 7])
    plain = request.block_hashes
    assert not extend(continuing, request, pool, namespace)
    assert request.block_hashes is plain


def test_blocks_of_rising_generations_are_found_as_one_text():
    """Turn after turn copied more, from text that had been copied itself."""
    continuing = make_continuing()
    request = make_request(TEXT + [7] * 2 * BLOCK)
    for first, generation in ((1, 1), (3, 2), (4, 3)):
        continuing.share(request, NAMESPACE, first, generation)
    pool = set(request.block_hashes)
    later = make_request(TEXT + [7] * 2 * BLOCK + [8])
    assert extend(continuing, later, pool)
    assert found(later, pool) == 6 * BLOCK
    assert [continuing.generation(later, blocks * BLOCK) for blocks in range(1, 7)] == [0, 1, 1, 2, 3, 3]


def test_the_longest_text_is_taken_and_of_equal_ones_the_least_often_copied():
    continuing = make_continuing()
    pool = set(shared(continuing, generation=2)) | set(shared(continuing, TEXT[: 2 * BLOCK], generation=1))
    request = make_request([*TEXT, 7])
    assert extend(continuing, request, pool)
    assert continuing.generation(request, found(request, pool)) == 2
    pool |= set(shared(continuing, generation=1))
    request = make_request([*TEXT, 7])
    assert extend(continuing, request, pool)
    assert continuing.generation(request, found(request, pool)) == 1


def test_a_graft_after_continued_text_names_its_own_blocks():
    continuing = make_continuing()
    pool = set(shared(continuing, generation=1))
    request = make_request(TEXT + [7] * 2 * BLOCK)
    assert extend(continuing, request, pool)
    continuing.share(request, NAMESPACE, 4, 2)
    assert continuing.generation(request, 4 * BLOCK) == 1
    assert continuing.generation(request, 6 * BLOCK) == 2
    assert found(request, pool) == 4 * BLOCK, "those before keep their names"


def test_a_look_that_fails_leaves_the_hashes_as_they_were():
    continuing = make_continuing()
    shared(continuing)
    request = make_request(TEXT)
    plain = request.block_hashes
    with pytest.raises(ZeroDivisionError):
        continuing.extend(request, NAMESPACE, 0, lambda: 1 // 0)
    assert request.block_hashes is plain


@pytest.mark.parametrize(("num_stored", "is_more"), [(0, True), (BLOCK, True), (2 * BLOCK, False), (3 * BLOCK, False)])
def test_what_a_store_has_exactly_is_not_given_up_for_less(num_stored, is_more):
    """A request with names is withheld from stores."""
    continuing = make_continuing()
    pool = set(shared(continuing, TEXT[: 3 * BLOCK]))
    request = make_request([*TEXT, 7])
    plain = request.block_hashes
    found_len = found(request, pool)
    more = continuing.extend(request, NAMESPACE, found_len, lambda: found(request, pool), stored_len=num_stored)
    assert (more, is_tainted(request), request.block_hashes is plain) == (is_more, is_more, not is_more)


def test_before_anything_was_named_nothing_is_looked_for():
    assert not make_continuing().extend(make_request(TEXT), NAMESPACE, 0, lambda: 1 // 0)


def test_short_hashes_name_no_text():
    """Two texts could have the same one."""
    continuing, requests = make_continuing(), [make_request(TEXT) for _ in range(2)]
    for request in requests:
        request.block_hashes = [value[:12] for value in request.block_hashes]
        continuing.share(request, NAMESPACE, 1, 1)
    assert not set(requests[0].block_hashes[1:]) & set(requests[1].block_hashes[1:])


def test_a_request_does_not_find_its_own_secret_blocks_again():
    """It was preempted, with another text's K/V after text that it went on from."""
    continuing = make_continuing()
    pool = set(shared(continuing, TEXT[: 2 * BLOCK]))
    request = make_request(TEXT)
    assert extend(continuing, request, pool)
    continuing.keep_private(request, 2)
    pool |= set(request.block_hashes)
    assert not continuing.is_found_rightly(request, 4 * BLOCK)
    assert found(request, pool) == 2 * BLOCK, "what it went on from is there"


@pytest.mark.parametrize("is_between", [False, True])
def test_named_blocks_of_before_a_reset_are_not_found_again(is_between):
    """The pool was not emptied: a request that was given names before must not find them after."""
    continuing = make_continuing()
    pool = set(shared(continuing))
    request = make_request([*TEXT, 7])
    assert extend(continuing, request, pool)
    continuing.forget()
    if is_between:
        shared(continuing, [5] * 100)
    assert not continuing.is_found_rightly(request, found(request, pool))
    assert found(request, pool) == BLOCK


def test_hidden_blocks_are_not_found_and_those_before_are():
    continuing = make_continuing()
    hashes = shared(continuing)
    pool = set(hashes)
    hashes.hide_from(3)
    assert [value in pool for value in hashes] == [True, True, True, False]
