"""Chat templates: a conversation into a prompt, as the model's own tokenizer configuration says.

The template is the model's, the messages are a client's: rendering happens in jinja2's sandbox, and what a
template or its input does wrong is a 400 that says so.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..ingress.errors import BadRequest, show
from ..ingress.request import decode_body

CONFIG: Final = "tokenizer_config.json"
TEMPLATE: Final = "chat_template.jinja"
MAX_MESSAGES: Final = 4096
RESERVED: Final = ("messages", "tools", "add_generation_prompt")


class NoTemplate(ValueError):
    """There is no template where one was said to be, or it cannot be used."""


class ChatTemplate:
    """A compiled chat template and the special tokens it may name.

    Raises:
        NoTemplate: the source is not a template.
    """

    def __init__(self, source: str, special: dict[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self._special = special or {}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise NoTemplate(f"the chat template is no template: {error}") from None

    @classmethod
    def find(cls, tokenizer: str | Path, template: str | Path | None = None) -> ChatTemplate | None:
        """Load the template that belongs to a tokenizer.json, or the file `template`; None if there is none.

        Beside the tokenizer: `chat_template.jinja`, else `chat_template` in `tokenizer_config.json` (a
        string, or a list of named ones of which "default" is taken).

        Raises:
            NoTemplate: a file that should hold one cannot be read, or holds none.
        """
        folder = Path(tokenizer).parent
        config = _read_config(folder / CONFIG)
        special = {
            name: text
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (text := _token_text(config.get(name))) is not None
        }
        if template is not None:
            return cls(_read(Path(template)), special)
        if (folder / TEMPLATE).is_file():
            return cls(_read(folder / TEMPLATE), special)
        source = config.get("chat_template")
        if isinstance(source, list):
            named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
            source = named.get("default")
        return cls(source, special) if isinstance(source, str) else None

    def render(
        self, messages: list[dict[str, Any]], tools: Any = None, more: dict[str, Any] | None = None
    ) -> str:
        """Return the prompt, up to where the assistant speaks. Raises BadRequest."""
        try:
            return self._template.render(
                **{**self._special, **(more or {})},
                messages=messages,
                tools=tools,
                add_generation_prompt=True,
            )
        except jinja2.TemplateError as error:
            raise BadRequest("messages", f"the model's chat template refuses them: {error}") from None
        except Exception as error:  # it is a program, which may fail in any way
            raise BadRequest(
                "messages", f"the model's chat template cannot take them: {type(error).__name__}: {error}"
            ) from None


class _Generation(Extension):
    """`{% generation %}`: marks what the assistant says, for who trains a model; it adds nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> Node:
        """Read what is marked."""
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def check_messages(value: Any) -> list[dict[str, Any]]:
    """Check a conversation and join the text parts of each message's content. Raises BadRequest."""
    if type(value) is not list or not value:
        raise BadRequest("messages", f"must be a non-empty list of messages, got {show(value)}")
    if len(value) > MAX_MESSAGES:
        raise BadRequest("messages", f"has {len(value)} messages; at most {MAX_MESSAGES} are taken")
    return [_message(one, f"messages[{index}]") for index, one in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise BadRequest(where, f"must be an object with role and content, got {show(value)}")
    if type(value.get("role")) is not str:
        raise BadRequest(f"{where}.role", f"must be a string, got {show(value.get('role'))}")
    if value.get("tool_calls"):
        value = {**value, "tool_calls": _tool_calls(value["tool_calls"], f"{where}.tool_calls")}
    content = value.get("content")
    if content is None or type(content) is str:
        return {**value, "content": content if content is not None else ""}
    if type(content) is not list:
        raise BadRequest(f"{where}.content", f"must be a string or a list of parts, got {show(content)}")
    texts = []
    for index, part in enumerate(content):
        if type(part) is not dict or part.get("type") != "text" or type(part.get("text")) is not str:
            raise BadRequest(f"{where}.content[{index}]", "only parts of type text are taken here")
        texts.append(part["text"])
    return {**value, "content": "\n".join(texts)}


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Return calls with their arguments as objects: a client has them as JSON, and templates write it."""
    if type(value) is not list:
        raise BadRequest(where, f"must be a list, got {show(value)}")
    calls = []
    for index, call in enumerate(value):
        function = call.get("function") if type(call) is dict else None
        if type(function) is not dict:
            raise BadRequest(f"{where}[{index}]", f"must be an object with a function, got {show(call)}")
        arguments = _arguments(function.get("arguments"), f"{where}[{index}].function.arguments")
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


def _arguments(value: Any, where: str) -> dict[str, Any]:
    why = ""
    if type(value) is str and value:
        try:
            value = decode_body(value.encode())
        except BadRequest as error:
            why = f": {error.what}"
    if value is None or value == "":
        return {}
    if type(value) is not dict:
        raise BadRequest(where, f"must be a JSON object, got {show(value)}{why}")
    return value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NoTemplate(f"cannot read the chat template {path}: {error}") from None


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NoTemplate(f"cannot read {path}: {error}") from None
    return config if isinstance(config, dict) else {}


def _token_text(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Render JSON as templates expect it, with `transformers`' options; nothing is escaped for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
