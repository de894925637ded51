"""Chat templates: Jinja text from the checkpoint, run in a sandbox.

The environment is that of `apply_chat_template` in Hugging Face transformers: same globals, filters and
extensions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateError(ValueError):
    """The chat template is missing or broken, did something forbidden, or refused the messages."""


@dataclass(frozen=True)
class ChatTurn:
    """One message of a conversation."""

    role: str
    content: str


class ChatTemplate:
    """A compiled chat template. `special_tokens` are the variables such as `bos_token` that it may use."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises `TemplateError` if there is no template or its syntax is wrong."""
        if not source:
            raise TemplateError("the model has no chat template")
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(self, messages: Sequence[ChatTurn], add_generation_prompt: bool = True) -> str:
        """The conversation as text, by default up to where the assistant's next message begins.

        Raises `TemplateError` with the template's own words where it refuses the messages.
        """
        turns = [{"role": turn.role, "content": turn.content} for turn in messages]
        try:
            return self._template.render(
                messages=turns,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise TemplateError(f"chat template: {error.message}") from error
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise TemplateError(f"chat template: {type(error).__name__}: {error}") from error


class _GenerationTag(jinja2.ext.Extension):
    """Accepts `{% generation %}` around assistant text; a mark for training that changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _PlainDict:
    """`dict` for templates, without the attributes of the real type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _PlainNamespace(jinja2.utils.Namespace):
    """`namespace` for templates; names that begin with an underscore are refused."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # `self` may be one of the template's own names, so it must not be a parameter here.
        namespace, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(namespace, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold the name {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_PlainDict(),
        namespace=_PlainNamespace,
    )
    return environment
