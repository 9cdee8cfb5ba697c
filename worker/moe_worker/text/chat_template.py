"""Renders messages with the chat template that came with the model.

The template is a program from the model's folder: it runs in Jinja's sandbox, which keeps it from
reaching Python, and with the names that templates of the hub expect.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2 import meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"


_FAULTS = (
    jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError,
    RecursionError,
)  # fmt: skip
"""What a template's own arithmetic and look-ups may raise."""


class TemplateUnreadable(ValueError):
    """The model's folder holds a chat template that is none."""


class TemplateRefuses(ValueError):
    """The template does not take these messages."""


class Shield(Protocol):
    """Takes the meaning of special tokens from a text."""

    def __call__(self, text: str) -> str: ...


class ChatTemplate:
    """One compiled template with the special tokens that it may name (bos_token, eos_token, …)."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            names = meta.find_undeclared_variables(environment.parse(source))
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateUnreadable(f"the chat template is not valid Jinja: {error}") from error
        self._special_tokens = special_tokens
        self.source = source
        self.knows_tools = "tools" in names

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        shield: Shield,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt up to where the assistant's answer begins; all that clients wrote goes through
        `shield`.

        Raises:
            TemplateRefuses: with the template's own reason.
        """
        safe_messages = shielded(messages, shield)
        safe_tools = None if tools is None else shielded(tools, shield)
        try:
            return self._template.render(
                messages=safe_messages,
                add_generation_prompt=True,
                tools=safe_tools,
                **self._special_tokens,
            )
        except _FAULTS as error:
            raise TemplateRefuses(f"the model's chat template refuses them: {error}") from error


def shielded(value: Any, shield: Shield) -> Any:
    """A copy of JSON in which no text, however deep, spells a special token."""
    if isinstance(value, str):
        return shield(value)
    if isinstance(value, Mapping):
        return {shield(key): shielded(item, shield) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [shielded(item, shield) for item in value]
    assert value is None or isinstance(value, bool | int | float), f"{type(value)} is no JSON"
    return value


def load_template(model_path: Path) -> ChatTemplate | None:
    """The template of a model's folder, None when it has none.

    `chat_template.jinja` wins over `tokenizer_config.json`, as in the hub's own loader.

    Raises:
        TemplateUnreadable: naming the file.
    """
    config = read_tokenizer_config(model_path)
    file = model_path / TEMPLATE_FILE
    source = _read(file) if file.is_file() else _default_template(config.get("chat_template"))
    return None if source is None else ChatTemplate(source, special_tokens(config))


def read_tokenizer_config(model_path: Path) -> dict[str, Any]:
    """tokenizer_config.json, {} when there is none. Raises TemplateUnreadable."""
    path = model_path / CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise TemplateUnreadable(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise TemplateUnreadable(f"{path} must hold a JSON object")
    return config


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TemplateUnreadable(f"{path} is not text in UTF-8: {error}") from error


def _default_template(templates: Any) -> str | None:
    """A config holds one template, or a list of named ones."""
    if isinstance(templates, list):
        try:
            templates = {entry["name"]: entry["template"] for entry in templates}.get("default")
        except (TypeError, LookupError) as error:
            raise TemplateUnreadable(
                f"{CONFIG_FILE}: chat_template is no list of objects with name and template"
            ) from error
    return templates if isinstance(templates, str) else None


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens of a tokenizer_config.json, as text."""
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _tojson
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _tojson(value: Any, indent: int | None = None) -> str:
    """Jinja's own escapes HTML, which no model has seen in training."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
