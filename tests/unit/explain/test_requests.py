"""Reports are found wherever they lie, and cover the prompt; what is no report is refused in one line."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft.errors import ConfigError
from kvgraft.explain import RunKind, read_requests
from kvgraft.explain.hints import REASONS, hints, reason_in_words
from kvgraft.explain.page import page
from kvgraft.explain.terminal import WIDTH, bar, difference_lines, overview_lines, request_lines
from kvgraft.reuse.report import REPORT_VERSION
from kvgraft.types import CONTINUATION, MissReason


def span(start, length, delta=100, **more):
    donor_start = start - delta
    return {
        "target_start": start,
        "length": length,
        "donor_id": 7,
        "donor_start": donor_start,
        "position_delta": delta,
        "fidelity": "shifted",
        "generation": 0,
        "tier": "device",
        "documents": [],
    } | more


def report(num_tokens=1000, exact=50, spans=(), **more):
    spans = list(spans)
    copied = sum(each["length"] for each in spans)
    return {
        "version": REPORT_VERSION,
        "num_tokens": num_tokens,
        "exact_tokens": exact,
        "continued_tokens": 0,
        "shifted_tokens": copied,
        "substituted_tokens": 0,
        "recomputed_tokens": 0,
        "corrected_tokens": 0,
        "computed_tokens": num_tokens - exact - copied,
        "num_donors": 1,
        "policy": "query_seam",
        "miss": None,
        "spans": spans,
        "timings_ms": {"lookup": 0.3, "graft": 2.0},
        "risk": {"status": "uncalibrated", "reason": "no calibration"},
        "substitution": None,
    } | more


MISS = report(exact=0, miss={"reason": "no_match", "detail": "no donor shares a run of tokens"})
GRAFTED = report(spans=[span(200, 400), span(700, 100, 50, generation=1)])
TOKENS = {"usage": {"completion_tokens": 4}}


def one(entry):
    (found,) = read_requests(json.dumps(entry), "answers.json")
    return found


@pytest.mark.parametrize(
    "entry",
    [
        {"id": "a", "kvgraft": GRAFTED, **TOKENS},
        {"id": "a", "choices": [{"kvgraft": GRAFTED}], **TOKENS},
        {"id": "a", "kv_transfer_params": {"kvgraft": GRAFTED}, **TOKENS},
        {"id": "a", "response": {"kvgraft": GRAFTED}, **TOKENS},
        {"request_id": "a", "report": GRAFTED, "token_ids": [1, 2, 3, 4]},
        {"request_id": "a", "outcome": "finished", "output_tokens": 4, "attempts": [MISS, GRAFTED]},
    ],
    ids=["answer", "choice", "vllm", "responses", "generate", "file"],
)
def test_reports_are_found_wherever_engines_put_them(entry):
    found = one(entry)
    assert (found.request_id, found.output_tokens, found.last.num_tokens) == ("a", 4, 1000)
    kinds = [(run.start, run.length, str(run.kind), run.moved_by) for run in found.last.runs]
    assert kinds == [
        (0, 50, "exact", 0),
        (50, 150, "computed", 0),
        (200, 400, "shifted", 100),
        (600, 100, "computed", 0),
        (700, 100, "shifted", 50),
        (800, 200, "computed", 0),
    ]


def test_streams_and_files_with_lines_of_other_things_are_read():
    text = 'data: {"choices": []}\n\ndata: ' + json.dumps({"id": "s", "kvgraft": GRAFTED}) + '\n\ndata: [DONE]\n{"req'
    assert [request.request_id for request in read_requests(text, "stream")] == ["s"]


@pytest.mark.parametrize("choices", [{"a": 1}, [], [None], "text", None])
def test_choices_of_another_form_are_passed_over(choices):
    assert one({"id": "a", "kvgraft": GRAFTED, "choices": choices}).prompt_token_ids is None


def test_a_report_file_names_the_donors_requests():
    entry = {
        "request_id": "a",
        "attempts": [
            GRAFTED
            | {
                "sources": [
                    {"request": "first", "position": 60, "tier": "host"},
                    {"request": "second", "position": 9, "tier": "device"},
                ]
            }
        ],
    }
    assert [(run.donor, run.donor_start, run.tier) for run in one(entry).last.runs if run.donor] == [
        ("request first", 60, "host"),
        ("request second", 9, "device"),
    ]


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"version": 1}, "has no report"),
        ({"kvgraft": GRAFTED | {"version": REPORT_VERSION + 1}}, "later kvgraft"),
        ({"attempts": []}, "no whole report"),
        ({"kvgraft": {"num_tokens": 10}}, "no whole report"),
        ({"kvgraft": report(100, spans=[span(40, 200)])}, "overlaps"),
        ({"kvgraft": report(exact=300, spans=[span(200, 10)])}, "overlaps"),
        ({"kvgraft": report(spans=[span(200, 10, fidelity="novel")])}, "no whole report"),
        ({"kvgraft": GRAFTED | {"recomputed_tokens": "three"}}, "no whole report"),
        ({"kvgraft": GRAFTED | {"shifted_tokens": [3]}}, "no whole report"),
        ({"kvgraft": GRAFTED | {"miss": {"detail": "no reason"}}}, "no whole report"),
        ({"kvgraft": GRAFTED | {"miss": "no_match"}}, "no whole report"),
        ({"kvgraft": GRAFTED | {"timings_ms": {"lookup": "soon"}}}, "no whole report"),
        ({"kvgraft": GRAFTED | {"timings_ms": [1.0]}}, "no whole report"),
        ({"kvgraft": GRAFTED | {"full_flops": [1]}}, "no whole report"),
        ({"kvgraft": report(spans=[span(200, 10)], sources=[])} | {}, None),
    ],
)
def test_what_is_no_report_is_one_line(entry, told):
    if told is None:
        assert one(entry).last.num_tokens == 1000  # sources are of report files, and empty where nobody is known
        return
    with pytest.raises(ConfigError, match=told) as raised:
        one(entry)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["recomputed_tokens", "computed_tokens", "policy", "miss", "timings_ms"])
def test_a_report_without_a_field_is_explained(name):
    request = one({"id": "a", "kvgraft": {field: value for field, value in GRAFTED.items() if field != name}})
    assert page([request])
    assert list(request_lines(request))
    assert list(overview_lines([request]))
    assert list(difference_lines(request, one({"id": "b", "kvgraft": GRAFTED})))


def test_every_reason_has_words_and_a_remedy():
    assert set(REASONS) == set(MissReason)
    assert all(reason.words and reason.remedy for reason in REASONS.values())
    assert "does not know" in reason_in_words("tomorrow").words


def test_what_stands_in_front_is_named():
    told = list(hints(one({"kvgraft": GRAFTED}).last))
    assert told[0].startswith("150 new tokens at positions 50-199 stand before 500 copied ones")
    assert "100 tokens are copies of what stood after a graft" in told[1]
    assert not list(hints(one({"kvgraft": report(spans=[span(50, 20)])}).last))


def test_the_words_that_move_a_text_are_quoted_for_those_who_show_text():
    class Words:
        def between(self, start, stop):
            assert (start, stop) == (50, 200)
            return "It is now\n14:07:31 " + "and so on " * 20

    told = next(iter(hints(one({"kvgraft": GRAFTED}).last, Words())))
    assert told.startswith("150 new tokens (\u201cIt is now 14:07:31 and so on ")
    assert "\u2026\u201d) at positions 50-199" in told


HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m\U0001f600"


def test_hostile_names_are_harmless():
    entry = {
        "id": HOSTILE,
        "kvgraft": report(spans=[span(200, 400, documents=[{"id": HOSTILE}])], policy=HOSTILE, recomputed_tokens=3)
        | {"repair": {"time": "before", "reason": HOSTILE}},
    }
    request = one(entry)
    lines = list(request_lines(request))
    assert not any("\x1b" in line or "\u202e" in line for line in lines)
    told = page([request])
    assert "<script" not in told
    assert "&lt;script&gt;" in told
    assert "default-src 'none'" in told


class Words:
    """A text that stands for a prompt's."""

    def between(self, start, stop):
        return f"{HOSTILE} {start} & " + "word " * (stop - start)


class Letters:
    """A text of four characters a token."""

    def between(self, start, stop):
        return "abc " * (stop - start)


def test_text_is_shown_only_where_it_is_handed_in():
    request = one({"id": "a", "kvgraft": GRAFTED})
    assert "word" not in page([request])
    shown = page([request], text=Words())
    assert "word word" in shown
    assert "<script" not in shown
    lines = list(request_lines(request, text=Words()))
    assert all(len(line) <= WIDTH for line in lines)
    assert sum("word" in line for line in lines) > 20


def test_a_page_of_a_long_prompt_in_crumbs_is_small():
    spans = [span(16 * n, 8, generation=n % 3) for n in range(10, 2010)]
    told = page([one({"id": "a", "kvgraft": report(32_768, 100, spans)})])
    assert len(told.encode()) < 500_000
    told = page([one({"id": "a", "kvgraft": report(32_768, 100, spans[:500])})])
    assert len(told.encode()) < 500_000
    sources = [{"request": f"cmpl-{n % 10:032}-0", "position": 16 * n, "tier": "device"} for n in range(10, 2010)]
    request = one({"id": "a", "kvgraft": report(32_768, 100, spans) | {"sources": sources}})
    assert len(page([request], text=Letters()).encode()) < 500_000
    crumbs = [[8 + 16 * n, 1] for n in range(10, 2000)]
    told = page([one({"id": "a", "kvgraft": report(32_768, 0, [span(100, 32_600)], recomputed_runs=crumbs)})])
    assert len(told.encode()) < 100_000
    scattered = [[110 + 10 * n, 1] for n in range(3200)]
    request = one({"id": "a", "kvgraft": report(32_768, 0, [span(100, 32_600)], recomputed_runs=scattered)})
    assert len(page([request], text=Letters()).encode()) < 500_000


def test_text_is_whole_and_marks_what_was_computed_again():
    told = page([one({"id": "a", "kvgraft": AGAIN})], text=Letters())
    words = told.partition("<pre>")[2].partition("</pre>")[0]
    assert re.sub("<[^>]*>", "", words) == "abc " * 1000
    assert [len(part) for part in re.findall("<b>(.*?)</b>", words)] == [400, 160, 160]
    assert (
        "400 tokens shifted, from position 100 of donor 7, moved by +100, generation 0, 140 of them computed again"
        in words
    )


def test_runs_that_are_too_many_to_be_told_of_are_drawn():
    spans = [span(16 * n, 8) for n in range(10, 2010)]
    told = page([one({"id": "a", "kvgraft": report(32_768, 100, spans)})])
    drawn = re.findall(r'<path class="(\w+)" d="([^"]*)"', told)
    assert [kind for kind, _ in drawn] == ["computed", "shifted"]
    places = [int(left) for left in re.findall(r"M(\d+) ", drawn[0][1])]
    assert places == sorted(set(places))
    assert len(places) > 900


def test_bars_show_what_most_tokens_are():
    attempt = one({"kvgraft": GRAFTED}).last
    assert bar(attempt, 20) == "#...========..==...."
    assert bar(attempt, 1) in ".="
    assert "\x1b[34m" in bar(attempt, 20, colour=True)


AGAIN = report(
    spans=[span(200, 400), span(600, 100, 50)], recomputed_tokens=180, recomputed_runs=[[200, 100], [560, 80]]
)


def test_recomputed_tokens_are_told_apart_where_the_report_knows_them():
    request = one({"id": "a", "kvgraft": AGAIN})
    pieces = [(run.start, run.length, str(run.kind), run.donor_start) for run in request.last.pieces()]
    assert pieces[2:] == [
        (200, 100, "recomputed", 100),
        (300, 260, "shifted", 200),
        (560, 40, "recomputed", 460),
        (600, 40, "recomputed", 550),
        (640, 60, "shifted", 590),
        (700, 300, "computed", None),
    ]
    assert bar(request.last, 20) == "#...oo=====oo=......"
    told = " ".join(" ".join(request_lines(request)).split())
    assert "shifted, generation 0, 140 recomputed" in told
    assert page([request]).count('<path class="recomputed"') == 1
    assert list(one({"kvgraft": GRAFTED}).last.pieces()) == list(one({"kvgraft": GRAFTED}).last.runs)


@pytest.mark.parametrize("runs", [[[190, 20]], [[690, 20]], [[300, 0]], [[300, 5], [302, 5]], [[300]], [["a", "b"]], 7])
def test_recomputed_tokens_outside_what_was_copied_are_refused(runs):
    with pytest.raises(ConfigError, match="no whole report"):
        one({"kvgraft": AGAIN | {"recomputed_runs": runs}})


def repaired(**repair):
    """Report a graft of 1,254 tokens, 126 of them computed again and 1,100 corrected where the answer came to the repair."""
    done = {"time": "after", "reason": None, "from_token": 2, "rows_per_step": 0, "exact_from_token": None} | repair
    counts = {"recomputed_tokens": 126, "shifted_tokens": 1128, "corrected_tokens": 1100} if done["from_token"] else {}
    return report(3000, spans=[span(200, 1254)]) | counts | {"repair": done}


BEGAN = "Token 1 was drawn before the repair: nothing of the 1,254 reused tokens had been computed again."


@pytest.mark.parametrize(
    ("reported", "told"),
    [
        ({}, f"{BEGAN} From token 2 on, 126 were, and 1,100 were corrected."),
        (
            {"from_token": 4},
            BEGAN.replace("Token 1 was", "Tokens 1 to 3 were") + " From token 4 on, 126 were, and 1,100",
        ),
        (
            {"from_token": None},
            "The answer ended before the repair: nothing of the 1,254 reused tokens was computed again.",
        ),
        (
            {"time": "before", "from_token": 1},
            "The repair came first: 126 of the 1,254 reused tokens were computed again before token 1, and 1,100 were",
        ),
        (
            {"time": "before", "reason": "one token was asked for", "from_token": 1},
            "One token was asked for, so the repair came first: 126 of the 1,254",
        ),
        (
            {"exact_from_token": 30, "rows_per_step": 64},
            "126 were, and 1,100 were corrected. From token 30 on, nothing approximate was left",
        ),
        (
            {"exact_from_token": 2},
            f"{BEGAN} From token 2 on, nothing approximate was left: all K/V were those of a full",
        ),
        (
            {"exact_from_token": 30, "rows_per_step": 64, "healed_tokens": 1790},
            "those of a full prefill. 1,790 tokens of prompt and answer were computed again in order after token 1.",
        ),
        (
            {"from_token": None, "rows_per_step": 16},
            "steps after it computed up to 16 of them each, and the answer ended",
        ),
    ],
)
def test_it_is_said_from_which_token_on_what_was_repaired(reported, told):
    request = one({"id": "a", "kvgraft": repaired(**reported)})
    assert told in request.last.repair
    lines = list(request_lines(request))
    assert max(map(len, lines)) <= WIDTH
    assert request.last.repair in " ".join(" ".join(lines).split())
    assert f"<p>{request.last.repair}</p>" in page([request])


def test_nothing_is_said_of_a_repair_that_was_not():
    for entry in (GRAFTED, GRAFTED | {"repair": None}):
        request = one({"id": "a", "kvgraft": entry})
        assert request.last.repair == ""
        assert "repair" not in " ".join(request_lines(request)) + page([request])


@pytest.mark.parametrize("repair", ["after", 7, {"time": "after", "from_token": "two"}])
def test_a_repair_that_cannot_be_read_is_refused(repair):
    with pytest.raises(ConfigError, match="no whole report"):
        one({"kvgraft": GRAFTED | {"repair": repair}})


def test_requests_are_listed_and_compared():
    first, second = one({"id": "cold", "kvgraft": MISS}), one({"id": "warm", "kvgraft": GRAFTED})
    lines = list(overview_lines([first, second]))
    assert lines[1].split() == ["cold", "1000", "0", "0", "0", "1000", "no_match"]
    assert " ".join(line.strip() for line in lines[3:]) == f"no_match: {reason_in_words('no_match').words}"
    assert lines[2].split() == ["warm", "1000", "50", "0", "500", "450"]
    told = "\n".join(difference_lines(first, second))
    assert "shifted tokens                0        500  +500" in told
    assert "num tokens" not in told
    assert "no text that was read before" in " ".join(told.split())
    assert max(map(len, told.splitlines())) <= WIDTH


def test_exact_copies_are_told_apart_from_the_prefix_in_front_of_them():
    spans = [span(50, 150, 0, fidelity="exact", tier="host"), span(300, 400)]
    request = one({"kvgraft": report(exact=200, spans=spans, shifted_tokens=400, computed_tokens=400)})
    runs = [(run.start, run.stop, run.kind, run.tier) for run in request.last.runs]
    assert runs == [
        (0, 50, RunKind.EXACT, ""),
        (50, 200, RunKind.EXACT, "host"),
        (200, 300, RunKind.COMPUTED, ""),
        (300, 700, RunKind.SHIFTED, "device"),
        (700, 1000, RunKind.COMPUTED, ""),
    ]
    told = "\n".join(request_lines(request))
    assert "200 of 1000 prompt tokens reused exactly" in told
    assert "risk of the copied tokens" in told
    alone = one({"kvgraft": report(exact=200, spans=spans[:1], shifted_tokens=0, computed_tokens=800)})
    assert "risk" not in "\n".join(request_lines(alone))
    assert "moved by +0" in page([alone])


def continued(start, length, **more):
    """A span of what the prompt goes on from."""
    return span(start, length, 0, fidelity="continued", generation=1, donor_id=CONTINUATION) | more


GOING_ON = report(
    spans=[continued(50, 600), span(700, 100)], continued_tokens=600, shifted_tokens=100, computed_tokens=250
)
ALONE = report(
    spans=[continued(50, 600)],
    continued_tokens=600,
    shifted_tokens=0,
    computed_tokens=350,
    num_donors=0,
    policy="none",
    miss={"reason": "no_match", "detail": ""},
)


def test_what_a_prompt_goes_on_from_is_a_class_of_its_own_and_has_no_donor():
    request = one({"id": "a", "kvgraft": GOING_ON})
    assert [(run.start, run.stop, run.kind, run.donor) for run in request.last.runs] == [
        (0, 50, RunKind.EXACT, ""),
        (50, 650, RunKind.CONTINUED, ""),
        (650, 700, RunKind.COMPUTED, ""),
        (700, 800, RunKind.SHIFTED, "donor 7"),
        (800, 1000, RunKind.COMPUTED, ""),
    ]
    kinds = [RunKind.EXACT, RunKind.CONTINUED, RunKind.SHIFTED, RunKind.SUBSTITUTED, RunKind.COMPUTED]
    assert sum(map(request.last.tokens, kinds)) == request.last.num_tokens
    assert bar(request.last, 20) == "#++++++++++++.==...."
    told = " ".join(" ".join(request_lines(request)).split())
    assert "600 of 1000 prompt tokens continued from an earlier request" in told
    assert "positions 50-649 from the conversation before it (device memory, continued, generation 1)" in told
    assert "from position 600 of donor 7" in told
    assert "600 tokens go on from an answer that rested on copies: none is computed again" in told
    assert "risk of the copied tokens" in told
    assert max(map(len, request_lines(request))) <= WIDTH
    assert max(map(len, overview_lines([request]))) <= WIDTH


def test_its_page_draws_what_a_prompt_goes_on_from_and_links_it_to_no_donor():
    drawn = page([one({"id": "a", "kvgraft": GOING_ON})], text=Letters())
    assert '<span class="key continued"></span>600 continued</span>' in drawn
    assert "50-649: 600 tokens continued, from the conversation before it, generation 1" in drawn
    assert "<td>the conversation before it</td><td></td><td></td><td>1</td><td>device</td>" in drawn
    assert drawn.count('<polygon class="link') == 1
    assert "donor -2" not in drawn


def test_one_that_goes_on_and_copies_nothing_has_its_miss_and_its_risk():
    request = one({"id": "a", "kvgraft": ALONE})
    told = " ".join(" ".join(request_lines(request)).split())
    assert "nothing copied: no_match" in told
    assert "risk of the continued tokens: uncalibrated" in told
    assert "copies of what stood after a graft" not in told
    assert '<polygon class="link' not in page([request])
    lines = list(overview_lines([request]))
    assert lines[1].split() == ["a", "1000", "50", "600", "0", "350", "no_match"]
    assert re.search(r"continued tokens +0 +600 +\+600", "\n".join(difference_lines(one({"kvgraft": MISS}), request)))


def test_a_donor_that_stands_in_its_own_place_is_named_though_it_is_continued():
    in_place = report(
        spans=[continued(50, 600, donor_id=9)], continued_tokens=600, shifted_tokens=0, computed_tokens=350
    )
    told = " ".join(" ".join(request_lines(one({"kvgraft": in_place}))).split())
    assert "positions 50-649 from position 50 of donor 9 (device memory, continued, generation 1)" in told


def test_a_report_file_names_no_request_for_what_a_prompt_goes_on_from():
    sources = [None, {"request": "first", "position": 600, "tier": "host"}]
    request = one({"request_id": "a", "attempts": [GOING_ON | {"sources": sources}]})
    assert [run.donor for run in request.last.runs] == ["", "", "", "request first", ""]


@pytest.mark.parametrize("version", [1, 2])
def test_reports_of_before_have_no_continued_tokens(version):
    older = {name: value for name, value in GRAFTED.items() if name != "continued_tokens"} | {"version": version}
    assert one({"kvgraft": older}).last.tokens(RunKind.CONTINUED) == 0


@given(st.data())
def test_runs_cover_every_prompt(data):
    num_tokens = data.draw(st.integers(1, 300))
    cuts = sorted(data.draw(st.sets(st.integers(0, num_tokens), max_size=9)))
    exact = cuts.pop(0) if cuts else 0
    pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
    attempt = one({"kvgraft": report(num_tokens, exact, [span(start, stop - start) for start, stop in pairs])}).last
    assert [run.start for run in attempt.runs][1:] == [run.stop for run in attempt.runs][:-1]
    assert attempt.runs[-1].stop == num_tokens
    assert sum(run.length for run in attempt.runs if run.kind is RunKind.SHIFTED) == attempt.tokens(RunKind.SHIFTED)
    assert len(bar(attempt, 40)) == 40


@pytest.mark.parametrize("end", ["\u2028", "\u0085", "\u2029"])
def test_an_answer_whose_text_has_other_ends_of_lines_is_read(end):
    answers = [{"id": name, "choices": [{"text": f"one{end}two"}], "kvgraft": report()} for name in ("a", "b")]
    text = "\r\n".join(json.dumps(answer, ensure_ascii=False) for answer in answers)
    assert [request.request_id for request in read_requests(text, "file")] == ["a", "b"]


def test_a_length_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="is no whole report"):
        read_requests('{"id": "a", "kvgraft": {"num_tokens": Infinity, "exact_tokens": 0, "spans": []}}', "file")
