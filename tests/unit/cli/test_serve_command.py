"""What `kvgraft serve` says before a model is loaded."""

from __future__ import annotations

import pytest

from kvgraft.cli import main, serve
from kvgraft.errors import ConfigError


def said(monkeypatch, capsys, *flags):
    """Lines of a start that ends where the model would be loaded."""

    def stop(*_):
        raise ConfigError("far enough")

    monkeypatch.setattr(serve, "_started", stop)
    assert main(["serve", "--port", "0", *flags]) == 2
    *lines, end = capsys.readouterr().err.splitlines()
    assert end == "kvgraft: far enough"
    return lines


def test_a_server_that_lets_everybody_in_says_so(monkeypatch, capsys):
    (line,) = said(monkeypatch, capsys, "--host", "0.0.0.0")
    assert "0.0.0.0 port" in line
    assert "lets every client in" in line
    assert "set one, or --host 127.0.0.1" in line


@pytest.mark.parametrize("flags", [(), ("--host", "localhost"), ("--host", "0.0.0.0", "--api-key", "secret")])
def test_others_say_nothing(monkeypatch, capsys, flags):
    assert said(monkeypatch, capsys, *flags) == []
