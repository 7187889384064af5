"""`kvgraft heal`: what it refuses, before anything is asked."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvgraft.cli import main

SERVER = ("--url", "http://127.0.0.1:1", "--events", "tcp://127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --url URL and --events ENDPOINT, or --worker URL,events=ENDPOINT, once per server"),
        (("--url", "http://127.0.0.1:1"), "--url is given 1 times and --events 0 times; give both for each server"),
        (("--worker", "http://127.0.0.1:1"), "http://127.0.0.1:1 has no events; give --events tcp://HOST:PORT"),
        (("--worker", "127.0.0.1:8001"), "a worker begins with its URL"),
        (("--url", "http://h:1", "--events", "127.0.0.1:5557"), "events of a worker is a ZMQ endpoint such as tcp://"),
        ((*SERVER, *SERVER), "127.0.0.1:1 is given twice; name each server once"),
        (
            (*SERVER, "--worker", "http://127.0.0.1:1/v1,events=tcp://127.0.0.1:1,name=other"),
            "http://127.0.0.1:1 is given twice, under two names; name each server once",
        ),
        (
            ("--worker", "http://h,events=tcp://h:1", "--worker", "http://H:80,events=tcp://h:1,name=other"),
            "is given twice, under two names; name each server once",
        ),
        ((*SERVER, "--api-key", "secret\nkey"), "the API key has a line break or another character"),
        ((*SERVER, "--once"), "--once needs replay=ENDPOINT"),
        ((*SERVER, "--idle-s", "-1"), "--idle-s must be a number from 0 on, not -1.0"),
        ((*SERVER, "--idle-s", "nan"), "--idle-s must be a number from 0 on, not nan"),
        ((*SERVER, "--max-tokens-per-minute", "0"), "--max-tokens-per-minute must be at least 1, not 0"),
        (SERVER, "http://127.0.0.1:1 does not answer: "),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, message, capsys):
    assert main(["heal", *arguments]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("kvgraft: ")
    assert message in line


@pytest.mark.parametrize(("is_well", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_says_whether_something_was_given_up(monkeypatch, is_well, code):
    async def heal(*_, **__):
        return is_well

    monkeypatch.setattr("kvgraft.heal.process.heal", heal)
    assert main(["heal", *SERVER]) == code


@pytest.mark.parametrize("hidden", ["zmq", "msgspec", "aiohttp"])
def test_a_missing_extra_is_named(hidden):
    code = (
        f"import sys; sys.modules[{hidden!r}] = None\nfrom kvgraft.cli import main\n"
        f"sys.exit(main(['heal', *{SERVER!r}]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.strip().splitlines()[-1].endswith("pip install 'kvgraft[router]'")
