"""Chat templates: what they see, and whose fault it is when they fail."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from deployments.openai.errors import InvalidRequestError
from deployments.text.chat import ChatEncoder

USER = [{"role": "user", "content": "Hi"}]


def encoder(template: str | None) -> ChatEncoder:
    return ChatEncoder(
        template,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        now=lambda: datetime(2030, 1, 2),  # noqa: DTZ001 - templates print local dates
    )


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}", "<s>Hi</s>"),
        ("{% if add_generation_prompt %}\nA:{% endif %}", "A:"),
        ("  {%- for m in messages %}\n  {{ m.role }}\n  {% endfor %}", "  user\n"),
        ("{{ {'a<': 'é'} | tojson }}", '{"a<": "é"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2030"),
        ("{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}{{ messages | length }}{% endgeneration %}", "1"),
        ("{{ tools is none and documents is none }}", "True"),
    ],
)
def test_templates_find_what_they_are_written_for(template, text):
    assert encoder(template).render(USER) == text


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0]['content'] + 1 }}", "(TypeError)"),
        ("{{ 1 / 0 }}", "(ZeroDivisionError)"),
    ],
)
def test_a_template_that_fails_refuses_the_messages(template, reason):
    """Row 15: the template's own message, as a 400."""
    with pytest.raises(InvalidRequestError, match="chat template") as caught:
        encoder(template).render(USER)
    assert reason in caught.value.message
    assert caught.value.param == "messages"
    assert "Hi" not in caught.value.message


def test_a_model_without_a_template_says_so():
    with pytest.raises(InvalidRequestError, match="no chat template"):
        encoder(None).render(USER)


def write(directory, name, value):
    text = value if isinstance(value, str) else json.dumps(value)
    (directory / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}"},
        {
            "chat_template": [
                {"name": "tool_use", "template": "wrong"},
                {"name": "default", "template": "{{ bos_token }}|{{ eos_token }}|"},
            ]
        },
    ],
)
def test_the_template_and_the_tokens_come_from_the_models_directory(tmp_path, config):
    tokens = {"bos_token": {"content": "<b>", "special": True}, "eos_token": "<e>"}
    write(tmp_path, "tokenizer_config.json", {**config, **tokens, "unk_token": None})
    assert ChatEncoder.from_directory(tmp_path).render(USER) == "<b>|<e>|"


def test_a_template_file_goes_before_the_configs(tmp_path):
    write(tmp_path, "tokenizer_config.json", {"chat_template": "old"})
    write(tmp_path, "chat_template.jinja", "new")
    assert ChatEncoder.from_directory(tmp_path).render(USER) == "new"


@pytest.mark.parametrize("config", [None, {}, {"chat_template": [{"name": "rag"}]}])
def test_a_directory_without_a_template_is_a_model_without_one(tmp_path, config):
    if config is not None:
        write(tmp_path, "tokenizer_config.json", config)
    with pytest.raises(InvalidRequestError, match="no chat template"):
        ChatEncoder.from_directory(tmp_path).render(USER)
