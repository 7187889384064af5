"""A script of a dozen requests, in which one small allocation fails, and what must hold afterwards."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import numpy as np
from tests.support.failing_calls import CallDrill, FailingCalls, Place, same_secret

from kvgraft.engine import SamplingParams
from kvgraft.engine.core import Engine
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.engine.requests.request import RequestOutput
from kvgraft.errors import KVGraftError, RequestError
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

KINDS = {
    "plain": ("llama", {"num_slots": 250}),
    "host": ("llama", {"num_slots": 250, "prefix_host_bytes": 1 << 20}),
    "windows": ("mistral", {"num_slots": 250}),
    "states": ("qwen3_next", {"num_slots": 250}),
}
"""Engines by how their K/V are kept: family of the model and settings."""
_MOST_STEPS = 300
_CLOSE = 1e-3
"""Log-probabilities of equal K/V; batches of other sizes round otherwise."""


class EngineDiedError(Exception):
    """A step, or a piece of idle work, raised: the thread of an `AsyncLLM` would have ended."""


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def equals(self, other: Answer) -> bool:
        return self.token_ids == other.token_ids and np.allclose(self.logprobs, other.logprobs, atol=_CLOSE)


@dataclass
class Drill(CallDrill):
    """One model, an engine per run, and the right answers."""

    kind: str
    references: dict[tuple[bytes, int], Answer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        family, self.settings = KINDS[self.kind]
        self.loaded = adopt_model(family, tiny_model(family), None)
        rng = np.random.default_rng(48)
        self.words = [rng.integers(3, VOCABULARY, 48) for _ in range(8)]

    def engine(self) -> Engine:
        from kvgraft.engine.assembly import engine_config

        own = {"host_bytes": 1 << 22, "donor_tokens": 4096, "max_rows": 256}
        with same_secret():
            return Engine(self.loaded, engine_config(None, own | self.settings))

    def is_guarded(self, place: Place) -> bool:
        """An `AsyncLLM` guards what its thread calls."""
        return not place.caller.startswith("memory_drill")

    def run(self, calls: FailingCalls) -> list[str]:
        run = _Run(self, self.engine(), calls)
        try:
            run.script()
        except EngineDiedError as error:
            return [f"a: {error.__cause__!r}"]
        except Exception as error:  # noqa: BLE001 - a finding
            run.wrong.append(f"b: script {error!r}")
        run.calls = contextlib.nullcontext()
        return [*run.wrong, *run.aftermath()]

    def reference(self, prompt, count: int) -> Answer:
        key = (prompt.tobytes(), count)
        if key not in self.references:
            run = _Run(self, self.engine(), contextlib.nullcontext())
            run.compares = False
            answer = run.serve(prompt, count, "off")
            assert answer is not None
            self.references[key] = answer
        return self.references[key]


class _Run:
    def __init__(self, drill: Drill, engine: Engine, calls: contextlib.AbstractContextManager) -> None:
        self.drill, self.engine, self.calls = drill, engine, calls
        self.wrong: list[str] = []
        self.compares = True
        self._answers: dict[str, list] = {}
        self._outputs: dict[str, RequestOutput | RequestError] = {}

    def script(self) -> None:
        a, b, c, d, e, f, g, h = self.drill.words
        join = np.concatenate
        self.serve(a, 4, "exact")
        self.serve(join([a, b]), 4, "graft")
        self.serve(join([a[:40], c[:20]]), 3, "exact")  # divides a node
        self.serve(join([c[:30], a, b]), 4, "graft")
        self.serve(join([d[:30], b, a]), 4, "graft", repair="after")
        self.idle()
        self.serve(join([g[:20], b]), 3, "verified")
        cancelled = self.add(join([d, e]), 8, "graft")
        self.step()
        self.cancel(cancelled)
        self.session(d, e[:9], f[:9])
        names = [self.add(join([text, h[:40]]), 50, mode) for text, mode in ((e, "exact"), (f, "graft"), (g, "exact"))]
        self.finish(names)
        self.serve(join([a, b, c[:10]]), 4, "exact")  # brought back where it lies on the host
        self.serve(join([h[:9], e, f]), 4, "graft")
        for _ in range(4):
            self.idle()

    def aftermath(self) -> list[str]:
        """Serve exact requests over what is left, and one that grafts; check before and afterwards."""
        self.wrong = []
        try:
            for _ in range(_MOST_STEPS):
                if self.engine.has_work:
                    self.step()
            self.checked("b: check")
            self.serve_again()
            self.checked("b: check later")
            self.engine.sessions.reset()
            kept = self.engine.space.prefix.protected_size, self.engine.space.donors._pinned_tokens
            if any(kept):
                self.wrong.append(f"b: kept for good {kept}")
            self.engine.reset()
            self.checked("b: check after reset")
            usage = self.engine.space.usage()
            if usage.free != usage.total:
                self.wrong.append(f"b: leaked {usage}")
        except EngineDiedError as error:
            self.wrong.append(f"a: later {error.__cause__!r}")
        except Exception as error:  # noqa: BLE001 - a finding
            self.wrong.append(f"b: later {error!r}")
        return self.wrong

    def serve_again(self) -> None:
        a, b, c, *_ = self.drill.words
        for prompt in (np.concatenate([a, b]), np.concatenate([c, a, b]), *self.drill.words):
            if self.serve(prompt, 3, "exact") is None:
                self.wrong.append("b: unanswered")
        self.serve(np.concatenate([c[:7], b, a]), 3, "graft")
        for prompt in (np.concatenate([c, a, b]), b):
            if self.serve(prompt, 3, "exact") is None:
                self.wrong.append("b: unanswered")

    def checked(self, label: str) -> None:
        try:
            self.engine.check()
        except Exception as error:  # noqa: BLE001 - a finding
            self.wrong.append(f"{label} {error!r}")

    def serve(self, prompt, count: int, reuse: str, **options) -> Answer | None:
        """The answer; None if it failed. An exact one is compared with that of full prefill."""
        name = self.add(prompt, count, reuse, **options)
        self.finish([name])
        answer = self.answer(name)
        output = self._outputs.get(name)
        if answer is None or not isinstance(output, RequestOutput) or not self.compares or reuse != "exact":
            return answer
        if not answer.equals(self.drill.reference(output.prompt_token_ids, count)):
            self.wrong.append(f"b: wrong answer {name}")
        return answer

    def answer(self, name: str) -> Answer | None:
        output = self._outputs.get(name)
        if not isinstance(output, RequestOutput):
            return None
        parts = [part for part in self._answers[name] if not part.is_provisional]
        return Answer(output.token_ids, tuple(part.logprobs.logprob for part in parts if part.logprobs is not None))

    def add(self, prompt, count: int, reuse: str, **options) -> str:
        sampling = SamplingParams(count, ignore_eos=True, logprobs=0)
        request = self.engine.builder.build(prompt, RequestOptions.of(sampling, reuse, **options))
        name = request.request_id
        self._answers[name] = []
        try:
            with self.calls:
                self.engine.add(request)
        except (KVGraftError, MemoryError) as error:
            self._outputs[name] = RequestError(str(error))
            self._doubt(error)
        return name

    def cancel(self, name: str) -> None:
        try:
            with self.calls:
                self.engine.cancel(name)
        except MemoryError as error:
            self._doubt(error)

    def session(self, first, *others) -> None:
        try:
            with self.calls:
                name = self.engine.builder.session_name("s")
                self.engine.sessions.open(name, None)
        except MemoryError as error:
            self._doubt(error)
            return
        for text in (first, *others):
            try:
                self.serve(text, 3, "exact", session_id="s", append=True)
            except KVGraftError:  # closed
                return

    def _doubt(self, error: Exception) -> None:
        """As the thread of an `AsyncLLM` does with a command that fails."""
        if hasattr(self.engine, "doubt"):
            self.engine.doubt(error)

    def finish(self, names: list[str]) -> None:
        for _ in range(_MOST_STEPS):
            if all(name in self._outputs for name in names):
                return
            self.step()
        self.wrong.append("b: no answer")
        for name in names:
            self.engine.cancel(name)

    def step(self) -> None:
        try:
            with self.calls:
                events = self.engine.step()
        except Exception as error:
            raise EngineDiedError from error
        for event in events:
            if event.error is not None:
                self._outputs[event.request_id] = event.error
            elif event.part is not None:
                self._answers[event.request_id].append(event.part)
                if event.part.output is not None:
                    self._outputs[event.request_id] = event.part.output

    def idle(self) -> None:
        try:
            with self.calls:
                self.engine.heal_step()
        except Exception as error:
            raise EngineDiedError from error
