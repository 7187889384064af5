"""The lists of vLLM's body fields, with which the server's tables are compared, have that of the installed vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import vllm
from vllm.entrypoints.generate.base.protocol import StreamOptions
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest

LISTS = json.loads((Path(__file__).parents[3] / "unit/server/vllm_fields.json").read_text())
CLASSES = {
    "completions": [CompletionRequest],
    "chat": [ChatCompletionRequest],
    "responses": [ResponsesRequest],
    "tokenize": [TokenizeCompletionRequest, TokenizeChatRequest],
    "detokenize": [DetokenizeRequest],
    "stream_options": [StreamOptions],
}


def test_there_is_a_list_of_this_version():
    assert set(LISTS[vllm.__version__]) == set(CLASSES)


@pytest.mark.parametrize("body", CLASSES)
def test_every_field_is_listed(body):
    fields = {name for kind in CLASSES[body] for name in kind.model_fields}
    assert sorted(fields) == LISTS[vllm.__version__][body]
