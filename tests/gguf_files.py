"""Write tiny models as GGUF files, the way llama.cpp's converter does."""

from __future__ import annotations

import gguf
import numpy as np

_GLOBAL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_tensors(model):
    """Weights of a Llama by their GGUF names; queries and keys in GGUF's order of channels."""
    config, tensors = model.config, {}
    for key, weight in model.state_dict().items():
        array = weight.float().numpy()
        if key in _GLOBAL:
            if key != "lm_head.weight" or not config.tie_word_embeddings:
                tensors[_GLOBAL[key]] = array
            continue
        _, _, layer, rest = key.split(".", 3)
        name = _LAYER[rest.removesuffix(".weight")]
        if name in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if name == "attn_q" else config.num_key_value_heads
            halves = array.reshape(heads, 2, len(array) // heads // 2, -1)
            array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        tensors[f"blk.{layer}.{name}.weight"] = array
    return tensors


def write_gguf(  # a fixture with as many switches as files can have faults
    path,
    model,
    *,
    architecture="llama",
    change=lambda tensors: None,
    quantized=(),
    values=None,
    tokenizer=None,
    ends=None,
):
    """Write a Llama to `path`.

    Args:
        path: Of the file.
        model: The Llama.
        architecture: What the file calls it.
        change: Edits the tensors by GGUF name.
        quantized: Names of tensors to store as Q8_0.
        values: Texts, whole numbers and floats by key, besides those of the configuration.
        tokenizer: A byte-level BPE tokenizer to put in.
        ends: Ids of end tokens by name (`eos`, `eot`).
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    for key, value in (values or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key, value)
    for name, token_id in (ends or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    tensors = gguf_tensors(model)
    change(tensors)
    for name, array in tensors.items():
        if name in quantized:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _add_tokenizer(writer, tokenizer):
    import json

    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    special = set(tokenizer.all_special_tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
