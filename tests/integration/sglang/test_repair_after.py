"""Repair after the first token in SGLang: in its own scheduler with a model that keeps an account, and in real servers.

A prompt's first token is that of `selection=none`; from the second one on the answer is that of a repair before the first
token, wherever both drew the same first token. Tails are shorter than the query, so that both compute the same rows.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from loop import Loop, build_scheduler, next_token
from models import VOCABULARY
from server import SGLangServer
from test_slots import DOCUMENTS, fresh, script, take

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

TOLERANCE = 1e-4
ORDERS = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])


@pytest.fixture(scope="module")
def loop(model_dir, tmp_path_factory):
    settings = {"phase_cost_tokens": 1, "lookup_deadline_ms": 1e9, "state_dir": tmp_path_factory.mktemp("state")}
    return Loop(build_scheduler(model_dir("llama-1-layer"), settings, 4))


@pytest.fixture(autouse=True)
def clean(request):
    if "loop" in request.fixturenames:
        request.getfixturevalue("loop").reset()


class Asked:
    """A document that is known, and requests for it: SGLang's loop runs until `act`, called once a round, has done all."""

    def __init__(self):
        self.tokens = fresh()
        document = DOCUMENTS[0]
        self.donor = ("donor", [*take(self.tokens, 5), *document], 2, {"reuse": "off"})
        self.prompt = [*take(self.tokens, 9), *document, *take(self.tokens, 21)]

    def rounds(self, *rounds):
        return script([self.donor], *[[]] * 6, *rounds, *[[]] * 12)

    @property
    def first_token(self):
        return next_token(self.prompt[-1], len(self.prompt))


def repaired(report):
    return report["repair"]["time"], report["repair"]["from_token"], report["recomputed_tokens"] > 0


@ORDERS
@pytest.mark.parametrize("chunk", [32, 512])
def test_second_token_is_the_first_one_drawn_from_the_repaired_prompt(loop, overlap, chunk):
    asked = Asked()
    loop.run(asked.rounds([("a", asked.prompt, 5, {})]), overlap=overlap, chunk=chunk)
    report = loop.reports()["a"]
    assert repaired(report) == ("after", 2, True)
    assert report["corrected_tokens"] > 0
    assert loop.num_repaired == 1


@ORDERS
def test_several_of_one_batch_are_repaired_each_in_its_own_slots(loop, overlap):
    """Parallel sampling is this: requests of one prompt."""
    asked = Asked()
    loop.run(asked.rounds([(name, asked.prompt, 5, {}) for name in "abc"]), overlap=overlap)
    reports = loop.reports()
    assert [repaired(reports[name]) for name in "abc"] == [("after", 2, True)] * 3
    assert loop.num_repaired == 3


def most_repaired_in_a_step(loop, *, overlap, most_rows, mixed):
    """Eight prompts arrive while an answer streams; returns the most that one step repairs, and how many are repaired."""
    asked, repairs = Asked(), loop.reuse.repairs
    stream = ("stream", take(asked.tokens, 30), 60, {"reuse": "off"})
    burst = [
        (f"{number}", [*take(asked.tokens, 9), *DOCUMENTS[0], *take(asked.tokens, 21)], 3, {}) for number in range(8)
    ]
    before, steps = repairs.most_rows, []
    run_batch = loop.scheduler.run_batch

    def counted(batch, *args, **fields):
        num_repaired = loop.num_repaired
        result = run_batch(batch, *args, **fields)
        steps.append(loop.num_repaired - num_repaired)
        return result

    repairs.most_rows, loop.scheduler.run_batch = most_rows, counted
    try:
        loop.run(asked.rounds([stream], *[[]] * 8, burst), overlap=overlap, chunk=2048, mixed=mixed)
    finally:
        repairs.most_rows, loop.scheduler.run_batch = before, run_batch
    assert all(repaired(loop.reports()[rid]) == ("after", 2, True) for rid, *_ in burst)
    return max(steps), sum(steps)


@ORDERS
@pytest.mark.parametrize(
    ("mixed", "interval"),
    [(False, 0), (True, 0), (False, 2)],
    ids=["stock", "enable_mixed_chunk", "prefill_decode_interval"],
)
def test_repairs_of_a_burst_are_spread_over_steps(loop, overlap, mixed, interval, monkeypatch):
    monkeypatch.setattr(loop.scheduler, "prefill_decode_interval", interval)
    rows = loop.reuse.repairs.passes.recomputer.expected_rows(len(DOCUMENTS[0]))
    most, total = most_repaired_in_a_step(loop, overlap=overlap, most_rows=2 * rows + 1, mixed=mixed)
    assert (most <= 2, total) == (True, 8)


@ORDERS
def test_one_token_waits_for_the_repair(loop, overlap):
    asked = Asked()
    loop.run(asked.rounds([("a", asked.prompt, 1, {})]), overlap=overlap)
    report = loop.reports()["a"]
    assert repaired(report) == ("before", 1, True)
    assert report["repair"]["reason"] == "one token was asked for"


@ORDERS
def test_answer_that_ends_at_its_first_token_repairs_nothing(loop, overlap):
    asked = Asked()
    requests = [("a", asked.prompt, 9, {"stop": [asked.first_token]}), ("b", asked.prompt, 3, {})]
    loop.run(asked.rounds(requests), overlap=overlap)
    reports = loop.reports()
    assert repaired(reports["a"]) == ("after", None, False)
    assert repaired(reports["b"]) == ("after", 2, True)
    assert loop.num_repaired == 1


def when_running(loop, rid, num_drawn):
    """Whether a request has that many tokens of its answer, or was handed to the model with them."""
    batches = [loop.scheduler.running_batch, loop.scheduler.last_batch]
    reqs = {req for batch in batches if batch is not None for req in batch.reqs}
    return any(req.rid == rid and len(req.output_ids) == num_drawn for req in reqs)


@ORDERS
@pytest.mark.parametrize("event", ["abort", "retract"])
@pytest.mark.parametrize("num_drawn", [0, 1, 2])
def test_request_that_goes_away_around_its_repair_leaves_nothing_behind(loop, overlap, event, num_drawn):
    """At 0 drawn tokens, with overlap, the pass that draws the first one was launched and its result is not known."""
    asked, done = Asked(), []
    act = asked.rounds([("a", asked.prompt, 7, {})])

    def and_then(loop):
        is_over = act(loop)
        if not done and when_running(loop, "a", num_drawn):
            done.append(loop.num_repaired)
            loop.abort("a") if event == "abort" else loop.retract()
        return is_over

    loop.run(and_then, overlap=overlap)
    if not done:
        assert (num_drawn, overlap) == (0, False), "without overlap nobody acts between a pass and its result"
        return
    assert loop.reuse.books.num_requests == 0
    assert not loop.reuse.repairs.waiting
    if event == "abort":
        assert loop.num_repaired == done[0]
        return
    last = loop.attempts()["a"][-1]
    begun = last["num_tokens"] - len(asked.prompt)
    if begun:
        assert repaired(last) == ("before", begun + 1, True), "its next token is drawn from what was repaired"
        assert last["repair"]["reason"] == "its answer was begun before a retraction"
    else:
        assert repaired(last) == ("after", 2, True)
    assert loop.num_repaired == done[0] + (not begun)


@ORDERS
def test_weights_that_change_after_the_first_token_leave_old_kv_alone(loop, overlap):
    asked, done = Asked(), []
    act = asked.rounds([("a", asked.prompt, 7, {})])

    def and_then(loop):
        is_over = act(loop)
        if not done and loop.reuse.repairs.waiting:
            done.append(True)
            loop.reuse.books.weights_change()
        return is_over

    loop.run(and_then, overlap=overlap)
    assert done
    assert loop.num_repaired == loop.num_recomputed == 0
    assert repaired(loop.reports()["a"]) == ("after", None, False)


# Real servers

RATIO = 0.3


class Prompts:
    """A document, and prompts around parts of it: one region after an exact prefix, and three."""

    def __init__(self):
        self._rng = random.Random(11)
        self.doc, self.system = self.ids(608), self.ids(64)
        self.donors = [self.ids(48) + self.doc, self.system + self.ids(16)]
        doc = self.doc
        self.asked = [
            self.system + doc[96:400] + self.ids(40),
            self.ids(32) + doc[304:464] + self.ids(8) + doc[32:192] + self.ids(32),
        ]

    def ids(self, count):
        return [self._rng.randrange(3, VOCABULARY) for _ in range(count)]


def body(prompt, num_tokens, tenant, **asked):
    sampling = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    sampling["custom_params"] = {f"kvgraft_{name}": value for name, value in asked.items()}
    return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "cache_salt": tenant}


def known_to(server, prompts, *tenants):
    """Have tenants know the donors: one that asks a prompt again goes on from what it was answered from before."""
    for tenant in tenants:
        for donor in prompts.donors:
            server.generate(donor, 2, cache_salt=tenant)


def logprobs_of(got):
    return [entry[0] for entry in got["meta_info"]["output_token_logprobs"]]


def near(got, other, start, stop):
    assert got["output_ids"][start:stop] == other["output_ids"][start:stop]
    pairs = zip(logprobs_of(got)[start:stop], logprobs_of(other)[start:stop], strict=True)
    return max(abs(one - two) for one, two in pairs) < TOLERANCE


@pytest.fixture(scope="module")
def answers(model_dir):
    """Answers of a server that repairs and of one that does not, by prompt."""
    prompts, model = Prompts(), model_dir("llama")
    settings = {"KVGRAFT_MAX_GENERATION": "0", "KVGRAFT_RECOMPUTE_RATIO": str(RATIO)}
    with SGLangServer(model, {"--chunked-prefill-size": 128}, settings) as plain:
        known_to(plain, prompts, "none")
        none = [plain.post("/generate", body(prompt, 8, "none")) for prompt in prompts.asked]
    settings |= {"KVGRAFT_SELECTION": "query_seam"}
    with SGLangServer(model, {"--chunked-prefill-size": 128}, settings) as server:
        tenants = [f"{number}" for number in range(3)]
        known_to(server, prompts, "before", "after", *tenants)
        found = {
            time: [server.post("/generate", body(prompt, 8, time, repair=time)) for prompt in prompts.asked]
            for time in ("before", "after")
        }
        wrong = server.post("/generate", body(prompts.ids(50), 2, "wrong", repair="never"))
        asked = [body(prompt, 8, tenant) for tenant in tenants for prompt in prompts.asked]
        with ThreadPoolExecutor(6) as pool:
            crowd = list(pool.map(lambda each: server.post("/generate", each), asked))
        server.settle()  # the strict memory check at idle has seen every slot
        assert server.is_healthy(), server.log()[-3000:]
        assert "failed; it goes on without" not in server.log()
    return {"none": none, **found, "wrong": wrong, "crowd": crowd}


def report_of(got):
    return got["meta_info"]["kvgraft"][0]["report"]


def test_first_token_is_that_of_no_selection(answers):
    for got, other in zip(answers["after"], answers["none"], strict=True):
        assert near(got, other, 0, 1)


def test_later_tokens_are_those_of_a_repair_before_the_first_one(answers):
    compared = 0
    for got, other, none in zip(answers["after"], answers["before"], answers["none"], strict=True):
        assert report_of(got)["recomputed_runs"] == report_of(other)["recomputed_runs"] != []
        assert report_of(got)["corrected_tokens"] == report_of(other)["corrected_tokens"] > 0
        if got["output_ids"][0] == other["output_ids"][0]:
            assert near(got, other, 1, 8)
            compared += 1
            same = got["output_ids"] == none["output_ids"]
            assert (
                not same
                or max(abs(a - b) for a, b in zip(logprobs_of(got), logprobs_of(none), strict=True)) > TOLERANCE
            )
    assert compared


def test_reports_say_when(answers):
    for time, from_token in (("before", 1), ("after", 2)):
        for got in answers[time]:
            repair = report_of(got)["repair"]
            assert (repair["time"], repair["reason"], repair["from_token"]) == (time, None, from_token)
    assert all(report_of(got)["repair"] is None for got in answers["none"])


def test_time_that_does_not_exist_is_refused_by_name(answers):
    miss = report_of(answers["wrong"])["miss"]
    assert miss["reason"] == "reuse_off"
    assert miss["detail"] == "custom_params['kvgraft_repair'] must be before or after, not 'never'"


def test_load_changes_nothing(answers):
    for index, got in enumerate(answers["crowd"]):
        alone = answers["after"][index % len(answers["after"])]
        assert near(got, alone, 0, 8)
        assert report_of(got)["repair"] == report_of(alone)["repair"]


@pytest.mark.parametrize("options", [{}, {"--disable-overlap-schedule": None}], ids=["overlap", "no overlap"])
def test_an_unsure_first_token_is_drawn_from_what_is_repaired(model_dir, answers, options):
    """Here all are unsure: every answer is that of a repair before the first token, beside others too."""
    prompts, tenants = Prompts(), ["0", "1"]
    settings = {"KVGRAFT_MAX_GENERATION": "0", "KVGRAFT_RECOMPUTE_RATIO": str(RATIO), "KVGRAFT_SELECTION": "query_seam"}
    settings |= {"KVGRAFT_REPAIR_BELOW_MARGIN": "1"}
    with SGLangServer(model_dir("llama"), {"--chunked-prefill-size": 128, **options}, settings) as server:
        known_to(server, prompts, *tenants)
        asked = [body(prompt, 8, tenant) for tenant in tenants for prompt in prompts.asked]
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda each: server.post("/generate", each), asked))
        server.settle()
        assert server.is_healthy(), server.log()[-3000:]
        assert "failed; it goes on without" not in server.log()
    for index, one in enumerate(got):
        other = answers["before"][index % len(prompts.asked)]
        assert near(one, other, 0, 8)
        repair = report_of(one)["repair"]
        assert (repair["time"], repair["from_token"]) == ("before", 1)
        assert repair["reason"].startswith("the first token was likelier than the next one by 0.")
        for name in ("recomputed_runs", "corrected_tokens"):
            assert report_of(one)[name] == report_of(other)[name]


def test_retraction_changes_nothing(model_dir, answers):
    """An answer is a function of prompt, donors and settings: SGLang retracts every third step here."""
    prompts, tenants = Prompts(), ["0", "1", "2"]
    settings = {"KVGRAFT_MAX_GENERATION": "0", "KVGRAFT_RECOMPUTE_RATIO": str(RATIO), "KVGRAFT_SELECTION": "query_seam"}
    settings |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"}
    options = {
        "--chunked-prefill-size": 128,
        "--disable-overlap-schedule": None,
    }  # else before the first token is known
    with SGLangServer(model_dir("llama"), options, settings) as server:
        known_to(server, prompts, *tenants)
        asked = [body(prompt, 8, tenant) for tenant in tenants for prompt in prompts.asked]
        with ThreadPoolExecutor(6) as pool:
            got = list(pool.map(lambda each: server.post("/generate", each), asked))
        entries = [each["meta_info"]["kvgraft"][0] for each in got]
        assert server.is_healthy(), server.log()[-3000:]
    pairs = [(entry["attempts"], len(each["input_ids"])) for entry, each in zip(entries, asked, strict=True)]
    begun = [attempt for attempts, length in pairs for attempt in attempts if attempt["num_tokens"] > length]
    assert begun
    assert sum(len(entry["attempts"]) for entry in entries) > len(entries), "nothing was retracted"
    assert all(attempt["repair"]["time"] == "before" for attempt in begun)
    for index, each in enumerate(got):
        assert near(each, answers["after"][index % len(prompts.asked)], 0, 8)
