"""Prefill attention for CPU servers whose cost is new tokens times context.

SGLang's `torch_native` backend pads the queries of an extend to the whole sequence; 20 new tokens behind 4,000 cached ones
then cost as much attention as 4,020. That would hide what a cache hit saves. Everything else of the backend stays.
"""


def register():
    """Entry point: replace the backend of that name."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend("torch_native")(_backend)


def _backend(model_runner):
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from torch.nn.functional import scaled_dot_product_attention as attention

    class CPUAttention(TorchNativeAttnBackend):
        def _run_sdpa_forward_extend(self, query, output, k_cache, v_cache, *table, **options):
            req_to_token, rows, seq_lens, prefix_lens, extend_lens, encoder_lens = (*table, None)[:6]
            if encoder_lens is not None or options.get("is_cross_attn"):
                raise NotImplementedError("encoder-decoder models are not served in these tests")
            window = options.get("sliding_window_size")
            window = None if window is None or window < 0 else window
            first = 0
            for row, total, prefix, count in zip(
                rows.tolist(), seq_lens.tolist(), prefix_lens.tolist(), extend_lens.tolist(), strict=True
            ):
                slots = req_to_token[row, :total].long()
                keys, values = (cache[slots].to(query.dtype).transpose(0, 1)[None] for cache in (k_cache, v_cache))
                mask = None
                if options["causal"] and (prefix or window is not None):
                    here, there = torch.arange(prefix, total)[:, None], torch.arange(total)[None]
                    mask = there <= here if window is None else (there <= here) & (there >= here - window)
                fresh = slice(first, first + count)
                result = attention(
                    query[fresh].transpose(0, 1)[None],
                    keys,
                    values,
                    attn_mask=mask,
                    is_causal=options["causal"] and mask is None,
                    scale=options["scaling"],
                    enable_gqa=query.shape[1] != k_cache.shape[1],
                )
                output[fresh] = result[0].transpose(0, 1)
                first += count
            return output

    return CPUAttention(model_runner)
