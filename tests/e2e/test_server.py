"""The server as a process: the real `openai` client, `curl`, signals, disconnects, restarts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import openai
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvgraft.cli import main
from kvgraft.server.options import CORRECTIONS, SELECTIONS

START_S = 300
PATIENCE_S = 60
"""Longest wait for what takes a moment on a quiet machine."""

KEY = "test-key"
DOCUMENT = "def area(width, height):\n    return width * height\n\n\nclass Box:\n    sides = 6\n" * 20
WAITED = {
    "time": "before",
    "reason": None,
    "from_token": 1,
    "rows_per_step": 0,
    "exact_from_token": None,
    "healed_tokens": 0,
}


class Process:
    """`kvgraft serve` on a free port."""

    def __init__(self, *flags, port=0, env=()):
        command = [sys.executable, "-m", "kvgraft", "serve", "--port", str(port), "--num-slots", "6000", *flags]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVGRAFT_")}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ | dict(env)
        )
        self.log = []
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self.ready_line = self._ready_line()
        self.url = re.search(r"http://\S+(?=/v1)", self.ready_line)[0]
        self.port = int(self.url.rsplit(":", 1)[1])

    def _read_log(self):
        for line in self.process.stderr:
            self.log.append(line)

    def _ready_line(self):
        timer = threading.Timer(START_S, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        assert line, "".join(self.log)
        return line

    def client(self, key=KEY, **options):
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=PATIENCE_S, **options)

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as response:
            return response.read().decode()

    def health(self):
        return json.loads(self.get("/health"))

    def wait_until_idle(self, patience_s=PATIENCE_S):
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            health = self.health()
            if health["requests"] == {"running": 0, "waiting": 0} and health["slots"]["request"] == 0:
                return health
            time.sleep(0.05)
        raise AssertionError(f"still busy: {health}")

    def wait_until_draining(self):
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                self.get("/health")
            except urllib.error.HTTPError as refusal:
                if json.loads(refusal.read())["status"] == "shutting_down":
                    return
            time.sleep(0.02)
        raise AssertionError("still takes requests")

    def close(self):
        """End it and return its exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._reader.join(timeout=PATIENCE_S)
        self.process.stdout.close()
        self.process.stderr.close()
        return code


@pytest.fixture(scope="module")
def server():
    options = ("--log-format", "json", "--shutdown-grace-s", "1", "--repair-below-margin", "0")
    process = Process(*options, env={"KVGRAFT_API_KEY": KEY})
    yield process
    assert process.close() == 0
    assert "Traceback" not in "".join(process.log)


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def test_ready_line_says_what_is_served_and_where(server):
    assert re.fullmatch(
        r"kvgraft \S+ serves graft-tiny at http://127\.0\.0\.1:\d+/v1 with 6,000 K/V slots, reuse graft; Ctrl\+C stops it\n",
        server.ready_line,
    )


class TestOpenAIClient:
    def test_models(self, client):
        (model,) = client.models.list().data
        assert model.id == client.models.retrieve("graft-tiny").id == "graft-tiny"

    def test_completion(self, client):
        answer = client.completions.create(
            model="graft-tiny", prompt="import ", max_tokens=5, temperature=0, logprobs=2
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "length"
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 5
        assert choice.logprobs.text_offset[0] == 0
        assert "".join(choice.logprobs.tokens) == choice.text
        assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)
        assert answer.usage.completion_tokens == 5
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5

    def test_completion_of_several_prompts(self, client):
        prompts = ["import os", "import sys"]
        answer = client.completions.create(model="graft-tiny", prompt=prompts, n=2, max_tokens=3, seed=1)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert all("kvgraft" in choice.model_extra for choice in answer.choices)

    def test_a_request_says_when_it_is_repaired(self, client):
        # Nothing is said twice: the first token of text that repeats itself may wait, by which donors healing has left.
        document = "".join(f"{each * 7919 % 1013} is kept in hall {each * 31 % 17}.\n" for each in range(60))

        def ask(prompt, **kvgraft):
            answer = client.completions.create(
                model="graft-tiny",
                prompt=prompt + document,
                max_tokens=3,
                extra_body={"kvgraft": kvgraft, "cache_salt": "repaired", "ignore_eos": True},
            )
            return answer.model_extra["kvgraft"]["repair"]

        ask("")
        assert ask("# One.\n", repair="before") == WAITED
        assert ask("# And two.\n", repair="after") == WAITED | {"time": "after", "from_token": 2}
        assert ask("# And, at last, three.\n") == WAITED | {"time": "after", "from_token": 2}

    def test_reuse_is_reported(self, client):
        def ask(prompt, **body):
            return client.completions.create(model="graft-tiny", prompt=prompt, max_tokens=1, extra_body=body)

        # Under a salt of its own, as other tests told the server the same text without a name.
        ask(DOCUMENT, kvgraft={"documents": [{"id": "boxes", "text": DOCUMENT}]}, cache_salt="boxes")
        moved = ask("# A new beginning of other words.\n" + DOCUMENT, cache_salt="boxes")
        report = moved.model_extra["kvgraft"]
        assert report["shifted_tokens"] > 100
        assert report["spans"][0]["fidelity"] == "shifted"
        assert report["spans"][0]["documents"][0]["id"] == "boxes"
        assert moved.usage.model_extra["kvgraft"]["shifted_tokens"] == report["shifted_tokens"]
        assert moved.usage.prompt_tokens_details.cached_tokens == report["reused_tokens"]
        assert report["repair"] == WAITED | {"reason": "one token was asked for"}
        salted = ask("# A new beginning of other words.\n" + DOCUMENT, cache_salt="other tenant")
        assert salted.usage.prompt_tokens_details.cached_tokens == 0
        off = ask("# Once more.\n" + DOCUMENT, kvgraft={"reuse": "off"})
        assert off.model_extra["kvgraft"]["miss"]["reason"] == "reuse_off"

    def test_what_was_generated_is_scored_alike_in_an_echo(self, client):
        prompt = [9, 8]
        fields = {"model": "graft-tiny", "temperature": 0, "logprobs": 1}
        asked = {"return_token_ids": True, "ignore_eos": True}
        (drawn,) = client.completions.create(prompt=prompt, max_tokens=5, extra_body=asked, **fields).choices
        whole = prompt + drawn.model_extra["token_ids"]
        (scored,) = client.completions.create(prompt=whole, max_tokens=0, echo=True, **fields).choices
        assert scored.logprobs.token_logprobs[0] is None
        assert scored.logprobs.token_logprobs[2:] == pytest.approx(drawn.logprobs.token_logprobs, abs=1e-3)
        assert len(scored.logprobs.tokens) == len(scored.logprobs.text_offset) == 7
        assert scored.text.endswith(drawn.text)

    def test_stream_gives_the_same_text_as_one_answer(self, client):
        fields = {"model": "graft-tiny", "prompt": "for name in ", "max_tokens": 12, "temperature": 0}
        whole = client.completions.create(**fields)
        *chunks, last = client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert chunks[-1].choices[0].finish_reason == "length"
        assert "kvgraft" in chunks[-1].model_extra
        assert last.choices == []
        assert last.usage.completion_tokens == 12

    def test_chat(self, client):
        messages = [{"role": "system", "content": "You write Python."}, {"role": "user", "content": "def f("}]
        answer = client.chat.completions.create(
            model="graft-tiny", messages=messages, max_completion_tokens=4, logprobs=True, top_logprobs=3, temperature=0
        )
        (choice,) = answer.choices
        assert choice.message.role == "assistant"
        assert [len(token.top_logprobs) for token in choice.logprobs.content] == [3] * answer.usage.completion_tokens

    def test_chat_stream(self, client):
        fields = {
            "model": "graft-tiny",
            "messages": [{"role": "user", "content": "import"}],
            "max_tokens": 8,
            "temperature": 0,
        }
        whole = client.chat.completions.create(**fields)
        chunks = list(client.chat.completions.create(**fields, stream=True))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content

    def test_stop_text_is_cut_off(self, client):
        fields = {"model": "graft-tiny", "prompt": "import sys\n", "max_tokens": 20, "temperature": 0}
        text = client.completions.create(**fields).choices[0].text
        stopped = client.completions.create(**fields, stop=[text[3:6]]).choices[0]
        assert stopped.text == text[: text.index(text[3:6])]
        assert stopped.finish_reason == "stop"

    def test_errors_are_the_client_s_own(self, client, server):
        with server.client("wrong") as stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="gpt-4", prompt="x")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            client.completions.create(model="graft-tiny", prompt="x", temperature=3)
        assert wrong.value.param == "temperature"
        with pytest.raises(openai.BadRequestError, match="shorten") as long:
            client.completions.create(model="graft-tiny", prompt=[5] * 7_000)
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError, match="an embedding model"):
            client.embeddings.create(model="graft-tiny", input="x")


def curl(server, path, *arguments):
    program = shutil.which("curl")
    if program is None:
        pytest.skip("curl is not installed")
    command = [program, "-sS", "--max-time", "20", "-H", f"Authorization: Bearer {KEY}", *arguments, server.url + path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class TestCurl:
    def test_chat_stream(self, server):
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": True})
        out = curl(server, "/v1/chat/completions", "-N", "-H", "Content-Type: application/json", "-d", body)
        assert out.endswith("data: [DONE]\n\n")
        assert json.loads(out.split("\n\n")[0].removeprefix("data: "))["object"] == "chat.completion.chunk"

    def test_forgotten_content_type_is_explained(self, server):
        assert "application/json" in curl(server, "/v1/completions", "-d", "{}")

    def test_large_body_is_refused(self, server, tmp_path):
        body = tmp_path / "large.json"
        body.write_bytes(b'{"prompt": "' + b"x" * (5 << 20) + b'"}')
        arguments = ("-H", "Content-Type: application/json", "--data-binary", f"@{body}", "-w", "%{http_code}")
        assert curl(server, "/v1/completions", *arguments).endswith("413")
        chunked = ("-H", "Transfer-Encoding: chunked", *arguments)
        assert curl(server, "/v1/completions", *chunked).endswith("413")

    def test_head_of_health(self, server):
        assert " 200 " in curl(server, "/health", "-I")


def test_metrics_follow_the_requests(server, client):
    def generated():
        return float(re.search(r"kvgraft:generation_tokens_total\{.*\} (\S+)", server.get("/metrics"))[1])

    before = generated()
    client.completions.create(model="graft-tiny", prompt="x = ", max_tokens=7, extra_body={"ignore_eos": True})
    assert generated() == before + 7
    text = server.get("/metrics")
    assert 'kvgraft:prompt_tokens_total{kind="fresh",model_name="graft-tiny",outcome="exact"}' in text
    assert "kvgraft:time_to_first_token_seconds_bucket" in text


BODIES = st.fixed_dictionaries(
    {
        "prompt": st.text(max_size=30)
        | st.lists(st.integers(0, 4095), min_size=1, max_size=30)
        | st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3),
        "max_tokens": st.integers(1, 3),
    },
    optional={
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": st.integers(-1, 2**31),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "stop": st.lists(st.text(min_size=1, max_size=3), max_size=3),
        "logprobs": st.integers(0, 20),
        "n": st.integers(1, 3),
        "stream": st.booleans(),
        "ignore_eos": st.booleans(),
        "cache_salt": st.text(max_size=5),
        "echo": st.booleans(),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 10),
        "logit_bias": st.dictionaries(st.integers(0, 4095).map(str), st.floats(-100, 100), max_size=3),
        "min_p": st.floats(0, 1),
        "min_tokens": st.integers(0, 1),
        "stop_token_ids": st.lists(st.integers(0, 4095), max_size=3),
        "bad_words": st.lists(st.sampled_from(["def", "import os", "x"]), max_size=2),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "return_token_ids": st.booleans(),
        "kvgraft": st.fixed_dictionaries(
            {"selection": st.sampled_from(SELECTIONS), "correction": st.sampled_from(CORRECTIONS)},
            optional={
                "reuse": st.sampled_from(["off", "exact", "graft", "verified"]),
                "repair": st.sampled_from(["before", "after"]),
            },
        ),
    },
).filter(lambda body: not (body.get("echo") and body.get("stream") and "logprobs" in body))


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(BODIES)
@example({"prompt": "x", "max_tokens": 1, "top_p": 5e-324})
@example({"prompt": "x", "max_tokens": 2, "stream": True, "kvgraft": {"reuse": "verified", "provisional": True}})
def test_every_valid_body_is_answered(server, body):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        answer = response.read()
    assert b'data: {"error"' not in answer  # a token may be called "error", so look for the whole event
    assert b'"miss":{"reason":"error"' not in answer, "".join(server.log[-20:])
    assert b'"finish_reason":"' in answer


def long_stream(client, **options):
    options = {
        "model": "graft-tiny",
        "prompt": "import os\n",
        "max_tokens": 3_000,
        "extra_body": {"ignore_eos": True},
    } | options
    return client.completions.create(**options, stream=True)


def test_a_stream_tells_of_its_cut_prompt_and_of_the_tokens_so_far(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    extra = {"truncate_prompt_tokens": 40, "prompt_logprobs": 1, "return_tokens_as_token_ids": True}
    first, *others, last = client.completions.create(
        model="graft-tiny",
        prompt=DOCUMENT,
        stream=True,
        logprobs=1,
        max_tokens=3.0,
        temperature=0,
        stream_options=options,
        extra_body=extra | {"ignore_eos": True, "return_token_ids": True},
    )
    choice = first.choices[0]
    kept = choice.model_extra["prompt_token_ids"]
    assert len(kept) == len(choice.model_extra["prompt_logprobs"]) == 40
    assert all(
        str(token) in told for token, told in zip(kept[1:], choice.model_extra["prompt_logprobs"][1:], strict=True)
    )
    assert [chunk.usage.completion_tokens for chunk in (first, *others, last)] == [1, 2, 3, 3]
    assert {chunk.usage.prompt_tokens for chunk in (first, *others, last)} == {40}
    assert all(
        re.fullmatch(r"token_id:\d+", token) for chunk in (first, *others) for token in chunk.choices[0].logprobs.tokens
    )


def test_disconnects_free_everything(server, client):
    streams = [long_stream(client) for _ in range(4)]
    for stream in streams:
        next(iter(stream))
    assert server.health()["requests"]["running"] == 4
    for stream in streams:
        stream.close()
    with contextlib.suppress(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(
            model="graft-tiny", prompt="x", max_tokens=3_000, extra_body={"ignore_eos": True}
        )
    assert server.wait_until_idle()["invariant"] == "ok"


def test_log_lines_are_json_with_ids_and_counts(server, client):
    client.completions.create(
        model="graft-tiny", prompt="x", max_tokens=2, extra_headers={"x-request-id": "look-for-me"}
    )
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and not any("look-for-me" in line for line in server.log):
        time.sleep(0.05)
    (entry,) = [json.loads(line) for line in server.log if "look-for-me" in line]
    assert (entry["status"], entry["output_tokens"], entry["path"]) == (200, 2, "/v1/completions")


def raw(server, data, wait_s=PATIENCE_S):
    """Send bytes and read until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=wait_s) as connection:
        connection.sendall(data)
        received = b""
        while chunk := connection.recv(65_536):
            received += chunk
        return received


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 100_000,
    ],
)
def test_what_is_no_http_is_400_and_does_no_harm(server, data):
    assert raw(server, data).startswith(b"HTTP/1.1 400 ")
    assert server.health()["status"] == "ok"


@pytest.mark.parametrize("reuse", ["graft", "exact"])
def test_choices_compute_a_new_prompt_once(client, reuse):
    fields = {"prompt": f"# Written for {reuse} alone.\n" + DOCUMENT, "n": 8, "max_tokens": 4, "temperature": 1}
    extra = {"kvgraft": {"reuse": reuse}, "cache_salt": f"choices-{reuse}"}
    answer = client.completions.create(model="graft-tiny", **fields, extra_body=extra)
    first, *others = [choice.kvgraft for choice in answer.choices]
    assert first["computed_tokens"] == first["num_tokens"] > 200
    assert sum(report["computed_tokens"] for report in others) < first["num_tokens"] / 2


def test_logprobs_of_a_chat_do_not_have_the_token_that_ends_it(client):
    fields = {"model": "graft-tiny", "messages": [{"role": "user", "content": DOCUMENT}], "max_tokens": 6}
    fields |= {"temperature": 0, "logprobs": True}
    ids = client.chat.completions.create(**fields, extra_body={"return_token_ids": True}).choices[0].token_ids
    cut = client.chat.completions.create(**fields, extra_body={"stop_token_ids": [ids[3]]}).choices[0]
    assert cut.finish_reason == "stop"
    assert len(cut.logprobs.content) == ids.index(ids[3])


@pytest.mark.parametrize("path", ["/ui", "/ui/", "/ui/events", "/ui/api/requests", "/ui/static/inspector.js"])
def test_the_inspector_is_not_there_unless_it_is_asked_for(server, path):
    request = urllib.request.Request(server.url + path, headers={"Authorization": f"Bearer {KEY}"})
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(request, timeout=PATIENCE_S)


def test_target_may_be_a_whole_address(server):
    head = f"GET {server.url}/v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n"
    reply = raw(server, head.encode())
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert b"graft-tiny" in reply


class TestMessages:
    """In plain HTTP, as a client of Anthropic's API sends it."""

    def ask(self, server, path="/v1/messages", **fields):
        body = {"model": "graft-tiny", "messages": [{"role": "user", "content": DOCUMENT}], "temperature": 0} | fields
        if path.endswith("count_tokens"):
            del body["temperature"]
        headers = {"content-type": "application/json", "x-api-key": KEY, "anthropic-version": "2023-06-01"}
        request = urllib.request.Request(f"{server.url}{path}?beta=true", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.read().decode()

    def events(self, text):
        return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]

    def test_whole_and_streamed_are_the_same(self, server):
        whole = json.loads(self.ask(server, max_tokens=12))
        events = self.events(self.ask(server, max_tokens=12, stream=True))
        deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(deltas) == whole["content"][0]["text"]
        assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
        assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"] == "max_tokens"
        assert events[-2]["usage"]["cache_read_input_tokens"] > 200
        counted = json.loads(self.ask(server, "/v1/messages/count_tokens"))["input_tokens"]
        assert counted == events[0]["message"]["usage"]["input_tokens"] == whole["kvgraft"]["num_tokens"]

    def test_stop_sequence_is_named_and_cut_off(self, server):
        text = json.loads(self.ask(server, max_tokens=24))["content"][0]["text"]
        stop = text[len(text) // 2 :][:4]
        fields = {"max_tokens": 24, "stop_sequences": [stop, "never"]}
        whole, events = json.loads(self.ask(server, **fields)), self.events(self.ask(server, **fields, stream=True))
        deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
        assert whole["content"][0]["text"] == "".join(deltas) == text[: text.index(stop)]
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", stop)
        assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}

    def test_tools_are_called(self, server):
        """The model has no template that shows them: it is told of them by default."""
        schema = {"type": "object", "properties": {"level": {"enum": ["low", "high"]}}, "required": ["level"]}
        choice = {"type": "any", "disable_parallel_tool_use": True}
        fields = {"tools": [{"name": "set_level", "input_schema": schema}], "tool_choice": choice, "max_tokens": 64}
        [call] = json.loads(self.ask(server, **fields))["content"]
        assert (call["type"], call["name"]) == ("tool_use", "set_level")
        assert call["input"]["level"] in ("low", "high")
        events = self.events(self.ask(server, **fields, stream=True))
        deltas = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
        assert json.loads("".join(deltas)) == call["input"]
        assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_port_in_use_is_one_line_and_exit_code_2(server, capsys):
    assert main(["serve", "--port", str(server.port)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"kvgraft: cannot listen on 127.0.0.1 port {server.port}: Address already in use; choose another --port\n"
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "./no-such-dir"], "does not exist"),
        (["--port", "http"], "--port: port must be a whole number"),
        (["--host", "256.0.0.1"], "--host"),
        (["--config", "no-such-file.yaml"], "no-such-file.yaml"),
    ],
)
def test_bad_start_is_one_line_and_exit_code_2(flags, words, capsys):
    assert main(["serve", "--port", "0", *flags]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert words in captured.err


def test_exit_code_is_that_of_the_process():
    command = [sys.executable, "-m", "kvgraft", "serve", "--port", "http"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_S)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)


def consume(stream, outcome):
    try:
        for chunk in stream:
            outcome.append(chunk.choices[0].finish_reason)
    except openai.APIError as error:
        outcome.append(error)


def test_sigterm_finishes_short_streams_fails_long_ones_and_exits_0():
    server = Process("--shutdown-grace-s", "4")
    with server.client() as client:
        long, short = long_stream(client), long_stream(client, max_tokens=6)
        for stream in (long, short):
            next(iter(stream))
        outcomes = [[], []]
        threads = [threading.Thread(target=consume, args=pair) for pair in zip((long, short), outcomes, strict=True)]
        for thread in threads:
            thread.start()
        server.process.send_signal(signal.SIGTERM)
        server.wait_until_draining()
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model="graft-tiny", prompt="x")
        assert refused.value.status_code == 503
        for thread in threads:
            thread.join(timeout=PATIENCE_S)
    assert server.process.wait(timeout=PATIENCE_S) == 0
    server.close()
    assert outcomes[1][-1] == "length"
    assert isinstance(outcomes[0][-1], openai.APIError)
    assert "Traceback" not in "".join(server.log)


def test_full_server_refuses_with_429_and_a_second_signal_ends_it_at_once():
    server = Process("--shutdown-grace-s", "600", "--max-running", "1", "--max-waiting", "1")
    body = b'{"prompt": "x", "max_tokens": 3000, "ignore_eos": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with server.client() as client, socket.create_connection(("127.0.0.1", server.port)) as waiting:
        stream = long_stream(client)
        next(iter(stream))
        waiting.sendall(head % len(body) + body)
        while server.health()["requests"] != {"running": 1, "waiting": 1}:
            time.sleep(0.02)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="graft-tiny", prompt="x")
        assert refused.value.response.headers["retry-after"] == "1"
        server.process.send_signal(signal.SIGTERM)
        server.wait_until_draining()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=PATIENCE_S) == 128 + signal.SIGTERM
        stream.close()
    server.close()


def test_settings_of_the_prefix_cache_reach_a_served_model(tmp_path):
    """Whole pages are found again, prefixes of higher priority outlive others, and a reader hears of what is stored."""
    events = pytest.importorskip("kvgraft.events.publisher")
    pytest.importorskip("msgspec")
    pytest.importorskip("zmq")
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    process = Process(
        *("--page-size", "64", "--reuse", "exact", "--num-slots", "1024", "--eviction-policy", "priority"),
        *("--kv-events", json.dumps({"endpoint": endpoint, "replay_endpoint": replay})),
    )
    subscriber = events.ZmqEventSubscriber(endpoint, replay_endpoint=replay)
    try:

        def ask(token, priority=0):
            prompt = [token] * 400
            body = json.dumps({"prompt": prompt, "max_tokens": 2, "ignore_eos": True, "priority": priority}).encode()
            request = urllib.request.Request(
                process.url + "/v1/completions", body, {"Content-Type": "application/json"}, method="POST"
            )
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                return json.loads(response.read())["kvgraft"]["exact_tokens"]

        assert ask(100, priority=1) == 0
        assert ask(100, priority=1) == 384, "six pages of 64"
        for token in range(101, 105):
            assert ask(token) == 0
        assert ask(100) == 384, "it was the oldest, and is still there"
        assert ask(101) == 0
        stored = set()
        while not {100, 101, 102, 103, 104} <= stored:
            ask(105)
            for batch in subscriber.receive(PATIENCE_S):
                for event in batch.events:
                    stored.update(getattr(event, "token_ids", ()))
                    assert getattr(event, "block_size", 64) == 64
    finally:
        subscriber.close()
        code = process.close()
    assert code == 0, process.log
