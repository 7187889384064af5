"""HTTPS. The files in `tls/` were made by `openssl` for localhost, for a hundred years; nothing is protected by them."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from kvgraft.cli import main, serve
from kvgraft.errors import ConfigError
from kvgraft.http.process import GracefulServer, bind, certificate

FILES = Path(__file__).parent / "tls"
PATIENCE_S = 60.0


def test_server_speaks_https_with_what_it_was_given(server):
    tls = certificate(str(FILES / "one.pem"), str(FILES / "one.key"))

    async def ask(port):
        trusted = ssl.create_default_context(cafile=FILES / "one.pem")
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusted, server_hostname="localhost")
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer

    async def run():
        ready = asyncio.Event()
        graceful = GracefulServer(server.app, 0.0, ready.set, tls)
        with bind("127.0.0.1", 0) as listener:
            serving = asyncio.create_task(graceful.serve([listener]))
            async with asyncio.timeout(PATIENCE_S):
                await ready.wait()
                answer = await ask(listener.getsockname()[1])
                graceful.should_exit = True
                await serving
        return answer

    assert asyncio.run(run()).startswith(b"HTTP/1.1 200 OK")


def test_without_files_it_is_http():
    assert certificate("", "") is None


def test_key_may_be_in_the_file_of_the_certificate(tmp_path):
    both = tmp_path / "both.pem"
    both.write_bytes((FILES / "one.pem").read_bytes() + (FILES / "one.key").read_bytes())
    assert certificate(str(both), "").certfile == str(both)


@pytest.mark.parametrize(
    ("certfile", "keyfile", "message"),
    [
        ("one.pem", "two.key", r"cannot be used: KEY_VALUES_MISMATCH; give PEM files of a certificate and its own key"),
        ("one.pem", "encrypted.key", "encrypted; decrypt it with"),
        ("one.pem", "one.pem", "cannot be used: "),
        ("one.pem", "", "cannot be used: "),
        ("one.key", "one.key", "cannot be used: "),
        ("none.pem", "one.key", "ssl_certfile is no file: .*none.pem"),
        ("one.pem", "none.key", "ssl_keyfile is no file: .*none.key"),
        ("", "one.key", "ssl_keyfile goes with ssl_certfile"),
    ],
)
def test_pair_that_cannot_be_used_is_named_in_one_line(certfile, keyfile, message):
    certfile, keyfile = (str(FILES / name) if name else "" for name in (certfile, keyfile))
    with pytest.raises(ConfigError, match=message) as caught:
        certificate(certfile, keyfile)
    assert "\n" not in str(caught.value)


def test_serve_notices_a_wrong_pair_before_it_loads_a_model(capsys, monkeypatch):
    monkeypatch.setattr(serve, "_started", lambda _config: pytest.fail("a model is loaded"))
    paths = [f"--ssl-certfile={FILES / 'one.pem'}", f"--ssl-keyfile={FILES / 'two.key'}"]
    assert main(["serve", "--port", "0", *paths]) != 0
    assert "KEY_VALUES_MISMATCH" in capsys.readouterr().err
