"""What a directory of donors does besides what every store must: budget, eviction, the dead, and a file system that fails."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvgraft.errors import CapacityError, ConfigError, StoreError, StoreMissError
from kvgraft.memory.store import file as file_module
from kvgraft.memory.store import file_budget, open_store
from kvgraft.memory.store.file import FileStore
from kvgraft.memory.store.record import MOST_TOKENS
from kvgraft.testing.store_suite import feeding
from kvgraft.testing.stored_objects import SPACE, fault_of, make_object

BIG = 1 << 30


def put(store, number, num_tokens=300):
    wanted = make_object(number, num_tokens)
    store.put(SPACE, wanted.key, wanted.head, wanted.body)
    return wanted


def kept(store, objects):
    return [number for number, wanted in enumerate(objects) if fault_of(store, wanted) == ""]


def listed_bytes(root):
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in root.glob("*/*"))


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def other_device(tmp_path):
    """A folder on another device than `tmp_path`'s."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no other device to write to")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def mount(root, folder):
    """Have the link `root` lead to `folder`."""
    root.unlink()
    root.symlink_to(folder)


@pytest.fixture
def old(root, monkeypatch):
    """Move all files into the past, so that nothing counts as put just now."""

    def age(seconds=3_600.0):
        for path in root.glob("*/*.safetensors"):
            status = path.stat()
            os.utime(path, ns=(status.st_mtime_ns - int(seconds * 1e9),) * 2)

    return age


class TestFiles:
    def test_only_the_owner_reads_them(self, root):
        store = FileStore(root)
        path = store.path(SPACE, put(store, 1).key)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == stat.S_IMODE(root.stat().st_mode) == 0o700

    def test_other_tools_open_them(self, root):
        safetensors = pytest.importorskip("safetensors.numpy")
        store = FileStore(root)
        wanted = put(store, 1)
        tensors = safetensors.load_file(store.path(SPACE, wanted.key))
        assert (tensors["kv"] == wanted.rows).all()
        assert (tensors["tokens"] == wanted.record.token_ids).all()

    def test_what_is_no_object_is_left_alone(self, root):
        store = FileStore(root)
        wanted = put(store, 1)
        folder = store.path(SPACE, wanted.key).parent
        for name in ("notes.txt", "UPPER.safetensors", "abc"):
            (folder / name).write_text("mine")
        (folder / "abcd.safetensors").symlink_to(folder / "notes.txt")
        (folder / "abce.safetensors").mkdir()
        (root / "not-a-space").mkdir()
        assert store.keys(SPACE) == {wanted.key}
        assert store.spaces() == [SPACE]
        with pytest.raises(StoreError):
            store.read(SPACE, "abcd", 0, memoryview(bytearray(1)))
        store.trim(0)
        assert {path.name for path in folder.iterdir()} == {
            "notes.txt",
            "UPPER.safetensors",
            "abc",
            "abcd.safetensors",
            "abce.safetensors",
        }

    @pytest.mark.parametrize(
        ("url", "why"),
        [
            ("file:", "needs a directory"),
            ("file:x?max_byte=1", "has no option 'max_byte'; it has max_bytes"),
            ("file:x?max_bytes=lots", "a size such as 4GiB"),
            ("file:x?max_bytes=0", "at least 1"),
            ("file:/proc/nothing/here", "name a directory that you may"),
        ],
    )
    def test_wrong_urls_get_one_line(self, url, why, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigError, match=why) as refused:
            open_store(url)
        assert len(str(refused.value).splitlines()) == 1

    def test_a_file_in_its_place_is_refused(self, tmp_path):
        (tmp_path / "x").write_text("")
        with pytest.raises(ConfigError, match="cannot keep donors"):
            FileStore(tmp_path / "x")

    def test_sizes_are_those_of_settings(self, root):
        store = open_store(f"file:{root}?max_bytes=1.5MiB")
        with pytest.raises(CapacityError, match="1572864"):
            put(store, 1, 20_000)


class TestCraftedFiles:
    """What somebody with the right to write puts where an object is expected."""

    @pytest.mark.parametrize("claim", [800 << 20, 3 << 30, 1 << 40])
    def test_no_more_is_read_than_a_head_may_have(self, root, claim):
        """A sparse file of a few KiB claims a head of gigabytes, and is as long as it says."""
        store = FileStore(root)
        good, bad = put(store, 1), "f" * 32
        num_tokens = claim // 4
        pages = -(-num_tokens // 256) * 8
        ends = [pages + 4 * num_tokens, pages + 5 * num_tokens]
        text = json.dumps({"kv": {"dtype": "U8", "shape": [num_tokens, 1], "data_offsets": ends}}).encode()
        with open(store.path(SPACE, bad), "wb") as crafted:
            crafted.write(len(text).to_bytes(8, "little") + text)
            crafted.truncate(8 + len(text) + ends[1])
        tracemalloc.start()
        try:
            assert dict(store.heads(SPACE, [bad, good.key])) == {bad: b"", good.key: good.head}
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1 << 20
        with feeding(store) as feed:
            assert feed.look(60.0)
            assert [record.key for record in feed.news().added] == [good.key]
        assert store.keys(SPACE) == {good.key}

    def test_the_longest_head_that_is_read_fills_no_memory(self, root):
        """Zeros that claim to be a head of as many tokens as an object may have."""
        store, bad = FileStore(root), "f" * 32
        (root / SPACE).mkdir()
        ends = [MOST_TOKENS // 32 + 4 * MOST_TOKENS, MOST_TOKENS // 32 + 5 * MOST_TOKENS]
        text = json.dumps({"kv": {"shape": [MOST_TOKENS, 1], "data_offsets": ends}}).encode()
        with open(store.path(SPACE, bad), "wb") as crafted:
            crafted.write(len(text).to_bytes(8, "little") + text)
            crafted.truncate(8 + len(text) + ends[1])
        tracemalloc.start()
        try:
            with feeding(store) as feed:
                assert feed.look(60.0)
                assert feed.num_corrupt == 1
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 128 << 20

    @pytest.mark.parametrize("kind", ["fifo", "socket", "folder", "link", "device"])
    def test_what_is_no_file_is_never_waited_for(self, root, kind, monkeypatch):
        """Opening a FIFO to read waits for a writer, for ever."""
        monkeypatch.chdir(root.parent)
        store, wanted = FileStore(root), make_object(1)
        (root / SPACE).mkdir()
        path = store.path(SPACE, wanted.key)
        with socket.socket(socket.AF_UNIX) as listening:
            make = {
                "fifo": lambda: os.mkfifo(path),
                "socket": lambda: (os.chdir(path.parent), listening.bind(path.name)),
                "folder": path.mkdir,
                "link": lambda: path.symlink_to(root / "elsewhere"),
                "device": lambda: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5)),
            }
            try:
                make[kind]()
            except PermissionError:
                pytest.skip("only root makes devices")

        def ask():
            assert list(store.heads(SPACE, [wanted.key])) == [(wanted.key, b"")]
            with pytest.raises(StoreMissError):
                store.read(SPACE, wanted.key, 0, memoryview(bytearray(1)))
            return store.keys(SPACE)

        asked = _within_a_minute(ask)
        assert asked == frozenset()
        if kind != "folder":
            store.remove(SPACE, wanted.key)
            assert fault_of(store, put(store, 1)) == ""

    def test_a_directory_of_another_user_is_refused(self, root, monkeypatch):
        """He could put K/V of any text under any name, and take the donors away."""
        FileStore(root)
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        if own == 0:
            FileStore(root)  # of root everybody may take
            os.chown(root, own + 2, -1)
        with pytest.raises(ConfigError, match="belongs to user") as refused:
            FileStore(root)
        assert len(str(refused.value).splitlines()) == 1

    def test_a_space_of_another_user_is_refused(self, root, monkeypatch):
        """He made it in a directory where everybody may, before we did."""
        store, own = FileStore(root), os.geteuid()
        wanted = put(store, 1)
        real = os.lstat

        def of_another(path, **how):
            status = list(real(path, **how))
            status[4] = own + 2
            return os.stat_result(status)

        monkeypatch.setattr(os, "lstat", of_another)
        for call in (
            lambda: put(store, 2),
            lambda: store.keys(SPACE),
            lambda: list(store.heads(SPACE, [wanted.key])),
            lambda: store.read(SPACE, wanted.key, 0, memoryview(bytearray(1))),
            lambda: store.touch(SPACE, [wanted.key]),
        ):
            with pytest.raises(StoreError, match="belongs to user") as refused:
                call()
            assert len(str(refused.value).splitlines()) == 1


def _within_a_minute(do):
    """What a call gives, in a thread that may be left behind if it never comes back."""
    with_result = ThreadPoolExecutor(1)
    try:
        return with_result.submit(do).result(60.0)
    finally:
        with_result.shutdown(wait=False)


class TestBudget:
    def test_it_holds_over_all_spaces_and_stores(self, root):
        limit = 20 * 32_768
        stores = [FileStore(root, max_bytes=limit) for _ in range(3)]
        for number in range(60):
            wanted = make_object(number, 300)
            stores[number % 3].put(f"{number % 4:x}", wanted.key, wanted.head, wanted.body)
            assert listed_bytes(root) <= limit
        assert listed_bytes(root) == stores[0].used_bytes > limit // 2
        assert sum(store.budget.num_evicted for store in stores) == 60 - len(list(root.glob("*/*")))

    def test_it_holds_at_any_moment_while_threads_write(self, root):
        limit, seen, done = 12 * 32_768, [], threading.Event()
        store = FileStore(root, max_bytes=limit)

        def watch():
            while not done.is_set():
                with store.budget.locked():  # so that all files are listed at one moment
                    seen.append(listed_bytes(root))

        def work(first):
            for number in range(first, first + 15):
                try:
                    put(store, number)
                except CapacityError:
                    continue

        watcher = threading.Thread(target=watch)
        watcher.start()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(0, 60, 15)))
        done.set()
        watcher.join()
        assert 0 < max(seen) <= limit
        assert store.used_bytes == listed_bytes(root)

    def test_it_holds_among_processes(self, root):
        limit = 12 * 32_768
        url = f"file:{root}?max_bytes={limit}"
        command = [sys.executable, "-m", "kvgraft.testing.stored_objects", url]
        children = [subprocess.Popen([*command, str(first), "30"], stdout=subprocess.DEVNULL) for first in (0, 100)]
        assert [child.wait(120) for child in children] == [0, 0]
        store = FileStore(root, max_bytes=limit)
        assert limit // 2 < store.used_bytes == listed_bytes(root) <= limit

    def test_a_total_that_is_too_high_is_corrected(self, root):
        """As a process leaves it that is killed between two steps."""
        store = FileStore(root, max_bytes=4 * 32_768)
        put(store, 1)
        with store.budget.locked() as total:
            total.add(3 * 32_768)
        put(store, 2)
        assert store.budget.num_evicted == 0
        assert store.used_bytes == listed_bytes(root)

    @pytest.mark.parametrize("damage", [b"", b"xyz", b"\xff" * 8, b"0123456789"])
    def test_a_lock_file_that_says_nothing_is_counted_anew(self, root, damage):
        store = FileStore(root, max_bytes=3 * 32_768)
        for number in range(3):
            put(store, number)
        (root / ".kvgraft-lock").write_bytes(damage)
        put(store, 3)
        assert listed_bytes(root) <= 3 * 32_768

    def test_what_was_removed_makes_room(self, root):
        store = FileStore(root, max_bytes=2 * 32_768)
        for number in range(10):
            store.remove(SPACE, put(store, number).key)
        assert (store.budget.num_evicted, store.used_bytes) == (0, 0)

    def test_an_object_that_was_there_takes_nothing(self, root):
        store = FileStore(root, max_bytes=2 * 32_768)
        for _ in range(10):
            put(store, 1)
        assert store.used_bytes == listed_bytes(root) == 32_768


class TestEviction:
    def test_what_was_never_used_leaves_first(self, root, old):
        store = FileStore(root, max_bytes=6 * 32_768)
        objects = [put(store, number) for number in range(6)]
        store.touch(SPACE, [objects[0].key, objects[2].key])
        old()
        put(store, 6), put(store, 7)
        assert {0, 2} <= set(kept(store, objects))
        assert len(kept(store, objects)) == 4

    def test_a_use_long_ago_is_worth_less_than_a_put_today(self, root, old):
        store = FileStore(root, max_bytes=2 * 32_768)
        used = put(store, 0)
        store.touch(SPACE, [used.key])
        old(5 * 3_600)
        new = put(store, 1)
        old(3_600)
        put(store, 2)
        assert (fault_of(store, used), fault_of(store, new)) == ("lost", "")

    def test_what_was_put_just_now_goes_only_if_nothing_else_can(self, root, old):
        store = FileStore(root, max_bytes=3 * 32_768)
        used = put(store, 0)
        store.touch(SPACE, [used.key])
        old()
        fresh = [put(store, number) for number in (1, 2)]
        put(store, 3)
        assert fault_of(store, used) == "lost"
        assert [fault_of(store, one) for one in fresh] == ["", ""]
        put(store, 4)
        assert store.budget.num_evicted == 2

    @pytest.mark.parametrize("back_s", [90.0, 3_600.0, 400 * 86_400.0])
    def test_a_clock_that_went_back_pins_nothing(self, root, monkeypatch, back_s):
        """What was put before that has a time that is still to come, and would count as put just now until then."""
        now = [1.7e9]
        for module in (file_module, file_budget):
            monkeypatch.setattr(
                module, "time", SimpleNamespace(time=lambda: now[0], monotonic=time.monotonic, sleep=time.sleep)
            )
        store = FileStore(root, max_bytes=17 * 32_768)
        old = [put(store, number) for number in range(17)]
        now[0] -= back_s
        new = []
        for number in range(30):
            now[0] += 1.0
            new.append(put(store, 100 + number))
        assert kept(store, old) == []
        assert kept(store, new)[-1] == 29
        assert len(kept(store, new)) >= 15

    def test_clocks_of_machines_that_differ_a_little_change_nothing(self, root, monkeypatch):
        """What another machine put some seconds after our present is as fresh as our own."""
        store = FileStore(root, max_bytes=3 * 32_768)
        oldest, ahead = put(store, 0), put(store, 1)
        for wanted, seconds in ((oldest, -3_600), (ahead, 20)):
            moved = time.time() + seconds
            os.utime(store.path(SPACE, wanted.key), ns=file_budget.mark(moved, is_use=False))
        before = store.path(SPACE, ahead.key).stat().st_mtime_ns
        put(store, 2), put(store, 3)
        assert (fault_of(store, oldest), fault_of(store, ahead)) == ("lost", "")
        assert store.path(SPACE, ahead.key).stat().st_mtime_ns == before

    def test_a_time_to_come_that_cannot_be_mended_counts_as_long_ago(self, root, monkeypatch):
        """Of a file that another user owns, say."""
        store = FileStore(root, max_bytes=3 * 32_768)
        pinned, good = put(store, 0), put(store, 1)
        os.utime(store.path(SPACE, pinned.key), ns=file_budget.mark(time.time() + 1e6, is_use=True))
        names = {key: getattr(os, key) for key in dir(os)}

        def refuse(*_, **__):
            raise PermissionError(errno.EPERM, "not the owner")

        monkeypatch.setattr(file_budget, "os", SimpleNamespace(**(names | {"utime": refuse})))
        put(store, 2), put(store, 3)
        assert (fault_of(store, pinned), fault_of(store, good)) == ("lost", "")

    def test_what_no_limit_has_room_for_goes_first(self, root, old):
        """A sparse file of 4 KiB that claims to be longer than the directory may drives out nobody else."""
        store = FileStore(root, max_bytes=4 * 32_768)
        objects = [put(store, number) for number in range(3)]
        for name in ("ab", "cd"):
            with open(store.path(SPACE, name), "wb") as crafted:
                crafted.truncate(1 << 43)
        assert FileStore(root, max_bytes=4 * 32_768).used_bytes > 0
        put(store, 3)
        assert kept(store, objects) == [0, 1, 2]
        assert not store.path(SPACE, "ab").exists()

    def test_no_sum_of_lengths_is_too_large_to_be_noted(self, other_device):
        """A file system in memory has sparse files of 8 EiB."""
        store = FileStore(other_device, max_bytes=4 * 32_768)
        wanted = put(store, 0)
        for name in ("ab", "cd", "ef"):
            with open(store.path(SPACE, name), "wb") as crafted:
                crafted.truncate(1 << 62)
        store = FileStore(other_device, max_bytes=4 * 32_768)
        put(store, 1)
        assert fault_of(store, wanted) == ""
        assert store.used_bytes == 2 * 32_768

    def test_an_open_file_is_read_to_its_end(self, root, monkeypatch):
        """Though it is evicted meanwhile."""
        store = FileStore(root, max_bytes=32_768)
        wanted, real = put(store, 0), file_module._fill

        def evicted_meanwhile(*arguments):
            put(store, 1)
            real(*arguments)

        monkeypatch.setattr(file_module, "_fill", evicted_meanwhile)
        into = bytearray(wanted.rows.nbytes)
        store.read(SPACE, wanted.key, 0, memoryview(into))
        assert bytes(into) == wanted.rows.tobytes()
        assert fault_of(store, wanted) == "lost"

    def test_room_is_made_for_more_than_one(self, root, old):
        """So that not every put of a full store looks at all files."""
        store = FileStore(root, max_bytes=100 * 4_096)
        for number in range(100):
            put(store, number, 20)
        old()
        put(store, 100, 20)
        evicted = store.budget.num_evicted
        assert evicted == 6
        for number in range(101, 106):
            put(store, number, 20)
        assert store.budget.num_evicted == evicted

    def test_trim_and_clear(self, root):
        store = FileStore(root)
        objects = [put(store, number) for number in range(5)]
        other = make_object(9)
        store.put("ab", other.key, other.head, other.body)
        store.trim(4 * 32_768)
        assert store.used_bytes == 4 * 32_768
        num_left = len(kept(store, objects))
        assert store.clear(SPACE) == num_left
        assert store.spaces() in ([], ["ab"])
        assert store.clear("cd") == 0


class TestTheDead:
    def leave(self, root, name=".aa.0.tmp", size=40_000):
        folder = root / SPACE
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(size))
        return folder / name

    def test_their_files_go_when_somebody_opens_the_directory(self, root):
        path = self.leave(root)
        store = FileStore(root)
        assert not path.exists()
        assert store.used_bytes == 0

    def test_files_of_the_living_stay_and_count(self, root):
        path = self.leave(root)
        with open(path, "rb") as writer:
            fcntl.flock(writer, fcntl.LOCK_EX)
            store = FileStore(root, max_bytes=81_920)
            assert path.exists()
            assert store.used_bytes == 40_960
            put(store, 1), put(store, 2)
            assert listed_bytes(root) <= 81_920
            assert path.exists()
            with pytest.raises(CapacityError, match="others are writing"):
                store.trim(0)
        assert store.used_bytes == listed_bytes(root) <= 32_768

    def test_a_put_that_is_under_way_has_a_lock_and_its_full_length(self, root, monkeypatch):
        store, seen, real = FileStore(root), [], file_module._write

        def write(*arguments):
            (path,) = root.glob("*/.*.tmp")
            other = FileStore(root)
            seen.append((path.stat().st_size, path.exists(), other.used_bytes, other.keys(SPACE)))
            real(*arguments)

        monkeypatch.setattr(file_module, "_write", write)
        wanted = put(store, 1)
        assert seen == [(wanted.num_bytes, True, 32_768, frozenset())]

    def test_a_lock_that_is_never_given_back_is_an_error(self, root, monkeypatch):
        store = FileStore(root)
        monkeypatch.setattr(file_budget, "_LOCK_WAIT_S", 0.05)
        with open(root / ".kvgraft-lock", "rb") as holder:
            fcntl.flock(holder, fcntl.LOCK_EX)
            with pytest.raises(StoreError, match="held the directory's lock"):
                put(store, 1)
        put(store, 1)


class TestFaultsOfTheSystem:
    @pytest.fixture
    def failing(self, monkeypatch):
        """Have a function of `os` raise, after it has done half of its work."""

        def fail(name, code):
            def raising(descriptor, *arguments):
                if name == "write":
                    os.write(descriptor, bytes(100))
                raise OSError(code, os.strerror(code))

            names = {key: getattr(os, key) for key in dir(os)}
            monkeypatch.setattr(file_module, "os", SimpleNamespace(**(names | {name: raising})))
            return monkeypatch.undo

        return fail

    @pytest.mark.parametrize(
        ("name", "code", "error"),
        [
            ("write", errno.ENOSPC, CapacityError),
            ("write", errno.EDQUOT, CapacityError),
            ("write", errno.EIO, StoreError),
            ("fsync", errno.EIO, StoreError),
            ("rename", errno.EACCES, StoreError),
            ("ftruncate", errno.ENOSPC, CapacityError),
            ("ftruncate", errno.EFBIG, CapacityError),
        ],
    )
    def test_nothing_half_is_left_of_a_put(self, root, failing, name, code, error):
        store = FileStore(root)
        before = put(store, 1)
        undo = failing(name, code)
        with pytest.raises(error, match=os.strerror(code)) as raised:
            put(store, 2)
        assert len(str(raised.value).splitlines()) == 1
        undo()
        assert store.keys(SPACE) == {before.key}
        assert not list(root.glob("*/.*"))
        with store.budget.locked() as total:
            assert total.num_bytes == listed_bytes(root) == 32_768
        assert fault_of(store, put(store, 2)) == ""

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    @pytest.mark.parametrize("is_new", [True, False])
    def test_a_full_disk_has_no_room_for_the_total_and_keeps_no_store_from_opening(
        self, root, monkeypatch, code, is_new
    ):
        """The directory is the truth: a total that cannot be written is counted anew."""
        kept = [] if is_new else [put(FileStore(root), 1)]
        names = {key: getattr(os, key) for key in dir(os)}

        def full(*_):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(file_budget, "os", SimpleNamespace(**(names | {"pwrite": full})))
        store = FileStore(root)
        kept.append(put(store, 2))
        monkeypatch.undo()
        assert store.keys(SPACE) == {each.key for each in kept}
        with store.budget.locked() as total:
            assert total.num_bytes is None
        put(store, 3)
        with store.budget.locked() as total:
            assert total.num_bytes == listed_bytes(root)

    def test_a_read_that_fails_is_no_miss(self, root, failing):
        store = FileStore(root)
        wanted = put(store, 1)
        failing("preadv", errno.EIO)
        with pytest.raises(StoreError, match="Input/output error") as raised:
            store.read(SPACE, wanted.key, 0, memoryview(bytearray(10)))
        assert not isinstance(raised.value, StoreMissError)

    def test_a_file_that_another_machine_removed_is_a_miss(self, root, failing):
        store = FileStore(root)
        wanted = put(store, 1)
        failing("open", errno.ESTALE)
        with pytest.raises(StoreMissError):
            store.read(SPACE, wanted.key, 0, memoryview(bytearray(10)))

    def test_short_reads_go_on(self, root, monkeypatch):
        store = FileStore(root)
        wanted = put(store, 1)
        names = {key: getattr(os, key) for key in dir(os)}

        def short(descriptor, buffers, offset):
            return os.preadv(descriptor, [buffers[0][:7]], offset)

        monkeypatch.setattr(file_module, "os", SimpleNamespace(**(names | {"preadv": short})))
        assert fault_of(store, wanted) == ""

    def test_a_directory_that_vanishes_comes_back(self, root):
        store = FileStore(root)
        wanted, into = put(store, 1), memoryview(bytearray(10))
        away = root.with_name("away")
        root.rename(away)
        for call in (
            lambda: put(store, 2),
            lambda: store.keys(SPACE),
            lambda: list(store.heads(SPACE, [wanted.key])),
            lambda: store.read(SPACE, wanted.key, 0, into),
            lambda: store.remove(SPACE, wanted.key),
            store.spaces,
        ):
            with pytest.raises(StoreError) as raised:
                call()
            assert not isinstance(raised.value, StoreMissError)
        assert not root.exists()
        away.rename(root)
        assert fault_of(store, wanted) == ""
        assert fault_of(store, put(store, 2)) == ""

    def test_an_empty_mount_point_is_no_directory_of_donors(self, tmp_path, other_device):
        """A volume is unmounted: what its mount point has is nothing, and nothing is put there."""
        root, mount_point = tmp_path / "root", tmp_path / "mount_point"
        mount_point.mkdir()
        root.symlink_to(other_device)
        store = FileStore(root)
        wanted, into = put(store, 1), memoryview(bytearray(10))
        mount(root, mount_point)
        for call in (
            lambda: put(store, 2),
            lambda: store.keys(SPACE),
            lambda: list(store.heads(SPACE, [wanted.key])),
            lambda: store.read(SPACE, wanted.key, 0, into),
            lambda: store.remove(SPACE, wanted.key),
            lambda: store.trim(0),
            lambda: store.used_bytes,
            store.spaces,
        ):
            with pytest.raises(StoreError, match="mount it") as raised:
                call()
            assert not isinstance(raised.value, StoreMissError)
        assert list(mount_point.iterdir()) == []
        mount(root, other_device)
        assert fault_of(store, wanted) == ""

    def test_a_volume_that_comes_back_under_another_number_is_the_same(self, tmp_path, other_device):
        root, copy = tmp_path / "root", tmp_path / "copy"
        root.symlink_to(other_device)
        store = FileStore(root)
        wanted = put(store, 1)
        shutil.copytree(other_device, copy)
        mount(root, copy)
        assert fault_of(store, wanted) == fault_of(store, put(store, 2)) == ""

    def test_a_space_that_is_a_link_is_refused(self, tmp_path, root):
        """What lies behind it counts against no limit, and may be anybody's."""
        store, elsewhere = FileStore(root), tmp_path / "elsewhere"
        elsewhere.mkdir()
        (root / SPACE).symlink_to(elsewhere)
        wanted = make_object(1)
        for call in (
            lambda: put(store, 1),
            lambda: store.keys(SPACE),
            lambda: list(store.heads(SPACE, [wanted.key])),
            lambda: store.read(SPACE, wanted.key, 0, memoryview(bytearray(1))),
            lambda: store.remove(SPACE, wanted.key),
            lambda: store.touch(SPACE, [wanted.key]),
        ):
            with pytest.raises(StoreError, match="is a link") as raised:
                call()
            assert len(str(raised.value).splitlines()) == 1
        assert list(elsewhere.iterdir()) == []

    def test_a_lock_file_that_is_a_link_is_not_followed(self, tmp_path, root):
        root.mkdir()
        target = tmp_path / "target"
        target.write_bytes(b"somebody's")
        (root / file_budget.LOCK_NAME).symlink_to(target)
        with pytest.raises(ConfigError):
            FileStore(root)
        assert target.read_bytes() == b"somebody's"

    def test_a_child_that_is_forked_under_the_lock_does_not_keep_it(self, root, monkeypatch):
        monkeypatch.setattr(file_budget, "_LOCK_WAIT_S", 0.5)
        store, (heard, said) = FileStore(root), os.pipe()
        with store.budget.locked():
            child = os.fork()
            if child == 0:
                os.close(said)
                os.read(heard, 1)
                os._exit(0)
        try:
            assert fault_of(store, put(store, 1)) == ""
        finally:
            os.close(said)
            os.waitpid(child, 0)
            os.close(heard)

    def test_a_directory_that_was_emptied_is_filled_anew(self, root):
        store = FileStore(root, max_bytes=2 * 32_768)
        for number in range(2):
            put(store, number)
        for path in (*root.glob("*/*"), *root.glob("*"), root / ".kvgraft-lock"):
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        assert store.keys(SPACE) == frozenset()
        assert fault_of(store, put(store, 1)) == ""
        assert store.used_bytes == 32_768


def test_ages_are_those_of_the_last_use(root):
    store = FileStore(root)
    wanted = put(store, 1)
    (file,) = store.files(SPACE)
    assert (file.key, file.was_used) == (wanted.key, False)
    assert abs(time.time() - file.used_at) < 600
    store.touch(SPACE, [wanted.key])
    assert next(store.files(SPACE)).was_used
