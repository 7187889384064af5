"""How many tokens of a request a step computes of which it is certain that they stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def num_known(output: SchedulerOutput, request_id: str) -> int:
    """Return how many tokens a step computes of a request, without drafts, which stand last and may be rejected.

    What lies in a rejected draft's place is computed again with the token that was drawn, by the next step: until then it
    must neither be captured nor count as computed.
    """
    drafts = output.scheduled_spec_decode_tokens.get(request_id, ())
    return int(output.num_scheduled_tokens[request_id]) - len(drafts)
