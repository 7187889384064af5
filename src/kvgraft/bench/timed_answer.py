"""An answer and the times at which its tokens came."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Unpack

if TYPE_CHECKING:
    from kvgraft.engine import LLM, RequestOutput, SamplingParams
    from kvgraft.engine.requests.options import OptionFields
    from kvgraft.types import GraftReport, ReuseMode, TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class TimedAnswer:
    """The result of a request, and when its client got each token.

    Attributes:
        output: The result.
        times_s: Seconds from the call to each token, at least one, ascending.
        cpu_times_s: The same on the clock of the process, which counts its work alone.
    """

    output: RequestOutput
    times_s: tuple[float, ...]
    cpu_times_s: tuple[float, ...] = ()

    @property
    def report(self) -> GraftReport:
        """What was reused."""
        return self.output.report

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.times_s[0]

    @property
    def total_s(self) -> float:
        """Seconds to the last token."""
        return self.times_s[-1]

    @property
    def second_gap_s(self) -> float:
        """Seconds from the first token to the second, which waits for a repair after the first; 0 where there is none."""
        return self.times_s[1] - self.times_s[0] if len(self.times_s) > 1 else 0.0

    @property
    def later_gap_s(self) -> float:
        """Median seconds between later tokens; 0 where there are none."""
        gaps = [after - before for before, after in pairwise(self.times_s[1:])]
        return statistics.median(gaps) if gaps else 0.0


def timed_answer(
    llm: LLM, prompt: str | TokenArray, sampling: SamplingParams, reuse: ReuseMode, **options: Unpack[OptionFields]
) -> TimedAnswer:
    """Serve `prompt` and note when each token comes; arguments as for `LLM.stream`."""
    started, cpu_started = time.perf_counter(), time.process_time()
    times, cpu_times, output = [], [], None
    for part in llm.stream(prompt, sampling, reuse, **options):
        times.append(time.perf_counter() - started)
        cpu_times.append(time.process_time() - cpu_started)
        output = part.output
    assert output is not None
    return TimedAnswer(output, tuple(times), tuple(cpu_times))
