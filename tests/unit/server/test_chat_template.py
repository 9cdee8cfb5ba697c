"""Chat templates are found where models keep them, and run where they can do no harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_worker.text.chat_template import (
    ChatTemplate,
    TemplateRefuses,
    TemplateUnreadable,
    load_template,
)

HELLO = [{"role": "user", "content": "hi"}]


def as_is(text: str) -> str:
    return text


def write_config(folder: Path, config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def rendered(folder: Path) -> str:
    template = load_template(folder)
    assert template is not None
    return template.render(HELLO, as_is)


def test_the_config_names_template_and_tokens(tmp_path: Path) -> None:
    write_config(
        tmp_path,
        {
            "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
            "bos_token": "<s>",
            "eos_token": {"content": "</s>"},
        },
    )
    assert rendered(tmp_path) == "<s>hi</s>"


def test_a_list_of_templates_has_a_default(tmp_path: Path) -> None:
    templates = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    write_config(tmp_path, {"chat_template": templates})
    assert rendered(tmp_path) == "yes"


def test_a_template_file_wins(tmp_path: Path) -> None:
    write_config(tmp_path, {"chat_template": "config"})
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered(tmp_path) == "file"


def test_no_template_is_no_error(tmp_path: Path) -> None:
    assert load_template(tmp_path) is None
    write_config(tmp_path, {})
    assert load_template(tmp_path) is None


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TemplateUnreadable, match=r"tokenizer_config\.json is not JSON"):
        load_template(tmp_path)
    write_config(tmp_path, {"chat_template": "{% if %}"})
    with pytest.raises(TemplateUnreadable, match="not valid Jinja"):
        load_template(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", b'{"a":' * 100_000, r"config\.json is not JSON"),
        ("tokenizer_config.json", b"[]", "must hold a JSON object"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "x"}]}', "no list of objects"),
        ("tokenizer_config.json", b'{"chat_template": [5]}', "no list of objects"),
        ("tokenizer_config.json", b"\xff\xfe", "is not text in UTF-8"),
        ("chat_template.jinja", b"\xff\xfe", r"template\.jinja is not text in UTF-8"),
        ("chat_template.jinja", b"{{ " + b"(" * 20_000, "not valid Jinja"),
    ],
)
def test_nonsense_in_a_models_texts_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TemplateUnreadable, match=message):
        load_template(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{{ raise_exception('not like this') }}",
        "{{ missing.attribute }}",
        "{{ 1 / 0 }}",
        "{{ messages[0]['content'].index('no such text') }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ strftime_now(5) }}",
    ],
)
def test_a_template_can_not_reach_out_and_its_refusals_are_answers(source: str) -> None:
    with pytest.raises(TemplateRefuses):
        ChatTemplate(source, {}).render(HELLO, as_is)


def test_the_names_that_templates_expect() -> None:
    source = (
        "{% for m in messages %}{% if loop.first %}{{ {'a': '<é>'} | tojson }}{% break %}"
        "{% endif %}{% endfor %}{{ strftime_now('%Y') | length }}{{ tools is none }}"
    )
    assert ChatTemplate(source, {}).render(HELLO, as_is) == '{"a": "<é>"}4True'
