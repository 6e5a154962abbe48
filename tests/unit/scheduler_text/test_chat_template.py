"""Tests of scheduler_svc.text.chat_template."""

from __future__ import annotations

import pytest

from scheduler_svc.errors import InvalidArgument, StartupError
from scheduler_svc.text.chat_template import ChatTemplate, Message

CHATML = """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}
    {%- endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
HELLO = [Message("user", "<b>hi</b>")]


def test_blocks_are_trimmed_as_models_expect() -> None:
    """Lines that hold only statements leave nothing, and nothing is HTML-escaped."""
    text = ChatTemplate(CHATML, {}).render(HELLO)
    assert text.startswith("<|im_start|>system\nBe kind<|im_end|>\n")
    assert text.endswith("<|im_start|>user\n<b>hi</b><|im_end|>\n<|im_start|>assistant\n")


def test_templates_have_what_transformers_gives_them() -> None:
    """Tojson without HTML escapes, special tokens, loop controls, dates, generation tags."""
    source = (
        "{{ bos_token }}{{ messages[0] | tojson }}{% for m in messages %}{% break %}{% endfor %}"
        "{% generation %}g{% endgeneration %}{{ strftime_now('%%') }}{{ tools is none }}"
    )
    text = ChatTemplate(source, {"bos_token": "<s>"}).render([Message("user", "é<")])
    assert text == '<s>{"role": "user", "content": "é<"}g%True'


def test_a_refusal_names_the_messages() -> None:
    """What a template raises is the client's error, with the template's words."""
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidArgument, match="roles must alternate") as caught:
        template.render(HELLO)
    assert caught.value.field == "chat.messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].role.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0]['content'] + 1 }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    """Private attributes, changes to the messages and type errors are refusals."""
    with pytest.raises(InvalidArgument):
        ChatTemplate(source, {}).render(HELLO)


def test_a_broken_template_stops_the_start() -> None:
    """Bad Jinja is found when the model is loaded, not at the first request."""
    with pytest.raises(StartupError, match="chat template"):
        ChatTemplate("{% if %}", {})
