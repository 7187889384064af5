"""The client and the open loop against a fake server: times, failures, leaving early, and the stop when it saturates."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys

import pytest
from tests.unit.bench.conftest import PATIENCE_S
from tests.unit.bench.simulation import SimulatedServer, run_in_simulated_time

from kvgraft.bench.client import CompletionsClient, TimedRequest, completion_body, now
from kvgraft.bench.load import run_closed_loop, run_open_loop
from kvgraft.errors import ConfigError

BODY = completion_body("prompt", model="fake", max_tokens=3)


def with_client(url, work):
    async def run():
        async with CompletionsClient(url) as client:
            return await work(client)

    return asyncio.run(run())


def stream(url, body=BODY):
    async def work(client):
        exchange = TimedRequest(now())
        await client.stream(body, exchange)
        return exchange

    return with_client(url, work)


def load(arrivals, give_up_s=5.0, **server):
    async def run():
        async with SimulatedServer(**server) as client:
            return await run_open_loop(client.stream, [BODY] * len(arrivals), arrivals, give_up_s=give_up_s)

    return run_in_simulated_time(run())


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_exchange_has_times_and_figures(fake):
    exchange = stream(fake.url)
    assert exchange.succeeded
    assert len(exchange.token_s) == exchange.completion_tokens == 3
    assert (exchange.prompt_tokens, exchange.reused_tokens) == (10, 4)
    moments = [exchange.scheduled_s, exchange.sent_s, *exchange.token_s, exchange.ended_s]
    assert moments == sorted(moments)
    assert exchange.ttft_s == moments[2] - moments[0]
    assert exchange.tpot_s == (moments[4] - moments[2]) / 2
    assert exchange.end_to_end_s == moments[5] - moments[0]


def test_report_tells_what_was_reused_before_usage_does(fake):
    fake.report = {"num_tokens": 12, "exact_tokens": 1, "shifted_tokens": 7, "computed_tokens": 5}
    exchange = stream(fake.url)
    assert (exchange.prompt_tokens, exchange.reused_tokens) == (12, 8)
    fake.report = {
        "num_tokens": 12,
        "exact_tokens": 1,
        "continued_tokens": 4,
        "shifted_tokens": 2,
        "computed_tokens": 5,
    }
    assert stream(fake.url).reused_tokens == 7


@pytest.mark.parametrize("piece", [1, 3, 7])
def test_events_in_pieces_give_the_same(fake, piece):
    fake.piece, fake.tokens = piece, ("ä", "🙂", " c")
    exchange = stream(fake.url)
    assert exchange.succeeded
    assert len(exchange.token_s) == 3


@pytest.mark.parametrize(
    ("attribute", "value", "failure"),
    [
        ("status", 400, "http 400"),
        ("status", 503, "http 503"),
        ("cut_after", 2, "stream cut short"),
        ("error_after", 1, "error in stream"),
        ("report", {"num_tokens": "?"}, "malformed event"),
    ],
)
def test_failures_have_kinds(fake, attribute, value, failure):
    setattr(fake, attribute, value)
    exchange = stream(fake.url)
    assert exchange.failure == failure
    assert exchange.ended_s is not None
    assert not exchange.succeeded
    assert exchange.tpot_s is exchange.end_to_end_s is None


def test_no_server_is_a_failure_of_the_request():
    assert stream(f"http://127.0.0.1:{closed_port()}").failure == "no connection"


def test_server_that_dies_in_mid_stream_is_a_failure():
    code = (
        "import socket, sys\n"
        "s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)\n"
        "c = s.accept()[0]; c.recv(9999)\n"
        "c.sendall(b'HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n7\\r\\ndata: {\\r\\n')"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert stream(f"http://127.0.0.1:{int(process.stdout.readline())}").failure == "disconnected"


def test_url_that_does_not_answer_is_one_line():
    with pytest.raises(ConfigError, match="is a server running there") as caught:
        with_client(f"http://127.0.0.1:{closed_port()}", lambda client: client.get_json("/v1/models"))
    assert "\n" not in str(caught.value)


def test_url_of_something_else_is_one_line(fake):
    with pytest.raises(ConfigError, match="/nothing"):
        with_client(fake.url, lambda client: client.get_json("/nothing"))


def test_leaving_early_closes_the_connection(fake):
    fake.token_s = PATIENCE_S  # the answer is far from complete when the client leaves

    async def work(client):
        events = client.events(BODY)
        first = await anext(events)
        await events.aclose()
        assert await asyncio.to_thread(fake.left.wait, PATIENCE_S)
        return first

    assert json.loads(with_client(fake.url, work))["choices"][0]["text"] == " a"


def test_api_key_and_body(fake):
    body = completion_body([1, 2], model="m", max_tokens=4, reuse="exact", cache_salt="s", others={"max_tokens": 9})
    fields = json.loads(body)
    assert fields["prompt"] == [1, 2]
    assert fields["kvgraft"] == {"reuse": "exact"}
    assert (fields["cache_salt"], fields["max_tokens"], fields["ignore_eos"]) == ("s", 9, True)
    assert "stream_options" not in json.loads(completion_body("", model="m", max_tokens=1, stream=False))


def test_requests_are_sent_at_their_times_whatever_became_of_earlier_ones():
    result = load([0.0, 0.05, 0.1], prefill_s=0.2, token_s=0.0)
    assert result.gave_up is None
    assert len(result.exchanges) == result.planned == 3
    sent = [exchange.sent_s - result.exchanges[0].scheduled_s for exchange in result.exchanges]
    assert sent == pytest.approx([0.0, 0.05, 0.1])
    # One at a time: the third has its first token after 0.6 s.
    assert [exchange.ttft_s for exchange in result.exchanges] == pytest.approx([0.2, 0.35, 0.5])
    assert result.seconds == pytest.approx(0.6)


def test_run_stops_when_the_server_falls_behind():
    result = load([i * 0.02 for i in range(200)], give_up_s=0.5, prefill_s=0.3, token_s=0.0)
    assert "0.5 s for its first token" in result.gave_up
    assert result.seconds == pytest.approx(0.52)  # the second would be answered after 0.58 s
    assert len(result.exchanges) < 40
    unfinished = [exchange for exchange in result.exchanges if exchange.ended_s is None]
    assert unfinished
    assert not any(exchange.failure for exchange in unfinished)


def test_run_stops_when_streams_do_not_end():
    result = load([0.0, 0.01], give_up_s=0.3, token_s=30.0)
    assert "2 requests ran on 0.6 s" in result.gave_up


def test_closed_loop_sends_in_order_and_one_at_a_time_per_client(fake):
    bodies = [completion_body(str(i), model="fake", max_tokens=1) for i in range(5)]
    exchanges = with_client(fake.url, lambda client: run_closed_loop(client.stream, bodies, 1))
    assert [body["prompt"] for body in fake.bodies] == list("01234")
    assert all(exchange.succeeded for exchange in exchanges)


def test_closed_loop_stops_when_the_server_is_gone():
    url = f"http://127.0.0.1:{closed_port()}"
    exchanges = with_client(url, lambda client: run_closed_loop(client.stream, [BODY] * 50, 4))
    assert [exchange.failure for exchange in exchanges] == ["no connection"] * 4


def test_client_loads_no_torch():
    modules = "kvgraft.bench.serve, kvgraft.bench.serve_workload, kvgraft.bench.plot"
    code = f"import sys, {modules}; print({{'torch', 'transformers'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
