"""Random rules on logits for state machines, what they make of a model's logits, and what prompts are said to be worth."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from kvgraft.engine.sampling.logit_rules import LogitRules
from kvgraft.testing.tiny_models import VOCABULARY

TOKEN = st.integers(3, VOCABULARY - 1)

RULES: st.SearchStrategy[dict[str, object]] = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {},
        optional={
            "repetition_penalty": st.sampled_from([0.8, 1.3, 2.0]),
            "frequency_penalty": st.sampled_from([-0.5, 0.4, 1.5]),
            "presence_penalty": st.sampled_from([-0.5, 0.6]),
            "logit_bias": st.lists(st.tuples(TOKEN, st.sampled_from([-100.0, 0.5])), max_size=3).map(tuple),
            "bad_token_ids": st.lists(st.lists(TOKEN, min_size=1, max_size=2).map(tuple), max_size=30).map(tuple),
            "allowed_token_ids": st.sampled_from([None, tuple(range(3, VOCABULARY, 2))]),
            "min_p": st.sampled_from([0.0, 0.05]),
            "min_tokens": st.just(1),
            "prompt_logprobs": st.integers(0, 3),
        },
    ),
)
"""Arguments of `SamplingParams` besides those that a machine draws itself."""


def ruled(sampling, prompt, tokens, logits):
    """What `tokens` were drawn from.

    Args:
        sampling: Of the request.
        prompt: int64 ids.
        tokens: Its answer, or the beginning of it.
        logits: float32 (num_rows, vocab_size), the model's in front of each of the tokens, and maybe behind the last.
    """
    rules = LogitRules.of(sampling, prompt, (), torch.device("cpu"))
    if rules is None:
        return logits
    rows = []
    for number, row in enumerate(logits):
        rows.append(rules.apply(row))
        if number < len(tokens):
            rules.accept(int(tokens[number]))
    return torch.stack(rows)


@torch.inference_mode()
def assert_scored(adapter, output, count):
    """Compare the log-probabilities of a prompt with the model's own pass over it; `count` of the likeliest are named."""
    prompt = torch.from_numpy(output.prompt_token_ids)
    with adapter.stock() as model:
        expected = model(prompt[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
    first, *others = output.prompt_logprobs
    assert first is None
    assert [found.token_id for found in others] == prompt[1:].tolist()
    assert all(len(found.top) == count for found in others)
    for row, found in zip(expected, others, strict=True):
        named = [found.logprob, *(value for _, value in found.top)]
        true = [row[found.token_id], *row.topk(count).values]
        assert all(abs(value - float(other)) < 1e-3 for value, other in zip(named, true, strict=True))
        assert all(abs(float(row[token]) - value) < 1e-3 for token, value in found.top)
