"""One measurement after another within a time: what fails is noted, and what is not reached is named."""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvgraft.bench.deadline import Deadline
from kvgraft.bench.fidelity.meta import environment
from kvgraft.config import EngineConfig
from kvgraft.engine import LLM
from kvgraft.errors import ConfigError, one_line

from .capture import measure_capture
from .card import Card
from .copies import measure_copies
from .decode_step import measure_decode_step
from .exactness import ExactnessSizes, measure_exactness
from .first_token import measure_first_token, slots_for
from .record import PartName, Record, failure, verdict
from .subject import bytes_per_token, load_subject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvgraft.engine.model.loading import LoadedModel

    from .capture import Reader

WEIGHTS = {"exactness": 1.0, "decode_step": 1.0, "first_token": 4.0, "copies": 0.5, "capture": 0.5}
"""Parts, in their order, and their shares of the time that is left."""
_SHARE_OF_FREE = 0.7
"""Of the memory beside the weights, for K/V: passes and stock attention want the rest."""


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """What is measured.

    Attributes:
        models: Names of `subject.SHAPES`, or models that are installed.
        lengths: Prompt tokens of first tokens.
        decode_lengths: Tokens of the sequence beside which a step decodes.
        minutes: For everything.
        rounds: Of each measurement, fewer where time is short.
        shift: New tokens before a known document.
        exactness: Sizes of the comparisons.
        dtypes: Precisions; the first is the one whose speed is measured.
        backends: Attention backends.
        seed: Of weights and tokens.
    """

    models: tuple[str, ...] = ("llama-8b", "smollm2-135m")
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16_384, 32_768)
    decode_lengths: tuple[int, ...] = (1024, 8192, 32_768)
    minutes: float = 10.0
    rounds: int = 5
    shift: int = 200
    exactness: ExactnessSizes = field(default_factory=ExactnessSizes)
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    backends: tuple[str, ...] = ("flex", "sdpa")
    seed: int = 0


def measure_gpu(
    settings: GpuSettings,
    device: torch.device,
    reader_of: Callable[[torch.device], Reader],
    *,
    file: Path | None = None,
    show: Callable[[dict[str, Any]], object] = lambda _: None,
) -> dict[str, Any]:
    """Measure everything that there is time and memory for, speeds in the first precision first.

    Args:
        settings: What is measured.
        device: Where.
        reader_of: Makes what captures text on a device.
        file: Has the outcome of every part as soon as it is over; None for none.
        show: Called with every part that is over.

    Returns:
        What the file has in the end; `verdict` sums it up.
    """
    started, card = time.monotonic(), Card(device)
    deadline = Deadline.after(60 * settings.minutes)
    bandwidth = card.bandwidth(rounds=settings.rounds)
    head = {**environment(), "card": card.describe() | bandwidth, "settings": asdict(settings)}
    record = Record(file, head, show)
    session = Session(settings, card, record, reader_of, bandwidth, deadline)
    names = list(_names(settings))
    for dtype in settings.dtypes:
        for model in settings.models:
            mine = [name for name in names if (name.dtype, name.model) == (dtype, model)]
            later = names[names.index(mine[-1]) + 1 :]
            session.measure(mine, later)
    record.content |= {"seconds": time.monotonic() - started, "verdict": verdict(record.parts)}
    record.write()
    return record.content


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """Measures the parts of one model after another.

    Attributes:
        settings: What is measured.
        card: Where.
        record: Takes the outcomes.
        reader_of: Makes what captures text on a device.
        bandwidth: Of the card.
        deadline: Of everything.
    """

    settings: GpuSettings
    card: Card
    record: Record
    reader_of: Callable[[torch.device], Reader]
    bandwidth: dict[str, float]
    deadline: Deadline

    def measure(self, names: list[PartName], later: list[PartName]) -> None:
        """Load the model and measure the parts of each attention; `later` ones want time, too."""
        reason = self.deadline.reason_to_skip(0.0)
        loaded = None
        if not reason:
            try:
                loaded = load_subject(names[0].model, names[0].dtype, self.card, self.settings.seed)
            except (ConfigError, ImportError) as error:
                reason = one_line(error)
            except Exception as error:  # noqa: BLE001 - the other parts are measured
                self._end_all(names, **failure(error))
                return
        if loaded is None:
            self._end_all(names, skipped=reason)
            return
        for attention in self.settings.backends:
            mine = [name for name in names if name.attention == attention]
            rest = [*names[names.index(mine[-1]) + 1 :], *later]
            self._with_attention(loaded, mine, rest)
        del loaded
        self._give_back()

    def _with_attention(self, loaded: LoadedModel, names: list[PartName], later: list[PartName]) -> None:
        llm = None
        try:
            llm = LLM(loaded, self._config(loaded, names[0].attention))
            choice = llm.adapter.attention
            if choice.backend.name != names[0].attention:
                self._end_all(names, failed=choice.reason)
                return
            for number, name in enumerate(names):
                self._part(llm, name, [*names[number + 1 :], *later])
        except Exception as error:  # noqa: BLE001 - the other parts are measured
            self._end_all(names, **failure(error))
        finally:
            if llm is not None:
                llm.close()
            del llm
            self._give_back()

    def _part(self, llm: LLM, name: PartName, later: list[PartName]) -> None:
        wanted = [WEIGHTS[one.part] for one in (name, *later)]
        share = Deadline.after(self.deadline.left_s * wanted[0] / sum(wanted))
        part = self.record.begin(name)
        reason = share.reason_to_skip(0.0)
        if reason:
            self.record.end(part, skipped=reason)
            return
        started = time.monotonic()
        try:
            result = self._measured(llm, name.part, part, share)
        except ConfigError as error:
            self.record.end(part, skipped=one_line(error))
        except Exception as error:  # noqa: BLE001 - the other parts are measured
            part.pop("result", None)
            self.record.end(part, **failure(error))
            self._give_back()
        else:
            self.record.end(part, seconds=time.monotonic() - started, result=result)

    def _measured(self, llm: LLM, kind: str, part: dict[str, Any], share: Deadline) -> dict[str, Any]:
        settings, card = self.settings, self.card
        common: dict[str, Any] = {"rounds": settings.rounds, "seed": settings.seed, "deadline": share}
        match kind:
            case "exactness":
                return measure_exactness(llm, settings.exactness, seed=settings.seed)
            case "decode_step":
                limit = self.bandwidth["device_gb_s"]
                return measure_decode_step(llm, card, settings.decode_lengths, device_gb_s=limit, **common)
            case "first_token":

                def keep(so_far: dict[str, Any]) -> None:
                    part["result"] = so_far
                    self.record.write()

                return measure_first_token(llm, settings.lengths, shift=settings.shift, keep=keep, **common)
            case "copies":
                return measure_copies(llm, card, self.bandwidth, rounds=settings.rounds, deadline=share)
            case _:
                return measure_capture(llm, card, self.reader_of, **common)

    def _config(self, loaded: LoadedModel, attention: str) -> EngineConfig:
        """Return settings with slots for the longest prompt that has room."""
        settings = self.settings
        most = int(_SHARE_OF_FREE * self.card.free_bytes / bytes_per_token(loaded))
        wanted = [slots_for(length, settings.shift) for length in settings.lengths if length < loaded.max_model_len]
        wanted += [4 * settings.exactness.prompt, *settings.decode_lengths]
        slots = max((count for count in wanted if count <= most), default=most)
        return EngineConfig(num_slots=slots, attention=attention, heal="off")

    def _give_back(self) -> None:
        """Let go of what the last model or the last failure has left."""
        gc.collect()
        if self.card.is_cuda:
            torch.cuda.empty_cache()

    def _end_all(self, names: list[PartName], **outcome: object) -> None:
        """Note an outcome for all of `names` that have none."""
        known = [PartName(part["model"], part["dtype"], part["attention"], part["part"]) for part in self.record.parts]
        for name in names:
            if name not in known:
                self.record.end(self.record.begin(name), **outcome)


def _names(settings: GpuSettings) -> Iterator[PartName]:
    """Yield all parts in their order; speeds in the first precision, copies with the first attention alone."""
    for dtype in settings.dtypes:
        for model in settings.models:
            for attention in settings.backends:
                for part in WEIGHTS:
                    is_speed, is_copy = part != "exactness", part in ("copies", "capture")
                    if (is_speed and dtype != settings.dtypes[0]) or (is_copy and attention != settings.backends[0]):
                        continue
                    yield PartName(model, dtype, attention, part)
