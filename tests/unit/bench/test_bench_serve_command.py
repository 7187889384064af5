"""`kvgraft bench serve` from its arguments to what it prints and writes, against a fake server."""

from __future__ import annotations

import json

import pytest

from kvgraft.bench.server_process import ServerProcess, rss_bytes
from kvgraft.cli import main
from kvgraft.errors import ConfigError

URL = "http://simulated"


@pytest.fixture
def pack(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"input": f"prompt {i}", "t": i / 4}) + "\n" for i in range(40)))
    return str(path)


def run(capsys, *argv):
    code = main(["bench", "serve", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_table_json_and_plot(capsys, pack, simulated, tmp_path):
    files = (tmp_path / "load.json", tmp_path / "load.png")
    options = (
        "--rates",
        "40,20",
        "--duration",
        "0.5",
        "--warmup",
        "3",
        "--modes",
        "off,graft",
        "--slo-ttft-ms",
        "2000",
    )
    code, out, err = run(capsys, pack, "--url", URL, *options, "--json", files[0], "--plot", files[1], "--rows")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "40 prompts" in lines[0]
    assert "pack's arrivals" in lines[0]
    assert "cache_salt" in lines[1]
    assert "3 requests sent before measuring" in lines[1]
    assert [line.split()[:3] for line in lines[4:8]] == [
        ["20/s", "off", "10/10"],
        ["20/s", "graft", "10/10"],
        ["40/s", "off", "20/20"],
        ["40/s", "graft", "20/20"],
    ]
    assert "graft  at least 40 requests/s, 1.00x off" in out
    assert "less than 10 s of arrivals" in out
    record = json.loads(files[0].read_text())
    assert record["settings"]["warmup"] == 3
    assert "api_key" not in record["settings"]
    assert record["versions"]["kvgraft"]
    assert record["workload"] == {"name": "chat", "prompts": 40, "skipped": 0, "recorded_arrivals": True}
    assert [(r["mode"], r["rate"], r["completed"]) for r in record["runs"]][2:] == [("off", 40, 20), ("graft", 40, 20)]
    assert {r["mode"]: r["ratio"] for r in record["sustained"]} == {"off": 1.0, "graft": 1.0}
    assert len(record["rows"]) == 60
    assert files[1].stat().st_size > 1_000


def test_clients_in_place_of_rates(capsys, pack, simulated, tmp_path):
    options = ("--clients", "1,4", "--requests", "12", "--warmup", "2", "--modes", "off,graft")
    code, out, _ = run(capsys, pack, "--url", URL, *options, "--plot", tmp_path / "c.png")
    assert code == 0
    lines = [line.split()[:3] for line in out.splitlines() if line.lstrip().startswith("c=")]
    assert lines[:4] == [
        ["c=1", "off", "12/12"],
        ["c=1", "graft", "12/12"],
        ["c=4", "off", "12/12"],
        ["c=4", "graft", "12/12"],
    ]
    assert "c=4: requests/s in times of off's: graft 1.00x" in out
    assert "sustained" not in out
    assert (tmp_path / "c.png").stat().st_size > 1_000


def test_named_servers_beside_each_other(capsys, pack, simulated):
    urls = ("--url", f"off={URL}", "--url", f"ours={URL}")
    options = ("--clients", "2", "--requests", "6", "--warmup", "1", "--check", "3")
    code, out, _ = run(capsys, pack, *urls, *options, "--json", "-")
    record = json.loads(out)
    assert code == 0
    assert list(record["sides"]) == ["off", "ours"]
    assert record["checks"] == {"ours": {"num_equal": 3, "num_asked": 3, "failure": None}}
    assert [(r["mode"], r["clients"]) for r in record["runs"]] == [("off", 2), ("ours", 2)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--url", f"a={URL}", "--url", f"a={URL}"], "two servers are named 'a'"),
        (["--url", f"a={URL}", "--url", URL], "several servers need names"),
        (["--url", URL, "--clients", "2", "--search"], "--search looks for a rate"),
    ],
)
def test_sides_that_cannot_be_told_apart_are_one_line(capsys, pack, options, words):
    code, _, err = run(capsys, pack, *options)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


def test_json_on_stdout_leaves_the_table_to_stderr(capsys, pack, simulated):
    code, out, err = run(capsys, pack, "--url", URL, "--rates", "50", "--requests", "9", "--warmup", "0", "--json", "-")
    record = json.loads(out)
    assert code == 0
    assert "rows" not in record
    assert record["slo_ttft_ms"] == record["runs"][0]["ttft_ms"]["p95"]
    assert "TTFT" in err


def test_search_finds_the_limit_of_a_server_that_takes_one_at_a_time(capsys, pack, simulated):
    simulated.prefill_s, simulated.tokens = 0.04, 1
    # 25 a second at most
    options = ("--search", "--rates", "10", "--requests", "16", "--warmup", "0", "--modes", "off", "--max-runs", "3")
    code, out, _ = run(capsys, pack, "--url", URL, *options, "--slo-ttft-ms", "400", "--json", "-")
    assert code == 0
    record = json.loads(out)
    assert [run["rate"] for run in record["runs"]] == [10.0, 20.0, 40.0]
    (sustained,) = record["sustained"]
    assert (sustained["rate"], sustained["at_least"]) == (20.0, False)


def test_saturated_server_is_said_and_ends_soon(capsys, pack, simulated):
    simulated.prefill_s = 0.3
    options = ("--rates", "20,40", "--requests", "30", "--warmup", "0", "--modes", "off", "--give-up-after", "0.5")
    code, out, _ = run(capsys, pack, "--url", URL, *options)
    assert code == 0
    assert out.count("saturated: a request waited 0.5 s") == 1
    assert "off was stable at no rate" in out


def test_failed_requests_fail_the_command_and_are_named(capsys, pack, simulated):
    simulated.status = 500
    code, out, _ = run(
        capsys, pack, "--url", URL, "--rates", "50", "--requests", "5", "--warmup", "1", "--modes", "off"
    )
    assert code == 1
    assert "5 http 500; 1 http 500 in warm-up" in out


def test_long_prompts_are_left_out_and_said(capsys, tmp_path, fake):
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps({"input": f"{i} " * n}) + "\n" for i, n in enumerate((1, 900, 2)))
    )
    options = ("--rates", "50", "--requests", "2", "--warmup", "0", "--modes", "off", "--prompt-tokens-limit", "100")
    code, out, _ = run(capsys, tmp_path / "x", "--url", fake.url, *options)
    assert code == 0
    assert "1 prompts were left out" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--warmup", "-1"], "--warmup must be at least 0"),
        (["--requests", "0"], "--requests must be at least 1"),
        (["--duration", "0"], "--duration must be above 0"),
        (["--give-up-after", "nan"], "--give-up-after must be above 0"),
        (["--warmup", "40"], "--warmup takes 40"),
        (["--json", "no/such/folder/x.json"], "the folder does not exist"),
        (["--model", "m"], "leave out --url"),
        (["--warmup", "0"], "is a server running there"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(capsys, pack, options, words):
    code, _, err = run(capsys, pack, "--url", "http://127.0.0.1:1", *options)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


def test_server_arguments_that_are_not_closed_are_one_line(capsys, pack):
    code, _, err = run(capsys, pack, "--server-args", "--host 'a")
    assert code == 2
    assert '--server-args "--host \'a" cannot be taken apart: No closing quotation; close it' in err
    assert err.count("\n") == 1


def test_missing_pack_is_one_line(capsys, tmp_path):
    code, _, err = run(capsys, tmp_path / "nothing", "--url", "http://127.0.0.1:1")
    assert code == 2
    assert "no request pack" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rates", "1,two"], "not a list of rates"),
        (["--rates", "0"], "above 0"),
        (["--rates", "inf"], "above 0"),
        (["--rates", ""], "not a list of rates"),
        (["--modes", "off,fast"], "'fast' is no reuse mode"),
        (["--clients", "0"], "not a list of clients"),
        (["--url", "=http://x"], "neither URL nor NAME=URL"),
    ],
)
def test_lists_that_make_no_sense_are_refused(capsys, pack, options, words):
    with pytest.raises(SystemExit) as stop:
        run(capsys, pack, *options)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_server_that_does_not_start_says_why():
    with (
        pytest.raises(ConfigError, match="kvgraft serve ended with code 2") as caught,
        ServerProcess(["--no-such-option"]),
    ):
        pass
    assert "\n" not in str(caught.value)


def test_resident_memory_of_no_process_is_0():
    assert rss_bytes(2**30) == 0
