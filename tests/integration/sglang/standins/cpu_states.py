"""Kernels for layers with states that SGLang's build for CPUs has and a plain one lacks: short convolutions, and two names.

The names are looked up while any model with such layers starts; a model that runs them fails.
"""

_NAMES = ("fused_sigmoid_gating_delta_rule_update_cpu", "fused_gdn_gating_cpu")


def register():
    """Entry point: fill in what is missing."""
    import torch
    from sglang.srt.layers.attention.mamba import causal_conv1d

    kernels = torch.ops.sgl_kernel
    for name in _NAMES:
        if not hasattr(kernels, name):
            setattr(kernels, name, _absent)
    if not causal_conv1d._HAS_CONV1D_KERNEL:
        causal_conv1d.causal_conv1d_fn = _prefill
        causal_conv1d.causal_conv1d_update = _decode


def _absent(*_, **__):
    raise NotImplementedError("this kernel is not in a plain build for CPUs")


def _prefill(x, weight, bias=None, *, query_start_loc, cache_indices, has_initial_state, conv_states, **_):
    """Convolve `x` (width, rows of all sequences), each after the inputs in its slot; leaves the last ones there."""
    import torch

    result, starts = torch.empty_like(x), query_start_loc.tolist()
    for number, slot in enumerate(cache_indices.tolist()):
        rows = slice(starts[number], starts[number + 1])
        before = conv_states[[slot]] * bool(has_initial_state[number])
        result[:, rows] = _convolved(before, x[None, :, rows], weight, bias, conv_states, [slot])[0]
    return result


def _decode(x, conv_state, weight, bias=None, activation=None, *, conv_state_indices, **_):
    """Convolve one row of each sequence, `x` (sequences, width)."""
    slots = conv_state_indices.long()
    return _convolved(conv_state[slots], x[..., None], weight, bias, conv_state, slots)[..., 0]


def _convolved(before, x, weight, bias, states, slots):  # noqa: PLR0917
    import torch

    inputs = torch.cat([before.to(x.dtype), x], 2)
    states[slots] = inputs[..., -states.shape[-1] :].to(states.dtype)
    return torch.nn.functional.conv1d(inputs, weight[:, None], bias, groups=len(weight))
