"""Workloads by name: those that every machine can make of the standard library's sources, and request packs."""

from __future__ import annotations

from kvgraft.bench.agents import AgentSettings, agent_prompts
from kvgraft.bench.packs import PackSession, Workload, load_pack
from kvgraft.bench.prompts import BUILTIN, read_sessions
from kvgraft.bench.serve_workload import BUILTIN_RAG, load_workload

_NUM_RAG_PROMPTS = 50
AGENT = "agent:"
"""Prefix of the names of agents' workloads, before the kind."""


def named_workloads(name: str) -> list[Workload]:
    """Return the workloads of a name.

    Args:
        name: `builtin`, 192 questions over documentation strings; `builtin:rag`, 50 prompts of five passages each, of which
            most have been in an earlier prompt; `agent:KIND`, 40 turns of a coding agent (see `agents`); or a pack (see
            `packs`).

    Raises:
        ConfigError: There is no such pack or kind, or the standard library's sources are not installed.
    """
    if name == BUILTIN:
        return [Workload(name, tuple(read_sessions(name)))]
    if name == BUILTIN_RAG:
        return [Workload(name, (PackSession((), load_workload(name, _NUM_RAG_PROMPTS, seed=0).prompts),))]
    if name.startswith(AGENT):
        prompts = agent_prompts(name.removeprefix(AGENT), AgentSettings())
        return [Workload(name, (PackSession((), tuple(prompt.text for prompt in prompts)),))]
    return load_pack(name)
