"""`kvgraft serve` as clients meet it: a process of `.venv` on a free port, graft-tiny behind a template that shows tools."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVERS_PYTHON = ROOT / ".venv" / "bin" / "python"
TINY = ROOT / "src" / "kvgraft" / "models" / "graft-tiny"

IN_CLIENTS_ENVIRONMENT = Path(sys.prefix).name == ".venv-clients"
ELSEWHERE = "`make test-clients` runs it, where the clients are installed"
"""Why a test of a client is skipped."""

KEY = "test-key"
MODEL = "tiny-chat"
"""The served model: the name of its folder."""
START_S, PATIENCE_S = 300, 120

TEMPLATE = """\
{%- if tools %}System: Answer, or call one of these tools as <tool_call>{"name": ..., "arguments": {...}}</tool_call>.
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}
{% endif %}
{%- for message in messages %}{{ message.role | capitalize }}: {{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}

{% endfor %}
{%- if add_generation_prompt %}Assistant:{% endif %}"""
"""A chat template in the manner of Hermes, so that the parser of tool calls is found by it. graft-tiny brings none."""


def document(topic: str) -> str:
    """Some hundred tokens that no other topic has, for reuse that is one test's own."""
    lines = [
        f"def {topic}_{number}(first, second):\n    return first * {number} + second\n\n\n" for number in range(3, 25)
    ]
    return "".join(lines)


WEATHER = {
    "type": "object",
    "properties": {"day": {"type": "string", "enum": ["today", "tomorrow"]}, "hours": {"enum": [1, 2, 3]}},
    "required": ["day", "hours"],
    "additionalProperties": False,
}
"""Arguments of a tool of which every text is short: a model as small as ours would write on and on where it may."""


def weather_tool() -> dict[str, object]:
    """A tool as OpenAI's API takes it."""
    description = "Tell the weather of the next hours."
    return {"type": "function", "function": {"name": "weather", "description": description, "parameters": WEATHER}}


def is_weather(arguments: object) -> bool:
    """Whether arguments of a call are those that the tool takes."""
    shown = isinstance(arguments, dict) and set(arguments) == {"day", "hours"}
    return shown and arguments["day"] in {"today", "tomorrow"} and arguments["hours"] in {1, 2, 3}


def write_model(folder: Path) -> Path:
    """Write graft-tiny with a chat template and return its directory."""
    path = folder / MODEL
    path.mkdir()
    for file in TINY.iterdir():
        (path / file.name).symlink_to(file)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


class Served:
    """A running server.

    Attributes:
        url: Where it listens, without `/v1`.
        model_path: Directory of its model, for clients that load the tokenizer.
    """

    def __init__(self, url: str, model_path: Path) -> None:
        self.url = url
        self.model_path = model_path

    @property
    def base_url(self) -> str:
        """What clients call `base_url` or `api_base`."""
        return self.url + "/v1"

    def get(self, path: str) -> str:
        """Return the body that an endpoint without a key gives."""
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as response:
            return response.read().decode()

    def post(self, path: str, **body: object) -> dict[str, object]:
        """Ask without any client, for what its answers are held against."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return json.loads(response.read())


@contextmanager
def serving(model_path: Path, *flags: str, key: str = KEY):
    """Run a server until the block is left; what it has logged is shown if it failed."""
    command = [str(SERVERS_PYTHON), "-m", "kvgraft", "serve", "--model", str(model_path), "--port", "0"]
    log: list[str] = []
    process = subprocess.Popen(
        [*command, "--num-slots", "12000", "--shutdown-grace-s", "2", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=servers_environment() | ({"KVGRAFT_API_KEY": key} if key else {}),
    )
    reader = threading.Thread(target=lambda: log.extend(process.stderr), daemon=True)
    reader.start()
    deadline = threading.Timer(START_S, process.kill)
    deadline.start()
    try:
        ready = process.stdout.readline()
        deadline.cancel()
        found = re.search(r"http://\S+(?=/v1)", ready)
        assert found, "".join(log)
        yield Served(found[0], model_path)
    finally:
        deadline.cancel()
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=PATIENCE_S)
        reader.join(timeout=PATIENCE_S)
        process.stdout.close()
        process.stderr.close()
    assert code == 0, "".join(log)
    assert "Traceback" not in "".join(log), "".join(log)


def servers_environment() -> dict[str, str]:
    """No setting of the user, one thread, and the code of this checkout whatever is installed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVGRAFT_")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
