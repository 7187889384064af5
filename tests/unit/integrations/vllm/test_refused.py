"""Which requests are neither grafted nor captured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from stand_ins import Request

from kvgraft.integrations.vllm.scheduler.refused import refused_request


def request(**fields):
    made = Request("one", [1, 2, 3], None, 4)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_request_for_text_is_not_refused():
    assert refused_request(request()) == ""
    assert refused_request(request(sampling_params=SimpleNamespace(prompt_logprobs=None))) == ""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lora_request": object()}, "LoRA"),
        ({"mm_features": (object(),)}, "images"),
        ({"prompt_token_ids": None}, "embeddings"),
        ({"prompt_embeds": object()}, "embeddings"),
        ({"skip_reading_prefix_cache": True}, "not to read caches"),
        ({"pooling_params": object()}, "pooling"),
        # A client may say skip_reading_prefix_cache=False beside it; a graft would leave positions without logits.
        ({"sampling_params": SimpleNamespace(prompt_logprobs=0)}, "prompt_logprobs"),
        ({"sampling_params": SimpleNamespace(prompt_logprobs=5)}, "prompt_logprobs"),
    ],
)
def test_what_a_graft_would_answer_wrongly_is_refused_by_name(fields, words):
    assert words in refused_request(request(**fields))
