"""What a chat says about its template, and about its messages besides their texts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from kvgraft.http.chat_template import render_chat
from kvgraft.http.template_fields import TemplateFields, reads
from kvgraft.models import bundled_model_path

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if enable_thinking %}<think>{% endif %}"
    "{% for d in documents or [] %}[{{ d.title }}]{% endfor %}{{ reasoning_effort }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def templated(server):
    server.engine.loaded.tokenizer.chat_template = TEMPLATE
    return server


def rendered(server):
    return json.loads(server.engine.prepared[-1])


def test_templates_are_told_what_the_request_says(templated):
    templated.chat(
        chat_template_kwargs={"enable_thinking": True},
        reasoning_effort="low",
        documents=[{"title": "A", "text": "a"}],
        add_generation_prompt=False,
        add_special_tokens=True,
    )
    told = rendered(templated)
    assert (told["enable_thinking"], told["reasoning_effort"]) == (True, "low")
    assert (told["documents"], told["ends"]) == ([{"title": "A", "text": "a"}], True)
    assert templated.engine.calls[-1].add_special_tokens is True


def test_final_message_is_gone_on_with(templated):
    templated.chat({"role": "assistant", "content": "It is"}, continue_final_message=True)
    assert rendered(templated)["continue_final_message"] is True
    assert rendered(templated)["ends"] is True


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (TemplateFields(), "<user>Hi</><assistant>"),
        (TemplateFields(add_generation_prompt=False), "<user>Hi</>"),
        (TemplateFields(add_generation_prompt=False, continue_final_message=True), "<user>Hi"),
        (TemplateFields({"enable_thinking": True}), "<user>Hi</><think><assistant>"),
    ],
)
def test_real_templates_are_rendered_so(asked, text):
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    tokenizer.chat_template = TEMPLATE
    assert render_chat(tokenizer, [{"role": "user", "content": "Hi"}], [], asked).text == text


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "User: Hi\n\nAssistant:"),
        ({"add_generation_prompt": False}, "User: Hi\n\n"),
        ({"continue_final_message": True}, "User: Hi"),
    ],
)
def test_plain_chats_end_where_the_request_says(server, fields, end):
    server.chat(add_special_tokens=False, **fields)
    assert server.engine.prepared == [end]
    assert server.engine.calls[-1].add_special_tokens is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinkin": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template": TEMPLATE}, "chat_template"),
        ({"documents": [1]}, "documents[0]"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"messages": [{"role": "tool", "content": "2"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "a", "audio": {"id": "x"}}]}, "messages[0].audio"),
        (
            {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": 1}]}]},
            "messages[0].content[0].refusal",
        ),
    ],
)
def test_bad_field_is_named(templated, fields, param):
    reply = templated.chat(**fields)
    assert reply.status == 400, reply.body
    assert reply.error["param"] == param


def test_documents_that_the_template_does_not_read_are_refused(server):
    server.engine.loaded.tokenizer.chat_template = "{{ messages }}"
    assert server.chat(documents=[{"text": "a"}]).error["param"] == "documents"


def test_an_effort_that_the_template_does_not_read_is_left_out(server):
    server.engine.loaded.tokenizer.chat_template = "{{ messages }}"
    assert server.chat(reasoning_effort="low").json["kvgraft"]["left_out"] == ["reasoning_effort"]


def test_what_servers_send_may_be_sent_back(templated):
    sent = {"role": "assistant", "content": None, "refusal": "I cannot.", "annotations": [], "audio": None}
    parts = [{"type": "refusal", "refusal": "No"}, {"type": "text", "text": "sorry"}]
    templated.chat(sent, {"role": "assistant", "content": parts, "reasoning_content": "hm"})
    assert [message["content"] for message in rendered(templated)["messages"]] == ["I cannot.", "No\nsorry"]
    assert rendered(templated)["messages"][1]["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    ("template", "read"),
    [
        ("{% if think %}a{% endif %}", True),
        ("{{ '<think>' }}{{ message.think }}", False),
        ("{% set think = 1 %}{{ think }}", False),
        ("{% generation %}{{ think }}{% endgeneration %}", True),
        ("{% for m in messages %}{% break %}{% endfor %}", False),
        ("{% broken think", True),
    ],
)
def test_a_template_reads_what_it_looks_up_and_no_words_beside(template, read):
    assert reads(template, "think") is read


WITH_CALLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }}]{% endfor %}</>{% endfor %}"
)
CALLED = [
    {"role": "user", "content": "Where?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}],
    },
    {"role": "tool", "content": "42", "tool_call_id": "1"},
]


@pytest.mark.parametrize(
    ("template", "is_spelled"),
    [
        (WITH_CALLS, False),
        ("{{ messages | tojson }}", False),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}", True),
        ("{# tool_calls #}{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}", True),
        (WITH_CALLS.replace("m.tool_calls or []", "(m.tool_calls if tools else []) or []"), True),
        (WITH_CALLS.replace("in messages", "in messages if m.role != 'tool'"), True),
    ],
)
def test_templates_that_leave_calls_or_results_out_get_them_as_texts(template, is_spelled):
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    tokenizer.chat_template = template
    text = render_chat(tokenizer, CALLED, []).text
    assert "look" in text
    assert "42" in text
    assert '{"name": "look", "arguments": {"at": "x"}}' in text or not is_spelled
    assert ("Result of look: 42" in text) is is_spelled


def test_a_template_that_refuses_results_without_calls_has_read_them():
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    tokenizer.chat_template = (
        "{% if messages[-1].role == 'tool' and not messages[-2].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
        "{{ messages[-2].tool_calls[0].function.name }}{{ messages[-1].content }}"
    )
    assert render_chat(tokenizer, CALLED, []).text == "look42"


def test_calls_that_a_template_would_leave_out_are_spelled_out():
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    without = SimpleNamespace(chat_template=None)
    text = render_chat(without, messages, []).text
    assert '{"name": "look", "arguments": {"at": "x"}}' in text
    assert "Result of look: 42" in text
