"""lm-eval over `local-completions` and `local-chat-completions`, on tasks that are written here: no hub is asked."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from tests.clients.served import (
    ELSEWHERE,
    IN_CLIENTS_ENVIRONMENT,
    KEY,
    MODEL,
    ROOT,
    SERVERS_PYTHON,
    START_S,
    document,
    servers_environment,
)

if not IN_CLIENTS_ENVIRONMENT:
    pytest.skip(ELSEWHERE, allow_module_level=True)

import lm_eval
from lm_eval.tasks import TaskManager

QUESTIONS = [
    {"text": "import os\nimport", "options": ["sys", "banana", "os.path"], "answer": 0},
    {"text": "def area(width, height):\n    return width *", "options": ["class", "height", "import"], "answer": 1},
    {"text": "for index in", "options": ["range(10):", "while", "lambda x: x"], "answer": 0},
]


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def write_task(folder, name, rows, **settings):
    """Write a task and the data that it reads; returns the manager that finds it."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    task = {**shared, "test_split": "test", "doc_to_text": "{{text}}", **settings}
    (folder / f"{name}.yaml").write_text(json.dumps(task))
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluate(server, kind, path, manager, name, **options):
    settings = {"model": MODEL, "base_url": server.url + path, "max_retries": 1}
    if kind == "local-completions":
        settings["tokenizer"] = str(server.model_path)
    found = lm_eval.simple_evaluate(
        model=kind,
        model_args=settings,
        tasks=[name],
        task_manager=manager,
        log_samples=True,
        bootstrap_iters=0,
        **options,
    )
    return sorted(found["samples"][name], key=lambda sample: sample["doc_id"])


def moved_tokens(server):
    """Prompt tokens that were taken from elsewhere in earlier prompts, of all requests so far."""
    lines = re.findall(
        r'^kvgraft:prompt_tokens_total\{.*kind="segment".*\} (\S+)$', server.get("/metrics"), re.MULTILINE
    )
    return sum(map(float, lines))


@pytest.mark.parametrize(
    ("kind", "path", "options"),
    [
        ("local-completions", "/v1/completions", {}),
        ("local-chat-completions", "/v1/chat/completions", {"apply_chat_template": True}),
    ],
)
def test_moved_text_of_generation_tasks_is_reused(server, tmp_path, kind, path, options):
    text, name = document(kind.replace("-", "_")), kind.replace("-", "_")
    rows = [{"text": f"# {words}\n{text}", "answer": ""} for words in ("First", "Other words than before", "The third")]
    manager = write_task(
        tmp_path,
        name,
        rows,
        output_type="generate_until",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": ["\n\n\n\n"], "max_gen_toks": 4, "temperature": 0},
        metric_list=[{"metric": "exact_match"}],
    )
    before = moved_tokens(server)
    samples = evaluate(server, kind, path, manager, name, **options)
    assert all(isinstance(sample["resps"][0][0], str) for sample in samples)
    assert moved_tokens(server) > before + 100


def test_scores_of_multiple_choice_are_those_of_the_model(server, tmp_path):
    manager = write_task(
        tmp_path,
        "choices",
        QUESTIONS,
        output_type="multiple_choice",
        doc_to_choice="{{options}}",
        doc_to_target="{{answer}}",
        metric_list=[{"metric": "acc"}],
    )
    samples = evaluate(server, "local-completions", "/v1/completions", manager, "choices")
    found = [[float(logprob), bool(greedy)] for sample in samples for [[logprob, greedy]] in sample["resps"]]
    pairs = [[question["text"], " " + option] for question in QUESTIONS for option in question["options"]]
    expected = scores_of_the_model(server, pairs)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-3)


def scores_of_the_model(server, pairs):
    """What `LLM.score` says, in a process that has torch."""
    asked = json.dumps({"model": str(server.model_path), "pairs": pairs})
    done = subprocess.run(
        [str(SERVERS_PYTHON), "-m", "tests.clients.score_oracle"],
        input=asked,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=servers_environment(),
        timeout=START_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
