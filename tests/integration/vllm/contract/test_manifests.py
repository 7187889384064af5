"""What `deploy/kubernetes` starts is taken by vLLM's own command line, and its probes ask a path that vLLM answers."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest
import yaml
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.serve.instrumentator.health import router
from vllm.utils.argparse_utils import FlexibleArgumentParser

FOLDER = Path(__file__).parents[4] / "deploy" / "kubernetes"
(CONTAINER,) = next(
    one["spec"]["template"]["spec"]["containers"]
    for one in yaml.safe_load_all((FOLDER / "vllm.yaml").read_text())
    if one["kind"] == "StatefulSet"
)


def settings():
    lines = (FOLDER / "settings.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.fixture
def arguments():
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    words = [re.sub(r"\$\((\w+)\)", lambda found: settings()[found[1]], word) for word in CONTAINER["args"]]
    return parser.parse_args([CONTAINER["command"][-1], *words])


def test_flags_are_vllms(arguments):
    assert CONTAINER["command"] == ["vllm", "serve"]
    assert isinstance(arguments, argparse.Namespace)
    assert (arguments.model_tag, arguments.host, arguments.port) == (settings()["MODEL"], "0.0.0.0", 8000)
    assert arguments.enable_prompt_tokens_details


def test_values_reach_vllm_as_they_are_written(arguments):
    written = json.loads(settings()["KV_TRANSFER_CONFIG"])
    assert {name: getattr(arguments.kv_transfer_config, name) for name in written} == written
    written = json.loads(settings()["KV_EVENTS_CONFIG"])
    assert {name: getattr(arguments.kv_events_config, name) for name in written} == written


def test_probes_ask_what_vllm_answers():
    probes = [CONTAINER[kind]["httpGet"]["path"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert set(probes) <= {route.path for route in router.routes}
