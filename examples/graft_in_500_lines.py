"""Reuse of K/V at any offset in one file, on a stock transformers model: what kvgraft does, without what makes it a server.

    python examples/graft_in_500_lines.py              a small random model
    python examples/graft_in_500_lines.py FOLDER       a model of transformers with rotary positions, such as Llama or Qwen

A prompt goes through these steps, the sections below in their order:

1. `Memory.front`: the tokens that an earlier prompt began with. As far as no copy stood before them their K/V are a
   full prefill's (`exact`); from there on they are what the earlier prompt was answered from (`continued`).
2. `Memory.find`: runs of the rest that were read anywhere before (`shifted`). A dictionary of 16-grams proposes, token
   ids decide.
3. `rotate`: keys were encoded at another position, so they are turned by the distance; values are copied as they are.
4. `first_k`: the first tokens of each run are computed again, since they depend most on what stood before them.
5. `prefill`: what is left runs through the model, each row at its own position, over all K/V before it.

Nothing of kvgraft is imported. `tests/e2e/test_graft_in_500_lines.py` has it plan and answer as kvgraft does. What the
product has besides: memory that is bounded and given back, prompts that arrive together and are preempted, tenants, costs,
policies that look at what the prompt asks, corrections, reports, three engines (docs/follow-a-graft.md).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from inspect import signature

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

GRAM = 16
"""Tokens that a run has at least."""
FIRST_K = 16
"""Tokens at the head of each run that are computed again."""


# ---- What is known of a text


@dataclass(frozen=True)
class Text:
    """Tokens and their K/V, as some request left them.

    Attributes:
        tokens: Prompt of the request.
        keys: By layer, [kv_heads, tokens, head_dim], encoded at positions from 0 on.
        values: As `keys`, without positions.
        exact_len: Tokens from the start whose K/V are a full prefill's; all after them attended to copies.
    """

    tokens: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    exact_len: int


@dataclass(frozen=True)
class Run:
    """Tokens `[target, target + length)` of a prompt, which are `[source, source + length)` of a text."""

    target: int
    length: int
    text: Text
    source: int

    @property
    def end(self) -> int:
        """First position after the run."""
        return self.target + self.length


@dataclass
class Memory:
    """All texts, and where each of their 16-grams stands. It grows for ever."""

    texts: list[Text] = field(default_factory=list)
    grams: dict[tuple[int, ...], list[tuple[Text, int]]] = field(default_factory=dict)

    def add(self, text: Text, computed: list[tuple[int, int]]) -> None:
        """Remember a text. Only what was computed may be copied from it: a copy of a copy would be known as another's."""
        self.texts.append(text)
        for start, stop in computed:
            for at in range(start, stop - GRAM + 1):
                self.grams.setdefault(tuple(text.tokens[at : at + GRAM]), []).append((text, at))

    def front(self, tokens: list[int]) -> tuple[Text | None, int, int]:
        """Return the text that begins most like `tokens`, how many of these are exact there, and how many are equal at all.

        Without its last token: that is computed, since its logits are wanted. Of texts that are equal as far, the one with
        the most exact tokens.
        """
        best, exact, equal = None, 0, 0
        for text in self.texts:
            length = _equal(tokens[:-1], text.tokens)
            if (length, min(length, text.exact_len)) > (equal, exact):
                best, exact, equal = text, min(length, text.exact_len), length
        return best, exact, equal

    def find(self, tokens: list[int], start: int) -> list[Run]:
        """Return disjoint runs of `tokens[start:-1]`, from left to right the longest that begins where none has been yet."""
        runs: list[Run] = []
        at, end = start, len(tokens) - 1
        while at + GRAM <= end:
            places = self.grams.get(tuple(tokens[at : at + GRAM]), [])
            found = [Run(at, _equal(tokens[at:end], text.tokens[source:]), text, source) for text, source in places]
            if found:
                runs.append(max(found, key=lambda run: run.length))
                at = runs[-1].end
            else:
                at += 1
        return runs


def _equal(one: list[int], other: list[int]) -> int:
    """Return how many tokens two texts have in common from their beginnings."""
    stop = min(len(one), len(other))
    return next((at for at in range(stop) if one[at] != other[at]), stop)


# ---- Positions


def rotate(keys: torch.Tensor, distance: int, frequencies: torch.Tensor) -> torch.Tensor:
    """Move keys by `distance` positions: a rotary encoding turns pairs of channels by position times frequency.

    Turning twice is turning by the sum, so that keys of position p become those of p + distance, whatever p is
    (Su et al. 2021, RoFormer). In float64: a second rounding of float32 angles would be larger than the model's own.

    Args:
        keys: [kv_heads, tokens, head_dim]; channel i is paired with i + head_dim / 2.
        distance: Tokens; may be negative.
        frequencies: [head_dim / 2], radians per token.
    """
    angle = frequencies.double() * distance
    cos, sin = angle.cos().to(keys.dtype), angle.sin().to(keys.dtype)
    first, second = keys.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


# ---- What is computed again


def first_k(runs: list[Run], k: int) -> set[int]:
    """Return the first `k` positions of each run: they attended most to the text before them, which is another now.

    EPIC (Hu et al. 2024) takes these; CacheBlend (Yao et al. 2024) takes those whose K/V differ most.
    """
    return {at for run in runs for at in range(run.target, min(run.end, run.target + k))}


# ---- The pass


class _Places(CacheLayerMixin):
    """K/V of one layer by position. What the model computes is written to the positions of its rows; it attends to all."""

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
        self.keys, self.values, self.rows, self.is_initialized = keys[None], values[None], rows, True

    def lazy_initialization(self, *_: object) -> None: ...

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, ...]:
        self.keys[:, :, self.rows], self.values[:, :, self.rows] = keys, values
        return self.keys, self.values

    def get_mask_sizes(self, _: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return int(self.keys.shape[2])

    def get_max_length(self) -> int:
        return self.get_seq_length()


@torch.no_grad()
def prefill(
    model: PreTrainedModel, tokens: list[int], rows: list[int], keys: list[torch.Tensor], values: list[torch.Tensor]
) -> torch.Tensor:
    """Compute `rows`, ascending positions of `tokens`, in one pass; return the logits of the last one, [vocabulary].

    Each row attends to all positions up to its own, in `keys` and `values` (by layer, [kv_heads, tokens, head_dim]), which
    its own K/V are written into. A row is exact if all before it is.
    """
    at = torch.tensor(rows)
    allowed = torch.arange(len(tokens))[None] <= at[:, None]
    found = model(
        input_ids=torch.tensor(tokens)[at][None],
        position_ids=at[None],
        attention_mask=torch.where(allowed, 0.0, torch.finfo(model.dtype).min).to(model.dtype)[None, None],
        **{_cache_name(model): Cache(layers=[_Places(*of_layer, at) for of_layer in zip(keys, values, strict=True)])},
        use_cache=True,
        logits_to_keep=1,
    )
    return found.logits[0, -1]


def _cache_name(model: PreTrainedModel) -> str:
    """Return how the version of transformers calls the cache: `cache` since 5.24."""
    return "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"


# ---- All of it


@dataclass(frozen=True)
class Answer:
    """A prompt as it was read.

    Attributes:
        exact_len: Tokens from the start whose K/V are a full prefill's and were not computed.
        continued_len: Tokens after these with the K/V that an earlier prompt was answered from.
        runs: What was copied from other places.
        rows: Positions that were computed.
        logits: Of the token after the prompt, [vocabulary].
    """

    exact_len: int
    continued_len: int
    runs: list[Run]
    rows: list[int]
    logits: torch.Tensor


class Reader:
    """A model that reuses all that it has read. One prompt at a time."""

    def __init__(self, model: PreTrainedModel, k: int = FIRST_K) -> None:
        config = model.config
        self.model, self.k, self.memory = model, k, Memory()
        self.frequencies = model.model.rotary_emb.inv_freq
        self.num_layers = config.num_hidden_layers
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.shape = (config.num_key_value_heads, head_dim)

    def read(self, tokens: list[int]) -> Answer:
        """Prefill a prompt, and remember it."""
        before, exact_len, known_len = self.memory.front(tokens)
        if known_len - exact_len < GRAM:
            known_len = exact_len
        runs = self.memory.find(tokens, known_len)
        keys, values = self._empty(len(tokens)), self._empty(len(tokens))
        for layer in range(self.num_layers):
            if before is not None:
                keys[layer][:, :known_len] = before.keys[layer][:, :known_len]
                values[layer][:, :known_len] = before.values[layer][:, :known_len]
            for run in runs:
                there, here = slice(run.source, run.source + run.length), slice(run.target, run.end)
                turned = rotate(run.text.keys[layer][:, there], run.target - run.source, self.frequencies)
                keys[layer][:, here], values[layer][:, here] = turned, run.text.values[layer][:, there]
        gaps = _gaps(runs, known_len, len(tokens))
        chosen = first_k(runs, self.k)
        rows = sorted(chosen | {at for start, stop in gaps for at in range(start, stop)})
        logits = prefill(self.model, tokens, rows, keys, values)
        # After the first copy nothing is exact any more, and must never be taken for it.
        first_copy = exact_len if known_len > exact_len else runs[0].target if runs else len(tokens)
        self.memory.add(Text(tokens, keys, values, first_copy), gaps)
        return Answer(exact_len, known_len - exact_len, runs, rows, logits)

    def _empty(self, length: int) -> list[torch.Tensor]:
        heads, head_dim = self.shape
        return [torch.zeros(heads, length, head_dim, dtype=self.model.dtype) for _ in range(self.num_layers)]


def _gaps(runs: list[Run], start: int, stop: int) -> list[tuple[int, int]]:
    """Return what of `[start, stop)` is in no run."""
    edges = [start, *(edge for run in runs for edge in (run.target, run.end)), stop]
    return [(one, other) for one, other in zip(edges[::2], edges[1::2], strict=True) if one < other]


# ---- A demonstration


def main() -> None:
    """Read a document after three heads; print what was computed, and how far the next token is from a full prefill's."""
    torch.manual_seed(0)
    if len(sys.argv) > 1:
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
        encode = AutoTokenizer.from_pretrained(sys.argv[1]).encode
    else:
        config = LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
        )
        model = LlamaForCausalLM(config).eval()

        def encode(text: str) -> list[int]:
            return list(text.encode())

    clauses = [f"Clause {each}: item {each * 7919 % 1013} is kept in hall {each * 31 % 17}." for each in range(40)]
    reader = Reader(model)
    for head in ("Read this. ", "You are patient. Sum up what follows. ", "Once more, from the beginning: "):
        tokens = encode(head + " ".join(clauses) + " Which hall has item 3?")
        answer = reader.read(tokens)
        with torch.no_grad():
            full = model(torch.tensor([tokens])).logits[0, -1]
        own, want = answer.logits.log_softmax(-1), full.log_softmax(-1)
        error = torch.nn.functional.kl_div(own, want, log_target=True, reduction="sum")
        copied = sum(run.length for run in answer.runs)
        print(
            f"{len(tokens)} tokens: {answer.exact_len} exact, {copied} copied, {len(answer.rows)} computed; "
            f"KL to full prefill {max(0.0, float(error)):.5f}"
        )


if __name__ == "__main__":
    main()
