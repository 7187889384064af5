"""Who gets a request: load, speed, policies, and how a worker is written."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from kvgraft.errors import ConfigError, OverloadedError
from kvgraft.reuse.donor_events import scope_of
from kvgraft.router import POLICIES, NoWorkerError, Prompt, Router, WorkerScore, WorkerSpec, parse_worker
from kvgraft.router.load import DECODE_COST_TOKENS, USUAL_PROMPT_TOKENS, WorkerLoad, reported_load
from kvgraft.router.policy import make_policy

SCOPE = scope_of()


def loads(*names):
    return [WorkerLoad(WorkerSpec(f"http://{name}:1", name=name), is_up=True) for name in names]


def prompt(num_tokens=1000, first=0):
    return Prompt(list(range(first, first + num_tokens)), SCOPE, b"")


# load


def test_queues_are_counted_in_tokens():
    (load,) = loads("a")
    first, second = load.begin(300), load.begin(0)
    assert (load.num_in_flight, load.queued_tokens) == (2, 301)
    load.first_token(first, None)
    assert load.queued_tokens == 1 + DECODE_COST_TOKENS
    load.end(first)
    load.end(second)
    assert (load.num_in_flight, load.queued_tokens) == (0, 0)


@pytest.mark.parametrize(
    "text",
    [
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0\nvllm:num_requests_waiting{engine="0"} 2.0\n',
        'sglang:num_running_reqs{model_name="m"} 3\nsglang:num_queue_reqs{model_name="m"} 2\n',
        'kvgraft:num_requests_running{model_name="m"} 3.0\nkvgraft:num_requests_waiting{model_name="m"} 2.0\n',
        'vllm:num_requests_running{m="/{a}/\\"b}",e="0"} 3\nvllm:num_requests_waiting{m="{",e="0"} 2\n',
        'vllm:num_requests_running{e="0"} 1\nvllm:num_requests_running{e="1"} 2\nvllm:num_requests_waiting{e="0"} 2e0\n',
    ],
)
def test_what_engines_report_is_read(text):
    (load,) = loads("a")
    load.report("# HELP x\n" + text + "vllm:num_requests_waiting_by_reason 99\n")
    assert (load.foreign_running, load.foreign_waiting) == (3, 2)
    assert load.queued_tokens == 2 * USUAL_PROMPT_TOKENS + 3 * DECODE_COST_TOKENS
    load.report("")
    assert load.queued_tokens == 0


@pytest.mark.parametrize("value", ["+Inf", "-Inf", "NaN", "1e999", "1e300", "-3", "+", "e", "many"])
def test_what_is_no_number_of_requests_is_passed_over(value):
    (load,) = loads("a")
    load.report(
        f'vllm:num_requests_waiting{{e="0"}} {value}\nvllm:num_requests_running {value}\nsglang:num_queue_reqs 2\n'
    )
    assert load.queued_tokens == 2 * USUAL_PROMPT_TOKENS
    assert reported_load(f"kvgraft:num_requests_running {value}\n") is None


def test_own_requests_are_not_counted_twice():
    (load,) = loads("a")
    load.begin(100)
    load.report("vllm:num_requests_running 1\n")
    assert load.queued_tokens == 100


def test_own_requests_that_ended_are_nobody_elses():
    """What metrics say is a second old; until they are read again, a request that has ended would be another's."""
    (load,) = loads("a")
    request = load.begin(100)
    load.report("kvgraft:num_requests_running 1\n")
    load.end(request)
    assert load.queued_tokens == 0
    load.report("kvgraft:num_requests_waiting 1\n", num_own=1)
    assert load.queued_tokens == 0, "it ended while the metrics were on their way"
    load.report("kvgraft:num_requests_waiting 1\nkvgraft:num_requests_running 1\n", num_own=1)
    assert load.queued_tokens == USUAL_PROMPT_TOKENS


def test_a_prefill_counts_with_what_is_left_of_it(monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr("kvgraft.router.load.time", clock)
    (load,) = loads("a")
    first = load.begin(1000)
    clock.now = 110.0
    assert load.queued_tokens == 1000, "nobody knows its speed"
    load.first_token(first, 1.0)
    load.end(first)
    second = load.begin(500)
    clock.now = 110.01
    third = load.begin(300)
    clock.now = 110.2
    assert load.queued_tokens == pytest.approx(600)
    clock.now = 1000.0
    assert load.queued_tokens == pytest.approx(550), "it may take much longer still"
    load.first_token(second, None)
    load.end(second)
    clock.now = 1000.1
    assert load.queued_tokens == pytest.approx(200), "the next one began when that had its token"
    load.end(third)
    assert load.queued_tokens == 0


def test_speed_is_the_median_of_prefills_that_ran_alone():
    (load,) = loads("a")
    assert load.seconds_per_token is None
    for seconds in (1.0, 2.0, 100.0):
        load.first_token(load.begin(1000), seconds)
    load.first_token(load.begin(1000), None)
    load.first_token(load.begin(3), 5.0)
    assert load.seconds_per_token == pytest.approx(0.002)


# policies


def chosen(name, workers, scores=None, what=None):
    return make_policy(name).choose(what or prompt(), workers, scores or {}).spec.name


def test_reuse_takes_who_holds_most():
    scores = {"a": WorkerScore(100, 0), "b": WorkerScore(0, 400), "c": WorkerScore(0, 0)}
    assert chosen("reuse", loads("a", "b", "c"), scores) == "b"


def test_an_exact_token_is_worth_more_than_a_shifted_one():
    scores = {"a": WorkerScore(0, 400), "b": WorkerScore(400, 0)}
    assert chosen("reuse", loads("a", "b"), scores) == "b"


def test_a_queue_outweighs_what_is_held():
    workers = loads("a", "b")
    scores = {"a": WorkerScore(400, 0), "b": WorkerScore(0, 0)}
    waiting = workers[0].begin(550)
    assert chosen("reuse", workers, scores) == "a"
    workers[0].begin(100)
    assert chosen("reuse", workers, scores) == "b"
    workers[0].end(waiting)
    assert chosen("reuse", workers, scores) == "a"


def test_speed_counts():
    slow, fast = workers = loads("slow", "fast")
    slow.first_token(slow.begin(1000), 10.0)
    fast.first_token(fast.begin(1000), 1.0)
    for load in workers:
        load.requests.clear()
    scores = {"slow": WorkerScore(500, 0), "fast": WorkerScore(0, 0)}
    assert chosen("reuse", workers, scores) == "fast", "computing all of it there is sooner"
    scores["slow"] = WorkerScore(950, 0)
    assert chosen("reuse", workers, scores) == "slow"


def test_what_nobody_holds_is_spread():
    workers, counts = loads("a", "b", "c"), Counter()
    for _ in range(9):
        worker = make_policy("reuse").choose(prompt(), workers, {})
        worker.end(worker.begin(10))
        counts[worker.spec.name] += 1
    assert set(counts.values()) == {3}


def test_what_nobody_holds_goes_where_most_is_held_as_long_as_there_is_room():
    workers = loads("a", "b", "c")
    scores = {name: WorkerScore(0, 0, held_tokens=held) for name, held in (("a", 10), ("b", 500), ("c", 0))}
    assert chosen("reuse", workers, scores) == "b"
    scores["b"] = WorkerScore(0, 0, held_tokens=500, is_full=True)
    assert chosen("reuse", workers, scores) == "a"
    waiting = workers[0].begin(10)
    assert chosen("reuse", workers, scores) == "c", "a queue counts first"
    workers[0].end(waiting)
    full = {name: WorkerScore(0, 0, held_tokens=500, is_full=True) for name in "abc"}
    counts = Counter()
    for _ in range(8):
        worker = make_policy("reuse").choose(prompt(), workers, full)
        worker.end(worker.begin(10))
        counts[worker.spec.name] += 1
    assert counts == {"a": 2, "b": 3, "c": 3}, "where all are full they take turns"


def test_what_one_holds_is_not_computed_by_another_for_a_short_queue():
    """As then it lies there twice."""
    workers = loads("a", "b")
    scores = {"a": WorkerScore(400, 0, held_tokens=400), "b": WorkerScore(0, 0, held_tokens=9000)}
    workers[0].begin(500)
    assert chosen("reuse", workers, scores) == "a"
    scores["a"] = WorkerScore(300, 0, held_tokens=400)
    assert chosen("reuse", workers, scores) == "b"


def test_speeds_that_differ_a_little_decide_nothing():
    """Or everything new goes to the one that was measured in a quieter moment."""
    slower, faster = workers = loads("slower", "faster")
    slower.first_token(slower.begin(1000), 1.3)
    faster.first_token(faster.begin(1000), 1.0)
    for load in workers:
        load.requests.clear()
    scores = {"slower": WorkerScore(50, 0), "faster": WorkerScore(0, 0)}
    assert chosen("reuse", workers, scores) == "slower"
    slower.first_token(slower.begin(1000), 60.0)
    slower.requests.clear()
    assert chosen("reuse", workers, scores) == "faster"


def test_round_robin_takes_turns():
    policy, workers = make_policy("round_robin"), loads("a", "b", "c")
    names = [policy.choose(prompt(), workers, {}).spec.name for _ in range(6)]
    assert names == ["a", "b", "c"] * 2


def test_prefix_hash_keeps_beginnings_together_and_moves_few():
    policy, workers = make_policy("prefix_hash"), loads("a", "b", "c", "d")
    before = {first: policy.choose(prompt(300, first), workers, {}).spec.name for first in range(200)}
    assert len(set(before.values())) == 4
    for first, name in before.items():
        assert policy.choose(prompt(900, first), workers, {}).spec.name == name, "what stands behind does not matter"
        after = policy.choose(prompt(300, first), workers[:3], {}).spec.name
        assert name in {after, "d"}
    arrays = Prompt(np.arange(300, dtype=np.int32), SCOPE, b"")
    assert policy.choose(arrays, workers, {}).spec.name == before[0]
    unread = {policy.choose(Prompt(None, SCOPE, bytes([n])), workers, {}).spec.name for n in range(60)}
    assert len(unread) == 4


def test_unknown_policies_are_named():
    with pytest.raises(
        ConfigError, match="unknown policy 'best'; choose reuse, round_robin, prefix_hash, least_loaded"
    ):
        make_policy("best")
    assert POLICIES[0] == "reuse"


# the router as a library


@pytest.fixture
def router():
    specs = [WorkerSpec(f"http://{name}:1", name=name) for name in ("a", "b")]
    router = Router(specs, max_in_flight=2)
    for load in router.loads.values():
        load.is_up = True
    yield router
    router.close()


def test_who_is_down_full_or_tried_is_not_chosen(router):
    a, b = router.loads.values()
    a.is_up = False
    assert router.choose(prompt(), {}).worker is b
    a.is_up = True
    b.begin(1), b.begin(1)
    assert router.choose(prompt(), {}).worker is a
    assert not router.has_room(without=["a"])
    with pytest.raises(OverloadedError, match="all workers have 2 requests"):
        router.choose(prompt(), {}, without=["a"])
    with pytest.raises(NoWorkerError, match="no worker answers"):
        router.choose(prompt(), {}, without=["a", "b"])


def test_seconds_are_told_where_the_speed_is_known(router):
    a = router.loads["a"]
    a.first_token(a.begin(1000), 2.0)
    scores = router.score([1, 2, 3])
    assert (scores["a"].seconds_saved, scores["b"].seconds_saved) == (0.0, None)
    choice = router.choose(prompt(), {"a": WorkerScore(900, 0), "b": WorkerScore(0, 0)})
    assert (choice.worker, choice.prefill_tokens) == (a, 100)


@pytest.mark.parametrize("token_ids", [[[1]], ["a"], [1.5], [1 << 40], None])
def test_a_prompt_is_a_list_of_token_ids(router, token_ids):
    with pytest.raises(ConfigError, match="token ids must"):
        router.score(token_ids)


# how workers are written


def test_a_worker_is_read():
    worker = parse_worker(
        "http://10.0.0.1:8001/v1/,events=tcp://h:1,replay=tcp://h:2,graft=true,topic=kv,name=w,label=pod"
    )
    expected = WorkerSpec("http://10.0.0.1:8001", "tcp://h:1", "tcp://h:2", "kv", graft=True, name="w", label="pod")
    assert worker == expected
    plain = parse_worker("http://h:8001")
    assert (plain.name, plain.label, plain.graft, plain.events) == ("h:8001", "http://h:8001", False, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h:8001", "a worker begins with its URL, such as http://127.0.0.1:8001, not 'h:8001'"),
        ("", "a worker begins with its URL"),
        ("http://h:1,gpu=1", "a worker has no option 'gpu=1'; write events, graft, label, name, replay, topic"),
        ("http://h:1,name=", "a worker has no option 'name='"),
        ("http://h:1,graft=yes", "graft of a worker is true or false, not 'yes'"),
        ("http://h:1,events=5557", "events of a worker is a ZMQ endpoint such as tcp://127.0.0.1:5557"),
        ("http://h:1,replay=tcp://h:2", "has replay= without events="),
    ],
)
def test_a_worker_that_is_written_wrongly_is_refused_in_one_line(text, message):
    with pytest.raises(ConfigError) as error:
        parse_worker(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_workers_have_names_of_their_own():
    with pytest.raises(ConfigError, match="two workers have the name 'h:1'"):
        Router([parse_worker("http://h:1"), parse_worker("http://h:1")])
    with pytest.raises(ConfigError, match="a router needs workers; give --worker URL"):
        Router([])
