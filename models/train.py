"""Train `graft-tiny`, the bundled model: a small Llama that has read the Python standard library.

    python models/train.py --out src/kvgraft/models/graft-tiny

Everything is seeded and made from text that every machine with Python has: a byte-level BPE tokenizer, the modules of
`kvgraft.demo.documents` (some are held out), and RAG-shaped prompts over their functions. Training runs in phases of
growing context with a warm-up/stable/decay schedule; `--checkpoint` makes it resumable. Writes weights (bf16
safetensors), tokenizer and the figures of the model card (`training.json`).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from card import model_card
from kvgraft.demo.documents import INSTRUCTIONS, Module, Passage, ask, passages, prompt, stdlib_modules

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 4_096
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
EOS_ID = 1
TOKENS_PER_STEP = 8_192
RAG_SHARE = 0.35
WARMUP_STEPS = 60


@dataclass(frozen=True)
class Phase:
    """A stretch of training at one context length."""

    context: int
    steps: int
    decays: bool


PHASES = (Phase(512, 900, False), Phase(2_048, 400, False), Phase(4_096, 220, True))
"""The last phase takes the learning rate to zero."""


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `VOCABULARY` entries on `texts`; texts are encoded with `BOS` in front."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, PAD],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bpe.token_to_id(BOS))])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=PAD)


def new_model() -> LlamaForCausalLM:
    """Return `graft-tiny` with seeded random weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=16_384,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config)


class Corpus:
    """Token windows for training: contiguous source text, and RAG-shaped prompts made on the fly."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, modules: list[Module], seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        encoded = tokenizer([module.source for module in modules])["input_ids"]
        stream = [token for ids in encoded for token in (*ids, EOS_ID)]
        self._stream = np.asarray(stream, dtype=np.int16)
        self._passages: list[Passage] = [p for module in modules for p in passages(module)]

    def __len__(self) -> int:
        return len(self._stream)

    def batch(self, context: int) -> torch.Tensor:
        """Return (rows, context + 1) int64 token ids, `rows * context == TOKENS_PER_STEP`."""
        rows = [self._row(context + 1) for _ in range(TOKENS_PER_STEP // context)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _row(self, length: int) -> np.ndarray:
        if self._rng.random() < RAG_SHARE:
            return self._rag_row(length)
        start = self._rng.randrange(len(self._stream) - length)
        return self._stream[start : start + length]

    def _rag_row(self, length: int) -> np.ndarray:
        row: list[int] = []
        while len(row) < length:
            documents = self._rng.sample(self._passages, self._rng.randint(2, 7))
            question = ask(self._rng.choice(documents), self._rng)
            text = prompt(self._rng.choice(INSTRUCTIONS), documents, question)
            row += [*self._tokenizer(f"{text} {question.answer}\n")["input_ids"], EOS_ID]
        return np.asarray(row[-length:], dtype=np.int16)


def learning_rate_scale(step: int, phases: tuple[Phase, ...]) -> float:
    """Warm up, stay, and fall as 1 - sqrt(progress) in the decaying phase."""
    stable = sum(phase.steps for phase in phases if not phase.decays)
    decay = sum(phase.steps for phase in phases if phase.decays)
    if step < stable:
        return min(1.0, (step + 1) / WARMUP_STEPS)
    return 1.0 - math.sqrt((step - stable) / decay)


def make_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for the rest."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in n)]
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def mean_loss_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss over (rows, context + 1) ids, in bf16 with a float32 loss."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        logits = model(ids[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_losses(model: LlamaForCausalLM, stream: np.ndarray, context: int, windows: int = 96) -> dict[str, float]:
    """Mean loss of the last 64 tokens of `windows` held-out windows: with the whole context and with only 64 tokens of it."""
    starts = np.linspace(0, len(stream) - context - 2, windows).astype(int)
    full, short = [], []
    for start in starts:
        ids = torch.from_numpy(stream[start : start + context + 1].astype(np.int64))
        targets = ids[-64:]
        logits = model(ids[None, :-1]).logits[0, -64:].float()
        full.append(torch.nn.functional.cross_entropy(logits, targets))
        narrow = torch.stack([ids[i - 64 : i] for i in range(context - 63, context + 1)])
        logits = model(narrow, logits_to_keep=1).logits[:, -1].float()
        short.append(torch.nn.functional.cross_entropy(logits, targets))
    whole, last64 = torch.stack(full).mean().item(), torch.stack(short).mean().item()
    return {"context": context, "loss": whole, "loss_last_64": last64, "gain": last64 - whole}


def accumulate_gradients(
    model: LlamaForCausalLM, loss_of: Callable[..., torch.Tensor], ids: torch.Tensor, micro_tokens: int
) -> float:
    """Run forward and backward over `ids` in parts of about `micro_tokens`; returns the mean loss."""
    total = 0.0
    for part in ids.split(max(1, micro_tokens // (ids.shape[1] - 1))):
        loss = loss_of(model, part) * len(part) / len(ids)
        loss.backward()
        total += loss.item()
    return total


def train(args: argparse.Namespace) -> None:
    """Run the recipe from scratch or from the checkpoint."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    modules = stdlib_modules()
    tokenizer = train_tokenizer([m.source for m in modules if not m.held_out])
    corpus = Corpus(tokenizer, [m for m in modules if not m.held_out], args.seed)
    held_out = Corpus(tokenizer, [m for m in modules if m.held_out and not m.name.startswith("test")], args.seed)
    print(f"{len(corpus):,} training tokens, {len(held_out):,} held-out tokens", flush=True)
    device = torch.device(args.device)
    model = new_model().to(device)
    optimizers = make_optimizers(model)
    base_rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    log: list[dict[str, float]] = []
    first_step = 0
    if args.checkpoint.exists():
        state = torch.load(args.checkpoint, weights_only=False)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        log, first_step = state["log"], state["step"]
        corpus._rng.setstate(state["rng"])
        print(f"resumed at step {first_step}", flush=True)
    loss_of = torch.compile(mean_loss_of, dynamic=False) if args.compile else mean_loss_of
    steps = [phase for phase in PHASES for _ in range(phase.steps)]
    started, mean_loss = time.perf_counter(), 0.0
    for step in range(first_step, len(steps)):
        scale = learning_rate_scale(step, PHASES)
        for optimizer, rate in zip(optimizers, base_rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * scale
        loss_value = accumulate_gradients(
            model, loss_of, corpus.batch(steps[step].context).to(device), args.micro_tokens
        )
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        mean_loss = loss_value if step == first_step else 0.9 * mean_loss + 0.1 * loss_value
        if (step + 1) % 10 == 0:
            log.append({"step": step + 1, "context": steps[step].context, "loss": round(mean_loss, 4)})
            rate = (step + 1 - first_step) * TOKENS_PER_STEP / (time.perf_counter() - started)
            print(
                f"step {step + 1}/{len(steps)} context {steps[step].context} loss {mean_loss:.3f} {rate:.0f} tokens/s",
                flush=True,
            )
        if (step + 1) % 50 == 0 or step + 1 == len(steps):
            args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "log": log}
            torch.save({**state, "step": step + 1, "rng": corpus._rng.getstate()}, args.checkpoint)
    model.eval()
    losses = [held_out_losses(model, held_out._stream, context) for context in (512, 1_024, 2_048, 4_096)]
    print(json.dumps(losses, indent=1))
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    record = {
        "seed": args.seed,
        "torch": torch.__version__,
        "phases": [asdict(phase) for phase in PHASES],
        "training_tokens": len(corpus),
        "tokens_seen": len(steps) * TOKENS_PER_STEP,
        "parameters": sum(p.numel() for p in model.parameters()),
        "held_out": losses,
        "loss_curve": log,
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.out / "README.md").write_text(model_card(record))


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, tokenizer and figures")
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/graft-tiny.pt"), help="resume from and save to")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-tokens", type=int, default=4_096, help="tokens of one forward and backward pass")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="use torch.compile")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
