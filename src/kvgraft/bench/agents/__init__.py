"""Traffic of agents, made on the spot: a scripted coding agent, and what real ones do to their prompts from turn to turn."""

from kvgraft.bench.agents.kinds import AGENT_KINDS, AgentPrompt, AgentSettings, agent_prompts

__all__ = ["AGENT_KINDS", "AgentPrompt", "AgentSettings", "agent_prompts"]
