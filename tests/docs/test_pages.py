"""What the pages name exists: files, functions, classes, settings, commands and their options; links lead somewhere."""

from __future__ import annotations

import argparse
import ast
import fnmatch
import importlib
import posixpath
import re
import shlex
from functools import cache

import pytest
from tests.docs.code_index import ROOT, code_index, files
from tests.docs.pages import PAGES, expanded, page

from kvgraft.cli import build_parser

DESCRIPTIONS = [name for name in PAGES if not name.startswith("docs/adr/")]
"""Pages of what is; decisions also name what was."""

OTHERS = {
    "client.responses.parse": "OpenAI's client",
    "response.completed": "OpenAI's events",
    "usage.input_tokens": "fields of answers",
    "usage.kvgraft": "fields of answers",
    "v1/core/sched/scheduler.py": "vLLM",
    "v1/worker/kv_connector_model_runner_mixin.py": "vLLM",
    "unified_radix_cache.py": "SGLang",
    "common.py": "SGLang",
    "schedule_policy.py": "SGLang",
    "allocation.py": "SGLang",
    "reports.jsonl": "the user's",
    "f.json": "the user's",
    "f.requests.jsonl": "the user's",
    "vllm.general_plugins": "an entry point of vLLM",
    "swa_evicted_seqlen": "SGLang",
    "_from_tensor": "the end of a name of SGLang",
    "_from_distributed": "the end of a name of SGLang",
    "_from_ipc": "the end of a name of SGLang",
    "view_of_the_key": "pseudo-code",
    "agent_": "the beginning of names of request packs",
    "arena_hard": "a request pack",
    "enableServiceLinks": "Kubernetes",
    "extra-openai-models.yaml": "llm",
    "my_module": "the user's",
    "refresh_after": "a setting until 0.3, which the changelog names",
    "KVGRAFT_CHAT_SERVICE_HOST": "Kubernetes, of a service called kvgraft-chat",
    "terminationGracePeriodSeconds": "Kubernetes",
    "ReadWriteMany": "Kubernetes",
    "newName": "kustomize",
    "proxy_buffering": "nginx",
    "proxy_read_timeout": "nginx",
}
"""Names that are not ours, and whose they are."""

_EXTENSIONS = (".py", ".md", ".json", ".jsonl", ".toml", ".txt", ".sh", ".yaml")


def names(span: str) -> list[str]:
    """Identifiers in a span of code that could be mistaken: with a dot, an underscore or a capital inside."""
    found = re.findall(r"(?<![\w./-])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?![\w/-])", span)
    return [
        name
        for name in found
        if not name.endswith(_EXTENSIONS) and re.search(r"[._]|[a-z0-9][A-Z]", name) and not name.startswith("__")
    ]


def paths(text: str) -> list[str]:
    """Files and folders that a text names."""
    found = [path.rstrip(".,") for path in re.findall(r"(?<![\w./:-])[\w.{},*-]*(?:/[\w.{},*-]*)*(?![\w(])", text)]
    return [path for path in found if _is_path(path) and not re.fullmatch(r"[A-Z]*\.\w+", path)]


def _is_path(text: str) -> bool:
    is_folder = text.endswith("/") and len(text) > 2 and not text.startswith("/")
    return (text.endswith(_EXTENSIONS) and not text.startswith(("/", "*"))) or is_folder


def has_file(path: str) -> bool:
    """Whether files or folders of the repository end in `path`, which may have braces and stars."""
    return all(
        any(fnmatch.fnmatch(f"/{file}", f"*/{one.removeprefix('./')}") for file in files()) for one in expanded(path)
    )


def problem_with(name: str) -> str | None:
    """Say what is wrong with a name of code, or None."""
    index, parts = code_index(), name.split(".")
    if name in OTHERS or name in index.strings:
        return None
    if parts[0] == "kvgraft":
        return _problem_with_import(name)
    if parts[0] == "benchmarks" and has_file(f"{'/'.join(parts)}.py"):
        return None
    if any(f".{module}".endswith(f".{name}") for module in index.defined):
        return None
    if not index.words & {parts[-1], parts[-1].removesuffix("_total")}:
        return f"{parts[-1]!r} occurs nowhere in the code"
    if len(parts) == 1:
        return None
    owner, member = parts[-2], parts[-1]
    if owner in index.classes:
        return None if index.has_member(owner, member) else f"class {owner} has no {member!r}"
    modules = index.modules_named(owner)
    if modules and not any(member in index.defined[module] for module in modules):
        return f"{owner!r} defines no {member!r}"
    return None if modules or owner in index.words else f"{owner!r} occurs nowhere in the code"


@cache
def _problem_with_import(name: str) -> str | None:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return f"{'.'.join(parts[:cut])} has no {part!r}"
            found = getattr(found, part)
        return None
    return "cannot be imported"


@cache
def options(*command: str) -> frozenset[str] | None:
    """Options of `kvgraft COMMAND ...`, or None where there is no such command."""
    parser = build_parser()
    for word in command:
        choices = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if not choices or word not in choices[0].choices:
            return None
        parser = choices[0].choices[word]
    return frozenset(option for action in parser._actions for option in action.option_strings)


def problem_with_command(command: str) -> str | None:
    """Say what is wrong with a command line, or None: the program, its subcommand, script or target, and its options."""
    words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    words = words[: next((i for i, word in enumerate(words) if word in ("|", "&&", ";", ">", "&")), len(words))]
    program, arguments = words[0].rsplit("/", 1)[-1], words[1:]
    given = {word.split("=")[0] for word in arguments if re.match(r"--\w", word)}
    if program == "make":
        targets = re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return next((f"no target {word!r}" for word in arguments if word not in targets and "=" not in word), None)
    if program == "python" and arguments and arguments[0].endswith(".py"):
        script = ROOT / arguments[0]
        if not script.exists():
            return f"there is no {arguments[0]}"
        text = script.read_text() + "".join(p.read_text() for p in (ROOT / "benchmarks" / "engines").glob("*.py"))
        return next((f"{arguments[0]} knows no {option}" for option in given if f'"{option}"' not in text), None)
    if program != "kvgraft" and arguments[:2] != ["-m", "kvgraft"]:
        return None
    arguments = arguments[2:] if arguments[:2] == ["-m", "kvgraft"] else arguments
    longest = 2 if arguments[:1] in (["bench"], ["config"], ["store"]) else 1
    longest += arguments[:2] == ["bench", "pack"]
    subcommand = [word for word in arguments[:longest] if not word.startswith("-")]
    known = options(*subcommand)
    if known is None:
        return f"there is no 'kvgraft {' '.join(subcommand)}'"
    return next(
        (f"'kvgraft {' '.join(subcommand)}' knows no {option}" for option in given if option not in known), None
    )


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    wrong = []
    for target in page(name).links:
        file, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), file)) if file else name
        if not (ROOT / path).exists() or (anchor and anchor not in page(path).anchors):
            wrong.append(target)
    assert not wrong


def test_every_page_can_be_reached_from_the_readme():
    reached, new = set(), {"README.md"}
    while new:
        reached |= new
        targets = {
            posixpath.normpath(posixpath.join(posixpath.dirname(name), link.partition("#")[0]))
            for name in new
            for link in page(name).links
        }
        new = {target for target in targets if target in PAGES} - reached
    unreached = set(PAGES) - reached
    assert not {name for name in unreached if not name.startswith("docs/adr/")}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_files_exist(name):
    text = "\n".join([*page(name).spans, *(b.text for b in page(name).blocks if name == "ARCHITECTURE.md")])
    assert not [path for path in dict.fromkeys(paths(text)) if path not in OTHERS and not has_file(path)]


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_names_exist(name):
    spans = [span for span in page(name).spans if not _is_path(span)]
    if name == "ARCHITECTURE.md":
        spans += [block.text for block in page(name).blocks]
    found = dict.fromkeys(each for span in spans for each in names(_without_paths(span)))
    assert not {each: problem for each in found if (problem := problem_with(each)) is not None}


def _without_paths(text: str) -> str:
    for path in sorted(paths(text), key=len, reverse=True):
        text = text.replace(path, " ")
    return text


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_commands_and_their_options_exist(name):
    wrong = {command: problem_with_command(command) for command in page(name).commands}
    assert not {command: problem for command, problem in wrong.items() if problem is not None}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_options_exist(name):
    """Those in spans, of any program: ours, a script's or one that the code starts."""
    given = {option for span in page(name).spans for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)}
    known = set(code_index().strings) | {f"--{word.replace('_', '-')}" for word in code_index().words}
    assert not given - known


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_python_blocks_parse_and_import_what_exists(name):
    for block in page(name).blocks:
        if block.language != "python":
            continue
        tree = ast.parse(block.text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("kvgraft"):
                module = importlib.import_module(str(node.module))
                assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]
        used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        used |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.keyword) and n.arg}
        assert not used - code_index().words


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_nothing_installs_kvgraft_by_name(name):
    """No index has it; an extra of an installed kvgraft is another matter, and said to be one."""
    text = "\n".join([*page(name).spans, *(block.text for block in page(name).blocks)])
    installs = [line for line in text.splitlines() if re.search(r"pip install", line)]
    assert not [line for line in installs if re.search(r"pip install (-\S+ )*'?kvgraft(?![-/]|\[bench\]'$)", line)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("CacheManager.begins", "has no 'begins'"),
        ("kvgraft.prefix.NoSuchCache", "has no 'NoSuchCache'"),
        ("donors.planz", "occurs nowhere"),
        ("prefix.plan_graft", "defines no 'plan_graft'"),
        ("no_such_name", "occurs nowhere"),
    ],
)
def test_a_name_that_does_not_exist_is_found(name, words):
    assert words in problem_with(name)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("kvgraft serv --port 1", "there is no 'kvgraft serv"),
        ("kvgraft serve --prot 1", "knows no --prot"),
        ("kvgraft bench nothing", "there is no"),
        ("make everything", "no target"),
        ("python benchmarks/bench_lookup.py --documentz 3", "knows no --documentz"),
        ("python benchmarks/none.py", "there is no"),
    ],
)
def test_a_command_that_does_not_exist_is_found(command, words):
    assert words in problem_with_command(command)


def test_start_up_errors_are_what_the_code_says():
    """In the table of running.md `…` stands for what differs; what stands between is in a string of the code."""
    section = (ROOT / "docs/running.md").read_text().partition("## When it does not start")[2].partition("\n## ")[0]
    first_cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    told = [piece for cell in first_cells for span in re.findall(r"`([^`]+)`", cell) for piece in span.split("…")]
    assert len(told) > 40
    strings = "\n".join(code_index().strings | {"smollm2-135m"})
    assert not [piece for piece in told if piece.strip("(); ") and piece.strip("(); ") not in strings]
