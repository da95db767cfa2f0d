"""OpenAI's two endpoints as `/generate` bodies, and `/generate`'s events in OpenAI's JSON.

Only shapes live here: every rule about a parameter's value is ingress's. Fields that nobody here knows are
passed over, as clients of these endpoints send many.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from ..ingress.errors import BadRequest, show
from ..ingress.fields import boolean
from ..ingress.request import asks_nothing, make_rid
from ..sink import ChunkEvent, Error
from .answer import failure_event
from .chat import RESERVED
from .logprobs import CompletionLogprobs, LogprobsSum, Skipped, TokenBytes, chat_logprobs
from .naming import SAMPLING, names_of

_encode: Final = msgspec.json.Encoder().encode

COMPLETION_MAX_TOKENS: Final = 16
MAX_LOGPROBS: Final = 20

NOT_TAKEN: Final = {
    "allowed_token_ids": "use logit_bias",
    "bad_words": "use logit_bias",
    "chat_template": "the server's own is used",
    "continue_final_message": "render the chat yourself and complete it",
    "custom_logit_processor": "use custom_params, if the scheduler knows some",
    "documents": "put them into a message, or into chat_template_kwargs",
    "functions": "describe them to the model as tools",
    "guided_choice": "use regex",
    "guided_grammar": "use ebnf",
    "guided_json": "use response_format",
    "guided_regex": "use regex",
    "include_stop_str_in_output": "use no_stop_trim",
    "logits_processors": "use custom_params, if the scheduler knows some",
    "logprob_token_ids": "use /generate with token_ids_logprob",
    "lora_path": "there is one model here",
    "max_new_tokens": "use max_tokens",
    "min_new_tokens": "use min_tokens",
    "prompt_embeds": "give a prompt",
    "prompt_logprobs": "complete with echo and logprobs",
    "repetition_detection": "leave it out",
    "return_hidden_states": "use /generate",
    "return_logprob": "use logprobs",
    "return_token_ids": "use /generate, which answers with them",
    "return_tokens_as_token_ids": "use /generate, which answers with them",
    "sampling_params": "put what is in it beside the prompt",
    "sampling_seed": "use seed",
    "structured_outputs": "use response_format, regex or ebnf",
    "suffix": "leave it out",
    "thinking_token_budget": "use max_tokens",
    "truncate_prompt_tokens": "shorten the prompt",
    "use_beam_search": "leave it out",
    "vllm_xargs": "use custom_params, if the scheduler knows some",
    "web_search_options": "search yourself, and put what is found into a message",
}
"""Fields, most of them other servers', without which a client would get another answer than it asked for."""


@dataclass(slots=True)
class Wanted:
    """What a client asked for, besides the tokens."""

    chat: bool
    model: str
    stream: bool
    usage: bool
    """In a stream: whether a last chunk tells it."""
    running_usage: bool
    """In a stream: whether every chunk tells its choice's so far."""
    logprobs: bool
    names: dict[str, str]
    """The client's name for each of `/generate`'s fields that it has another for."""
    id: str
    """What `/abort_request` takes: the client's own rid, or one that is made here."""
    echo: list[str] | None = None
    prompt_tokens: int = 0
    """Of a chat, for its first chunk."""
    token_bytes: TokenBytes = lambda token: None
    skipped: Skipped = lambda token: False
    created: int = field(default_factory=lambda: int(time.time()))


def completion_body(body: Any, model: str) -> tuple[dict[str, Any], Wanted]:
    """Turn a `/v1/completions` body into a `/generate` one. Raises BadRequest."""
    body, wanted = _start(body, model, chat=False)
    prompt = body.get("prompt")
    if prompt is None:
        raise BadRequest("prompt", "is missing: give a string, a list of strings, or token ids")
    if type(prompt) not in (str, list):
        raise BadRequest("prompt", f"must be a string, a list of strings, or token ids, got {show(prompt)}")
    generate = _generate(body, wanted)
    generate["sampling_params"].setdefault("max_new_tokens", COMPLETION_MAX_TOKENS)
    first = prompt[0] if type(prompt) is list and prompt else prompt
    generate["text" if type(first) is str else "input_ids"] = prompt
    if (special := body.get("add_special_tokens")) is not None and special is not True:
        raise BadRequest("add_special_tokens", f"must be true, got {show(special)}: give token ids instead")
    count = body.get("logprobs")
    if count is not None and count is not False:
        wanted.logprobs = True
        generate |= _logprobs(count if count is not True else 1, "logprobs")
    if _flag(body.get("echo"), "echo"):
        wanted.echo = []
        if wanted.logprobs:
            generate["logprob_start_len"] = 0  # the prompt's tokens are part of the text
    return generate, wanted


def chat_body(body: Any, model: str) -> tuple[dict[str, Any], Wanted, dict[str, Any]]:
    """Turn a `/v1/chat/completions` body into a `/generate` one that still lacks its prompt.

    Returns it, what was wanted, and the checked client body, for the template. Raises BadRequest.
    """
    body, wanted = _start(body, model, chat=True)
    generate = _generate(body, wanted)
    _must_be_text(body)
    top = body.get("top_logprobs")
    if _flag(body.get("logprobs"), "logprobs"):
        wanted.logprobs = True
        generate |= _logprobs(0 if top is None else top, "top_logprobs")
    elif top:
        raise BadRequest("top_logprobs", f"needs logprobs to be true, got {show(top)}")
    return generate, wanted, body


def shown_tools(body: Mapping[str, Any]) -> Any:
    """Return the tools that a chat's model is told of, or None: not those that it must not call."""
    # A template asks whether there are any by `tools is not none`, if they are an empty list too.
    return None if body.get("tool_choice") == "none" else body.get("tools") or None


class OpenAIStream:
    """One prompt's chunks; usage is counted into `usage`, shared by a request's prompts."""

    __slots__ = (
        "_chat",
        "_echo",
        "_head",
        "_index",
        "_logprobs",
        "_prompt_tokens",
        "_running",
        "_tail",
        "_token_bytes",
        "usage",
    )

    def __init__(self, wanted: Wanted, index: int, usage: Usage) -> None:
        self._chat = wanted.chat
        self._index = index
        echo = None if wanted.echo is None else wanted.echo[index]
        self._echo = echo or ""
        self._token_bytes = wanted.token_bytes
        self._logprobs = (
            CompletionLogprobs(wanted.token_bytes, echo, wanted.skipped) if wanted.logprobs else None
        )
        self.usage = usage
        kind = b"chat.completion.chunk" if wanted.chat else b"text_completion"
        self._head = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[{"index":%d,%b' % (
            _encode(wanted.id),
            kind,
            wanted.created,
            _encode(wanted.model),
            index,
            b'"delta":{"content":' if wanted.chat else b'"text":',
        )
        self._prompt_tokens = wanted.prompt_tokens
        self._running = wanted.running_usage
        self._tail = b'}],"usage":null}\n\n' if wanted.usage else b"}]}\n\n"

    def opening(self) -> bytes:
        """Return a chat's first chunk, which carries the role."""
        if not self._chat:
            return b""
        head = self._head.replace(b'"delta":{', b'"delta":{"role":"assistant",')
        tail = self._so_far(self._prompt_tokens, 0) if self._running else self._tail
        return b'%b""},"logprobs":null,"finish_reason":null%b' % (head, tail)

    def delta(self, event: ChunkEvent) -> bytes:
        """Render an event as a chunk."""
        finish, close = event.finish, b"}" if self._chat else b""
        text = event.text_utf8.decode()
        logprobs = b"null" if self._logprobs is None else self._render(self._logprobs, event, text)
        if self._echo:
            text, self._echo = self._echo + text, ""
        tail = self._tail
        if self._running:
            tail = self._so_far(event.prompt_tokens, event.first + event.generated)
        if finish is None:
            return b'%b%b%b,"logprobs":%b,"finish_reason":null%b' % (
                self._head,
                _encode(text),
                close,
                logprobs,
                tail,
            )
        self.usage.count(event)
        return b'%b%b%b,"logprobs":%b,"finish_reason":%b,"matched_stop":%b%b' % (
            self._head,
            _encode(text),
            close,
            logprobs,
            _encode(finish.type),
            _encode(finish.matched),
            tail,
        )

    def failure(self, error: Error) -> bytes:
        """Render the request's failure."""
        return failure_event(error, openai=True)

    def _so_far(self, prompt: int, completion: int) -> bytes:
        return b'}],"usage":%b}\n\n' % _encode(_usage(prompt, completion))

    def _render(self, logprobs: CompletionLogprobs, event: ChunkEvent, text: str) -> bytes:
        if self._chat:
            return _encode(chat_logprobs(event.columns, self._token_bytes))
        return _encode(logprobs.render(event.columns, text, event.finish is not None))


class Usage:
    """The tokens of a request's prompts together."""

    def __init__(self) -> None:
        self.prompt = 0
        self.completion = 0

    def count(self, last: ChunkEvent) -> None:
        """Add a prompt's last event."""
        self.prompt += last.prompt_tokens
        self.completion += last.first + last.generated

    def json(self) -> dict[str, int]:
        """Return the object clients read."""
        return _usage(self.prompt, self.completion)


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def usage_chunk(wanted: Wanted, usage: Usage) -> bytes:
    """Render the chunk without choices that ends a stream whose client asked for usage."""
    return b"data: %b\n\n" % _encode({**_envelope(wanted, stream=True), "choices": [], "usage": usage.json()})


class ChoiceSum:
    """One prompt's choice of a whole response; log probabilities are rendered as they come."""

    __slots__ = ("last", "logprobs", "text")

    def __init__(self, wanted: Wanted, index: int) -> None:
        self.text = bytearray()
        echo = None if wanted.echo is None else wanted.echo[index]
        self.logprobs = (
            LogprobsSum(wanted.chat, wanted.token_bytes, echo, wanted.skipped) if wanted.logprobs else None
        )
        self.last: ChunkEvent | None = None

    def add(self, event: ChunkEvent) -> int:
        """Add an event; return how many bytes there are now."""
        self.text += event.text_utf8
        self.last = event
        if self.logprobs is None:
            return len(self.text)
        self.logprobs.add(event.columns, event.text_utf8.decode(), event.finish is not None)
        return len(self.text) + self.logprobs.size


def render_whole(wanted: Wanted, sums: Sequence[ChoiceSum]) -> bytes:
    """Render a whole response, a choice for each prompt."""
    usage = Usage()
    choices = []
    for index, one in enumerate(sums):
        assert one.last is not None
        usage.count(one.last)
        finish = one.last.finish
        text = one.text.decode()
        if wanted.echo is not None:
            text = wanted.echo[index] + text
        choice: dict[str, Any] = {"index": index}
        if wanted.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choice["logprobs"] = None if one.logprobs is None else one.logprobs.json()
        choice["finish_reason"] = None if finish is None else finish.type
        choice["matched_stop"] = None if finish is None else finish.matched
        choices.append(choice)
    return _encode({**_envelope(wanted, stream=False), "choices": choices, "usage": usage.json()})


def _envelope(wanted: Wanted, stream: bool) -> dict[str, Any]:
    kind = "text_completion" if not wanted.chat else "chat.completion.chunk" if stream else "chat.completion"
    return {"id": wanted.id, "object": kind, "created": wanted.created, "model": wanted.model}


def _start(body: Any, model: str, chat: bool) -> tuple[dict[str, Any], Wanted]:
    if type(body) is not dict:
        raise BadRequest("", f"the body must be a JSON object, got {show(body)}")
    for name, value in body.items():
        if name in NOT_TAKEN and not asks_nothing(value):
            raise BadRequest(name, f"is not supported, got {show(value)}; {NOT_TAKEN[name]}")
    if (best := body.get("best_of")) is not None and not (type(best) is int and best == 1):
        raise BadRequest("best_of", f"must be 1, got {show(best)}")
    named = body.get("model")
    if named is not None and type(named) is not str:
        raise BadRequest("model", f"must be a string, got {show(named)}")
    stream = _flag(body.get("stream"), "stream")
    options = body.get("stream_options")
    if options is not None and type(options) is not dict:
        raise BadRequest("stream_options", f"must be an object, got {show(options)}")
    usage, running = (
        _flag((options or {}).get(name), f"stream_options.{name}")
        for name in ("include_usage", "continuous_usage_stats")
    )
    rid = body.get("rid")
    made = rid if type(rid) is str else f"{'chatcmpl' if chat else 'cmpl'}-{make_rid()}"
    return body, Wanted(chat, named or model, stream, usage, running, False, names_of(body, chat), made)


def _generate(body: Mapping[str, Any], wanted: Wanted) -> dict[str, Any]:
    """Begin the `/generate` body with what both endpoints share."""
    rid = body.get("rid")
    return {
        "stream": wanted.stream,
        "sampling_params": _sampling(body),
        "rid": wanted.id if rid is None else rid,
    }


def template_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a chat's template gets besides messages and tools. Raises BadRequest."""
    more = body.get("chat_template_kwargs") or {}
    if type(more) is not dict or any(name in RESERVED for name in more):
        raise BadRequest(
            "chat_template_kwargs", f"must be an object without {', '.join(RESERVED)}, got {show(more)}"
        )
    if (effort := body.get("reasoning_effort")) is None:
        return more
    if type(effort) is not str:
        raise BadRequest("reasoning_effort", f"must be a string, got {show(effort)}")
    return {"reasoning_effort": effort, **more}


def _flag(value: Any, field: str) -> bool:
    return value is not None and boolean(value, field)


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    params = {ours: body[theirs] for theirs, ours in SAMPLING.items() if body.get(theirs) is not None}
    for name in ("max_tokens", "max_completion_tokens"):  # the newer name counts
        if body.get(name) is not None:
            params["max_new_tokens"] = body[name]
    _response_format(body.get("response_format"), params)
    return params


def _must_be_text(body: Mapping[str, Any]) -> None:
    """Refuse what asks a chat for another kind of answer than text: it would get text all the same."""
    modalities = body.get("modalities")
    if modalities is not None and modalities != ["text"]:
        raise BadRequest("modalities", f'must be ["text"], got {show(modalities)}')
    if (asked := body.get("add_generation_prompt")) is not None and asked is not True:
        raise BadRequest("add_generation_prompt", f"must be true, got {show(asked)}: the model speaks next")
    for name in ("echo", "add_special_tokens"):
        if (asked := body.get(name)) is not None and asked is not False:
            raise BadRequest(name, f"must be false, got {show(asked)}: a chat's prompt is its template's")
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools is not None and not (type(tools) is list and all(type(one) is dict for one in tools)):
        raise BadRequest("tools", f"must be a list of objects, got {show(tools)}")
    if choice not in (None, "none", "auto"):
        raise BadRequest(
            "tool_choice",
            f"must be none or auto, got {show(choice)}: tools are shown to the model, and what it writes is "
            "the answer's text; no call can be had from it by force",
        )


def _logprobs(count: Any, field: str) -> dict[str, Any]:
    if type(count) is not int or not 0 <= count <= MAX_LOGPROBS:
        raise BadRequest(field, f"must be an integer in [0, {MAX_LOGPROBS}], got {show(count)}")
    return {"return_logprob": True, "top_logprobs_num": count, "return_text_in_logprobs": True}


def _response_format(value: Any, params: dict[str, Any]) -> None:
    if value is None:
        return
    kind = value.get("type") if type(value) is dict else None
    if kind == "text":
        return
    if "json_schema" in params or "structural_tag" in params:
        raise BadRequest("response_format", "says itself what the answer is like: leave out the other field")
    if kind == "json_object":
        params["json_schema"] = '{"type": "object"}'
    elif kind == "json_schema" and type(value.get("json_schema")) is dict:
        params["json_schema"] = _schema(value["json_schema"].get("schema"))
    elif kind == "structural_tag":
        params["structural_tag"] = _json(value, "response_format")
    else:
        raise BadRequest(
            "response_format",
            "must have type text, json_object, structural_tag, or json_schema with a json_schema, "
            f"got {show(value)}",
        )


def _schema(value: Any) -> str:
    field = "response_format.json_schema.schema"
    if value is None:
        return "{}"  # any JSON
    if type(value) not in (dict, bool):
        raise BadRequest(field, f"must be a JSON schema, which is an object, got {show(value)}")
    return _json(value, field)


def _json(value: Any, field: str) -> str:
    try:
        return _encode(value).decode()
    except (ValueError, OverflowError, RecursionError) as error:
        raise BadRequest(field, f"cannot be written as JSON again: {error}") from None
