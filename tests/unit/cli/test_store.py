"""`kvgraft store`: lists, verifies, clears and exports; refuses in one line."""

from __future__ import annotations

import json
import os
import re

import numpy as np
import pytest

from kvgraft.cli import main
from kvgraft.memory.store import register_store
from kvgraft.memory.store.file import FileStore
from kvgraft.testing.memory_store import MemoryStore
from kvgraft.testing.stored_objects import SPACE, make_object


@pytest.fixture
def store(tmp_path):
    store = FileStore(tmp_path / "donors")
    for number in range(3):
        put(store, number)
    return store


def put(store, number, space=SPACE):
    wanted = make_object(number, space=space)
    store.put(space, wanted.key, wanted.head, wanted.body)
    return wanted


@pytest.fixture
def run(capsys):
    def run_command(*argv):
        code = main(["store", *map(str, argv)])
        out, err = capsys.readouterr()
        return code, out, err

    return run_command


def damage(store, number):
    path = store.path(SPACE, make_object(number).key)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


class TestList:
    def test_spaces(self, store, run):
        code, out, _ = run("ls", store.root)
        assert code == 0
        head, line = out.splitlines()
        assert head.split()[:3] == ["space", "donors", "tokens"]
        assert line.split()[:5] == [SPACE, "3", "900", "89.4", "KiB"]
        assert re.search(r"\d+ seconds ago$", line)

    def test_donors_of_a_space(self, store, run):
        code, out, _ = run("ls", f"file:{store.root}", "--space", SPACE)
        assert code == 0
        assert {line.split()[0] for line in out.splitlines()[1:]} == store.keys(SPACE)

    def test_as_json(self, store, run):
        _, out, _ = run("ls", store.root, "--json")
        told = json.loads(out)[SPACE]
        assert (told["num_donors"], told["num_tokens"], told["num_damaged"]) == (3, 900, 0)
        donors = {donor["key"]: donor for donor in told["donors"]}
        wanted = make_object(1)
        assert donors[wanted.key]["num_bytes"] == wanted.num_bytes
        assert (donors[wanted.key]["generation"], donors[wanted.key]["start_position"]) == (1, 1)

    def test_damaged_heads_are_told(self, store, run):
        path = store.path(SPACE, make_object(1).key)
        path.write_bytes(b"nothing of ours")
        _, out, _ = run("ls", store.root)
        assert "1 heads are damaged" in out
        _, out, _ = run("ls", store.root, "--space", SPACE)
        assert "is no head" in out or "cannot be read" in out

    def test_nothing(self, tmp_path, run):
        assert run("ls", tmp_path)[1] == "nothing is stored\n"

    @pytest.mark.parametrize(
        ("text", "seconds"), [("5 seconds", 5), ("2.0 minutes", 120), ("3.0 hours", 10_800), ("2.0 days", 172_800)]
    )
    def test_ages_are_for_people(self, store, run, text, seconds):
        from kvgraft.cli.store import _age

        assert _age(seconds) == f"{text} ago"


class TestVerify:
    def test_whole(self, store, run):
        assert run("verify", store.root) == (0, "3 whole, 0 damaged\n", "")

    def test_damage_is_found_and_stays(self, store, run):
        damage(store, 1)
        code, out, _ = run("verify", store.root)
        assert code == 1
        assert f"{SPACE}/{make_object(1).key}: tokens 256 to 299" in out
        assert out.endswith("2 whole, 1 damaged\n")
        assert len(store.keys(SPACE)) == 3

    def test_damage_is_removed_if_asked(self, store, run):
        damage(store, 1)
        store.path(SPACE, make_object(2).key).write_bytes(b"")
        code, out, _ = run("verify", store.root, "--remove")
        assert code == 1
        assert out.endswith("1 whole, 2 damaged, removed\n")
        assert store.keys(SPACE) == {make_object(0).key}
        assert run("verify", store.root)[0] == 0


class TestClear:
    def test_to_a_size(self, store, run):
        code, out, _ = run("gc", store.root, "--max-bytes", "40KiB")
        assert code == 0
        assert "2 donors removed to keep 40.0 KiB" in out
        assert len(store.keys(SPACE)) == 1

    def test_spaces_that_nobody_uses(self, store, run):
        put(store, 7, "ab")
        for path in store.root.glob(f"{SPACE}/*"):
            os.utime(path, (0, 0))
        _, out, _ = run("gc", store.root, "--unused-days", 30)
        assert f"{SPACE}: 3 donors removed, unused for 30 days" in out
        assert store.spaces() == ["ab"]

    def test_what_the_dead_have_left(self, store, run):
        left = store.root / SPACE / ".aa.0.tmp"
        left.write_bytes(bytes(10))
        assert run("gc", store.root)[0] == 0
        assert not left.exists()
        assert len(store.keys(SPACE)) == 3

    def test_other_stores_clear_themselves(self, run):
        register_store("toy", lambda *_: MemoryStore())
        code, out, err = run("gc", "toy:x")
        assert (code, out) == (2, "")
        assert "has limits of its own" in err


class TestExport:
    def test_a_donor(self, store, run, tmp_path):
        safetensors = pytest.importorskip("safetensors.numpy")
        wanted = make_object(1)
        code, _, _ = run("export", store.root, "--space", SPACE, "--key", wanted.key, tmp_path / "one.safetensors")
        assert code == 0
        assert np.array_equal(safetensors.load_file(tmp_path / "one.safetensors")["kv"], wanted.rows)

    def test_a_space(self, store, run, tmp_path):
        code, out, _ = run("export", store.root, "--space", SPACE, tmp_path / "out")
        assert (code, out) == (0, f"{tmp_path / 'out'}: 3 donors\n")
        for path in (tmp_path / "out").iterdir():
            assert path.read_bytes() == (store.root / SPACE / path.name).read_bytes()

    def test_damaged_donors_are_not_copied(self, store, run, tmp_path):
        damage(store, 1)
        code, out, _ = run("export", store.root, "--space", SPACE, tmp_path / "out")
        assert code == 1
        assert "2 donors, 1 were not copied" in out
        assert len(list((tmp_path / "out").iterdir())) == 2

    def test_from_any_store(self, run, tmp_path):
        memory = MemoryStore()
        register_store("toy", lambda *_: memory)
        wanted = put(memory, 1)
        assert run("export", "toy:x", "--space", SPACE, tmp_path / "out")[0] == 0
        assert (tmp_path / "out" / f"{wanted.key}.safetensors").read_bytes() == wanted.head + wanted.rows.tobytes()
        assert run("verify", "toy:x", "--space", SPACE) == (0, "1 whole, 0 damaged\n", "")
        assert run("ls", "toy:x", "--space", SPACE)[1].endswith("unknown\n")


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("ls", "nowhere"), "there is no directory nowhere"),
        (("ls", "file:nowhere?max_bytes=1GiB"), "there is no directory nowhere"),
        (("verify", "toy:x"), "pass --space"),
        (("ls", "tpy:x"), "did you mean 'toy'"),
        (("gc", ".", "--max-bytes", "much"), "a size such as 4GiB"),
        (("gc", ".", "--unused-days", "-1"), "--unused-days is a number of days of 0 or more, not -1"),
        (("gc", ".", "--unused-days", "nan"), "--unused-days is a number of days of 0 or more, not nan"),
        (("gc", ".", "--unused-days", "inf"), "--unused-days is a number of days of 0 or more, not inf"),
        (("export", ".", "--space", "ab", "out"), "there is nothing in space 'ab'"),
        (("export", ".", "--space", "ab", "--key", "cd", "out"), "there is no cd"),
        (("ls", ".", "--space", "../x"), "lower-case hexadecimal"),
    ],
)
def test_bad_input_gets_one_line(run, tmp_path, monkeypatch, argv, why):
    monkeypatch.chdir(tmp_path)
    register_store("toy", lambda *_: MemoryStore())
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert why in err
    assert len(err.splitlines()) == 1
