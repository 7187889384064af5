"""Write a small random-weight Qwen3 with a real BPE tokenizer, so that engines can be timed without a download.

    python benchmarks/engines/make_model.py FOLDER [--layers 1]

29.4 million parameters in bfloat16, 59 MB, 6-10 s: 8 layers, 8 query and 4 key/value heads of 64 channels, a vocabulary of
8,192. The weights are those of the default initialisation, with which attention hardly looks at the context: good for times,
of no use for quality. With one layer, K/V depend on token and position only, so that reuse at another position must give
the logits of a cold run: a test of what moves K/V. Needs torch, transformers and tokenizers.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 8192
MAX_POSITIONS = 32_768
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>")

_TRAINING_FILES = 150


def random_model(seed: int, num_layers: int) -> Qwen3ForCausalLM:
    """Build the model in bfloat16; the same seed gives the same weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return Qwen3ForCausalLM(config).to(torch.bfloat16)


def trained_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the standard library's sources, which are always at hand and long enough."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:_TRAINING_FILES]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator((path.read_text(encoding="utf-8", errors="ignore") for path in sources), trainer)
    bos, eos, pad = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=bos, eos_token=eos, pad_token=pad)


def write_model(folder: Path, seed: int, num_layers: int) -> int:
    """Save model and tokenizer to `folder` and return the number of parameters."""
    model = random_model(seed, num_layers)
    model.save_pretrained(folder)
    trained_tokenizer().save_pretrained(folder)
    return int(sum(parameter.numel() for parameter in model.parameters()))


def main() -> int:
    """Write the model that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    num_parameters = write_model(args.folder, args.seed, args.layers)
    print(f"{num_parameters / 1e6:.1f} million parameters in {args.folder}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
