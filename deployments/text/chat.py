"""Chat messages to prompt text, by the model's own Jinja template in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Self

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from deployments.openai.errors import InvalidRequestError

__all__ = ["ChatEncoder", "Message"]

Message = Mapping[str, Any]
"""`role`, `content` as a string, and what else of the message the template may read."""

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_PARAM = "messages"


class ChatEncoder:
    """Writes messages the way the model was trained to read them.

    Anything that goes wrong inside the template is the request's fault as far as a server can tell:
    it raises `InvalidRequestError` naming `messages`.
    """

    def __init__(
        self,
        template: str | None,
        *,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._template = None if template is None else environment.from_string(template)
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """Read the template and the special tokens of a model; without a template none encodes.

        A `chat_template.jinja` goes before the `chat_template` of `tokenizer_config.json`.
        """
        config = _read_json(directory / "tokenizer_config.json")
        template_file = directory / "chat_template.jinja"
        if template_file.is_file():
            template: str | None = template_file.read_text(encoding="utf-8")
        else:
            template = _default_template(config.get("chat_template"))
        return cls(template, special_tokens=_special_tokens(config))

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt text, up to where the assistant's answer begins."""
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions", param=_PARAM
            )
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except TemplateError as error:
            message = f"the model's chat template refused the messages: {error.message}"
            raise InvalidRequestError(message, param=_PARAM) from error
        except Exception as error:
            # The template is a program of the model's makers; which exceptions it raises on odd
            # messages cannot be listed. The text may hold parts of the messages: only its type.
            message = f"the model's chat template failed ({type(error).__name__})"
            raise InvalidRequestError(message, param=_PARAM) from error


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _default_template(value: Any) -> str | None:
    """A template, or the one called `default` of a list of named ones."""
    if isinstance(value, list):
        value = next((item["template"] for item in value if item.get("name") == "default"), None)
    return value if isinstance(value, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens by name; a config gives each as a string or as an object."""
    tokens = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        tokens[name] = value if isinstance(value, str) else ""
    return tokens
