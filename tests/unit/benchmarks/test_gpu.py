"""`python -m benchmarks.gpu` at toy size on a processor: every path that a card takes, and what goes wrong on the way."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from benchmarks.gpu import decode_step, run
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.card import Card
from benchmarks.gpu.exactness import ExactnessSizes
from benchmarks.gpu.record import verdict
from benchmarks.gpu.run import GpuSettings, measure_gpu
from benchmarks.gpu.subject import SHAPES

from kvgraft.bench.deadline import Deadline
from kvgraft.errors import ConfigError
from kvgraft.integrations.vllm.worker.text_reader import text_reader

CPU = torch.device("cpu")
SIZES = GpuSettings(
    models=("llama-toy",),
    lengths=(256,),
    decode_lengths=(520,),
    minutes=10,
    rounds=1,
    shift=60,
    exactness=ExactnessSizes(300, 60, 3),
)
TOY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]


def measured(settings=SIZES, **options):
    return measure_gpu(settings, CPU, text_reader, **options)


def outcomes(found):
    return {tuple(part[name] for name in ("dtype", "attention", "part")): part for part in found["parts"]}


@pytest.fixture(autouse=True, scope="module")
def smaller():
    """The toy's shape, smaller still: FlexAttention without a compiler is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "llama-toy", SHAPES["llama-toy"] | TOY)
        yield


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """All parts, and the file as it was after each of them."""
    file, seen = tmp_path_factory.mktemp("gpu") / "all.json", []
    found = measured(file=file, show=lambda part: seen.append((part, json.loads(file.read_text()))))
    return found, seen, json.loads(file.read_text())


def test_all_parts_are_measured(everything):
    found, _, written = everything
    parts = outcomes(found)
    speeds = ("exactness", "decode_step", "first_token")
    expected = [("bfloat16", "flex", part) for part in (*speeds, "copies", "capture")]
    expected += [("bfloat16", "sdpa", part) for part in speeds]
    assert list(parts) == [*expected, ("float32", "flex", "exactness"), ("float32", "sdpa", "exactness")]
    assert all("result" in part for part in parts.values()), parts
    assert found["verdict"]["is_exact"] is True
    assert (found["verdict"]["failed"], found["verdict"]["skipped"]) == (0, 0)
    assert found["verdict"]["repair_rows"] in decode_step.REPAIR_ROWS
    assert {"commit", "versions", "card", "settings"} <= found.keys()
    assert written["verdict"] == found["verdict"]


def test_figures_are_there_and_of_what_they_say(everything):
    parts = outcomes(everything[0])
    for dtype in ("bfloat16", "float32"):
        exact = parts[dtype, "sdpa", "exactness"]["result"]
        assert set(exact["ways"]) == {"off", "exact", "recomputed", "moved_in_one_layer"}
        assert exact["self_check"]["refusal"] is None
        assert exact["self_check"]["rope_error"] <= exact["tolerance"]
    assert all(way["error"] < 1e-4 for way in parts["float32", "flex", "exactness"]["result"]["ways"].values())
    rows = parts["bfloat16", "sdpa", "first_token"]["result"]["rows"]
    assert [row["length"] for row in rows] == [256]
    assert all(row["none_computed_tokens"] < row["length"] / 2 for row in rows)
    assert all(row[f"{name}_ms"] > 0 for row in rows for name in ("cold", "hit", "repeat", "none", "before", "after"))
    steps = parts["bfloat16", "flex", "decode_step"]["result"]["rows"]
    assert [(row["length"], row["repair_rows"]) for row in steps] == [(520, count) for count in (0, 16, 64, 256)]
    copies = parts["bfloat16", "flex", "copies"]["result"]
    assert copies["bytes"] == copies["tokens"] * 2 * 2 * 32 * 2
    assert all(copies[name]["gb_s"] > 0 for name in ("run_of_slots", "scattered_slots", "from_host"))
    capture = parts["bfloat16", "flex", "capture"]["result"]
    assert capture["decode"]["captured_tokens"] == 64
    assert capture["prefill"]["captured_tokens"] == capture["prefill"]["rows"]


def test_the_file_has_every_part_as_soon_as_it_is_over(everything):
    _, seen, _ = everything
    for number, (part, content) in enumerate(seen):
        assert content["parts"][number] == json.loads(json.dumps(part))
        assert "verdict" not in content


def test_what_there_is_no_time_for_is_named():
    found = measured(replace(SIZES, minutes=1e-9))
    assert found["parts"]
    assert all(part["skipped"].startswith("no time: 0 s were left") for part in found["parts"])
    assert found["verdict"] == {"is_exact": None, "repair_rows": None, "failed": 0, "skipped": len(found["parts"])}


def test_what_fails_is_named_and_the_rest_is_measured(monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("a kernel that is not there")

    def is_out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(run, "measure_exactness", fails)
    monkeypatch.setattr(run, "measure_capture", is_out_of_memory)
    parts = outcomes(measured(replace(SIZES, dtypes=("float32",), backends=("sdpa",))))
    failed = parts["float32", "sdpa", "exactness"]
    assert "a kernel that is not there" in failed["failed"]
    assert failed["at"][-1].endswith("fails")
    assert "out of memory" in parts["float32", "sdpa", "capture"]["skipped"]
    assert "result" in parts["float32", "sdpa", "copies"]


def test_a_backend_that_is_replaced_is_a_failure(monkeypatch):
    monkeypatch.setattr("kvgraft.engine.attention.choose.difference_to_sdpa", lambda *_: 1.0)
    parts = outcomes(measured(replace(SIZES, dtypes=("float32",), backends=("flex",))))
    assert all("flex differs from it by 1.0e+00" in part["failed"] for part in parts.values())


def test_models_that_are_not_there_and_shapes_without_room_are_skipped(monkeypatch):
    found = measured(replace(SIZES, models=("./no-such-model",), dtypes=("float32",)))
    assert found["parts"]
    assert all("no-such-model" in part["skipped"] for part in found["parts"])
    monkeypatch.setattr(Card, "free_bytes", property(lambda self: 1 << 10))
    found = measured(replace(SIZES, dtypes=("float32",)))
    assert all("weights take" in part["skipped"] for part in found["parts"])


def test_lengths_without_room_are_named(monkeypatch):
    monkeypatch.setattr(run.Session, "_config", lambda self, loaded, attention: _small(attention))
    settings = replace(
        SIZES, lengths=(256, 200_000), decode_lengths=(300, 520, 9000), dtypes=("float32",), backends=("sdpa",)
    )
    parts = outcomes(measured(settings))
    first = parts["float32", "sdpa", "first_token"]["result"]
    assert [row["length"] for row in first["rows"]] == [256]
    assert first["skipped"][200_000] == "the model takes 131072 tokens"
    decode = parts["float32", "sdpa", "decode_step"]["result"]
    assert decode["skipped"] == {300: "it is shorter than 512 tokens", 9000: "1500 tokens have room"}


def _small(attention):
    from kvgraft.config import EngineConfig

    return EngineConfig(num_slots=1500, attention=attention, heal="off")


def step(count, times, length=1000):
    return {"length": length, "repair_rows": count, "times_plain": times, "step_ms": 5.0}


def test_rows_of_repair_are_free_up_to_the_first_that_cost_at_any_length():
    free = decode_step._free_rows
    assert free([]) is None
    assert free([step(0, 1.0), step(16, 1.01), step(64, 1.04), step(256, 1.3)]) == 64
    assert free([step(0, 1.0), step(16, 1.2), step(64, 1.0)]) == 0
    assert free([step(0, 1.0), step(16, 1.0), step(0, 1.0, 8000), step(16, 1.4, 8000)]) == 0


def test_what_bounds_a_step_is_said():
    card = Card(CPU)
    assert decode_step._bound(1.0, 1.0, 0.9, card) == "processor"
    card.is_cuda = True
    assert decode_step._bound(1.0, 0.2, 0.6, card) == "memory"
    assert decode_step._bound(1.0, 0.95, 0.2, card) == "launches"
    assert decode_step._bound(1.0, 0.3, 0.2, card) == "arithmetic"


def test_the_verdict_takes_the_faster_attention_of_the_first_model():
    def part(model, step_ms, rows):
        rows = {"rows": [{"step_ms": step_ms}], "repair_rows": rows}
        return {"model": model, "part": "decode_step", "result": rows}

    parts = [part("a", 9.0, 16), part("a", 5.0, 64), part("b", 1.0, 256)]
    parts += [{"model": "a", "part": "exactness", "result": {"is_exact": False}}, {"failed": "x"}, {"skipped": "y"}]
    assert verdict(parts) == {"is_exact": False, "repair_rows": 64, "failed": 1, "skipped": 1}


def test_a_wrong_answer_is_seen_and_ends_with_1(monkeypatch, tmp_path, capsys):
    from benchmarks.gpu import exactness

    own = exactness.stock_answer

    def off_by_a_little(model, prompt, num_tokens):
        found = own(model, prompt, num_tokens)
        return replace(found, logits=found.logits.roll(1, -1))

    monkeypatch.setattr(exactness, "stock_answer", off_by_a_little)
    monkeypatch.setattr(exactness, "_FLOOR_FACTOR", 0.0)
    monkeypatch.setattr(run, "WEIGHTS", {"exactness": 1.0})
    argv = ["--device", "cpu", "--models", "llama-toy", "--lengths", "256", "--decode-lengths", "520"]
    argv += ["--prompt", "256", "--rounds", "1", "--out", str(tmp_path / "gpu.json"), "--json"]
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["verdict"]["is_exact"] is False
    assert "llama-toy bfloat16 flex exactness: done in" in err


def test_tables_can_be_read(everything, tmp_path, monkeypatch, capsys):
    found, _, _ = everything
    monkeypatch.setattr(run, "measure_gpu", lambda *_, **__: json.loads(json.dumps(found)))
    assert main(["--device", "cpu", "--out", str(tmp_path / "gpu.json")]) == 0
    out, _ = capsys.readouterr()
    assert "exact: yes; rows of repair that cost nothing:" in out
    assert "llama-toy bfloat16 flex first_token: done in" in out
    assert "of a plain copy" in out
    assert max(map(len, out.splitlines()[:-1])) <= 110


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_card_that_is_not_there_is_refused(tmp_path, capsys):
    assert main(["--out", str(tmp_path / "gpu.json")]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err
    for option in (
        ["--lengths", "100"],
        ["--rounds", "0"],
        ["--minutes", "0"],
        ["--minutes", "nan"],
        ["--minutes", "inf"],
        ["--out", "/no/folder/gpu.json"],
    ):
        assert main(["--device", "cpu", *option]) == 2


def test_time_that_is_left():
    assert Deadline.after(1000).reason_to_skip(10) == ""
    assert Deadline.after(1000).reason_to_skip(2000).startswith("no time: 1000 s were left, about 2000 s needed")
    assert Deadline.after(0).reason_to_skip(0) == "no time: 0 s were left"


def test_an_unknown_device_is_refused():
    from benchmarks.gpu.__main__ import _device

    with pytest.raises(ConfigError, match="is no device"):
        _device("moon")
