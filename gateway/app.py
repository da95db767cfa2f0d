"""The endpoints: from an exchange to its answer, over a backend.

Admission is here too: the API key and the drain. Whatever goes wrong inside is logged with the request's path
and answered in the shape the endpoint's clients expect.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import unquote

import msgspec

from .. import __version__
from ..ingress.errors import BadRequest, Refused, show
from ..ingress.fields import text
from ..ingress.request import MAX_RID_CHARACTERS, decode_body
from ..sink import Error
from . import generate, openai
from .answer import Collector, Renderer, StreamAnswer, WholeAnswer
from .backend import Backend, Stream
from .chat import ChatTemplate, check_messages
from .control import PREFIX, SHOWN, control
from .exchange import Exchange
from .limits import Limits
from .metrics import CONTENT_TYPE, Metrics
from .naming import in_the_clients_words
from .openai import OpenAIStream, Usage, Wanted
from .probe import probe
from .running import Running
from .shapes import FAILED, error_json, http_status

log = logging.getLogger(__name__)

STOPPING: Final = "the server is stopping; send the request again"
MODELS: Final = "/v1/models"
MAX_ABORT_BYTES: Final = 16 << 10
"""The body of an abort, which is read where it is."""


Handling = Callable[[Exchange], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Options:
    """How the endpoints behave.

    incremental: `/generate` streams send what is new, not all so far. api_key: what clients must send as
    `Authorization: Bearer`; "" asks for none. admin_key: what `/control/OP` wants instead; without one there
    is no such endpoint.
    """

    incremental: bool = False
    api_key: str = ""
    admin_key: str = ""


class Encoded(Refused):
    """A body that would have to be unpacked first."""

    status = 415
    type = "unsupported_media_type"


class Others(Protocol):
    """The other gateways of the instance (`siblings.Siblings`)."""

    def abort(self, rid: str) -> None:
        """Have them abort the request of that rid."""

    async def states(self) -> list[bytes]:
        """Return their `Metrics.state`."""


class App:
    """The endpoints of one gateway process. `app(exchange)` answers; for the loop's thread."""

    def __init__(
        self,
        backend: Backend,
        options: Options | None = None,
        limits: Limits | None = None,
        template: ChatTemplate | None = None,
    ) -> None:
        self.backend = backend
        self.options = options or Options()
        self.limits = limits or Limits()
        self.metrics = Metrics()
        self.template = template
        self.draining = False
        self.siblings: Others | None = None
        """The other gateways of the instance, when there are any."""
        self._running = Running(self.limits.requests)
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = time.time()
        self._key = self.options.api_key.encode()
        self._admin_key = self.options.admin_key.encode()
        self._operation = ("POST", self._in_task(self._control))
        self._routes: dict[str, tuple[str, Callable[[Exchange], None]]] = {
            "/generate": ("POST", self._in_task(self._generate)),
            "/v1/completions": ("POST", self._in_task(self._completions)),
            "/v1/chat/completions": ("POST", self._in_task(self._chat)),
            MODELS: ("GET", self._models),
            "/model_info": ("GET", self._model_info),
            "/get_model_info": ("GET", self._model_info),
            "/health": ("GET", self._health),
            "/health_generate": ("GET", self._in_task(self._health_generate)),
            "/server_info": ("GET", self._server_info),
            "/abort_request": ("POST", self._abort_request),
            "/metrics": ("GET", self._in_task(self._metrics, always=True)),
        }

    @property
    def live(self) -> int:
        """Prompts being answered now."""
        return self._running.prompts

    @property
    def idle(self) -> bool:
        """Whether nothing is being answered."""
        return not self._running and not self._tasks

    def __call__(self, exchange: Exchange) -> None:
        """Answer a request."""
        request = exchange.request
        path = request.path if len(request.path) == 1 else request.path.rstrip("/")
        route = self._routes.get(path)
        if path.startswith(PREFIX) and self.options.admin_key:
            path, route = SHOWN, self._operation
        elif path.startswith(MODELS + "/"):
            path, route = MODELS, ("GET", self._model)
        method = "GET" if request.method == "HEAD" else request.method
        exchange.on_over = functools.partial(self._over, exchange, path if route else "other")
        if route is None:
            known = ", ".join([*self._routes, *([SHOWN] if self.options.admin_key else [])])
            self._fail(exchange, 404, f"there is no {show(request.path)} here; there are: {known}")
        elif method != route[0]:
            message = f"{path} takes {route[0]}, not {request.method}"
            self._fail(exchange, 405, message, headers=((b"allow", route[0].encode()),))
        elif not self._may(exchange, path):
            kind = "the admin key" if path == SHOWN else "an API key"
            message = f"this wants {kind}: send Authorization: Bearer KEY with the right one"
            self._fail(exchange, 401, message, headers=((b"www-authenticate", b"Bearer"),))
        else:
            route[1](exchange)

    def abort(self, rid: str) -> bool:
        """Abort a live request, or every one of a batch, that has this rid. False when none here has."""
        aborted = self.backend.abort(rid)
        for each in self._running.rids_of(rid):
            aborted |= self.backend.abort(each)
        return aborted

    def state(self) -> bytes:
        """Pack what this gateway has counted, for another gateway's `/metrics`."""
        return self.metrics.state(self.backend.own_readings())

    def close(self) -> None:
        """End everything that still runs with a 503, and take nothing more."""
        self.draining = True
        for task in list(self._tasks):
            task.cancel()
        self._running.fail(Error(503, "stopping", STOPPING))

    # Generation.

    async def _generate(self, exchange: Exchange) -> None:
        body = await self._body(exchange)
        with self._running.room(generate.count_prompts(body)):
            self._answer(exchange, body, await self.backend.submit(body))

    def _answer(self, exchange: Exchange, body: dict[str, Any], streams: Sequence[Stream]) -> None:
        started = exchange.started
        batch = generate.is_batch(body)
        if body.get("stream"):
            cumulative = not self.options.incremental
            kind = generate.ResponseStream if generate.wants_columns(body) else generate.GenerateStream
            renderers = [
                kind(stream.rid, started, cumulative, index if batch else None)
                for index, stream in enumerate(streams)
            ]
            self._stream(exchange, _batch_rid(body), streams, renderers)
            return
        answers = [generate.WholeResponse(stream.rid, started) for stream in streams]
        render = functools.partial(generate.render_whole, answers, batch)
        self._whole(exchange, _batch_rid(body), streams, answers, render)

    async def _completions(self, exchange: Exchange) -> None:
        body, wanted = openai.completion_body(await self._body(exchange), self.backend.name)
        with self._running.room(generate.count_prompts(body)):
            if wanted.echo is not None:
                wanted.echo = await self._prompt_texts(body)
            await self._openai(exchange, body, wanted)

    async def _chat(self, exchange: Exchange) -> None:
        body, wanted, asked = openai.chat_body(await self._body(exchange), self.backend.name)
        template = self.template
        if template is None:
            raise BadRequest(
                "",
                "this model has no chat template: none beside its tokenizer, and none given with "
                "--chat-template; use /v1/completions",
            )
        more = openai.template_arguments(asked)

        def render() -> str:
            return template.render(check_messages(asked.get("messages")), openai.shown_tools(asked), more)

        # A template writes the special tokens itself; the tokenizer must not add them once more.
        defaults = self.backend.model.defaults
        # Where nobody says how long a chat's answer may be, it ends where the model ends it.
        params = body["sampling_params"]
        params.setdefault("max_new_tokens", defaults.get("max_new_tokens"))
        if openai.shown_tools(asked):  # by special tokens a model says where a call of one begins and ends
            params.setdefault("skip_special_tokens", defaults.get("skip_special_tokens", False))
        with self._running.room(generate.count_prompts(body)):
            prompt = await self.backend.tokenize.aside(render, len(exchange.request.body))
            (ids,) = await self.backend.tokenize.encode([prompt], "messages", special=False)
            body["input_ids"], wanted.prompt_tokens = ids, len(ids)
            await self._openai(exchange, body, wanted)

    async def _openai(self, exchange: Exchange, body: dict[str, Any], wanted: Wanted) -> None:
        try:
            streams = await self.backend.submit(body)
        except BadRequest as error:
            raise in_the_clients_words(error, wanted.names) from None
        wanted.token_bytes = self.backend.token_bytes
        if {**self.backend.model.defaults, **body["sampling_params"]}.get("skip_special_tokens") is not False:
            wanted.skipped = self.backend.is_special
        batch = wanted.id if generate.is_batch(body) else None  # also where each prompt has a rid of its own
        if not wanted.stream:
            choices = [openai.ChoiceSum(wanted, index) for index in range(len(streams))]
            self._whole(exchange, batch, streams, choices, lambda: openai.render_whole(wanted, choices))
            return
        usage = Usage()
        renderers = [OpenAIStream(wanted, index, usage) for index in range(len(streams))]
        closing = functools.partial(openai.usage_chunk, wanted, usage) if wanted.usage else None
        self._stream(exchange, batch, streams, renderers, closing)

    async def _prompt_texts(self, body: dict[str, Any]) -> list[str]:
        """Return the prompts as text, to be echoed."""
        if "text" in body:
            return [body["text"]] if type(body["text"]) is str else list(body["text"])
        ids = body["input_ids"]
        if self.backend.model.tokenizer is None or not generate.are_ids(ids):
            raise BadRequest("echo", "needs prompts that are text, or token ids and a tokenizer")
        prompts = ids if type(ids[0]) is list else [ids]
        return await self.backend.tokenize.decode(prompts, "echo")

    async def _health_generate(self, exchange: Exchange) -> None:
        why = await probe(self.backend)
        return exchange.respond(200) if why is None else self._fail(exchange, 503, why)

    async def _control(self, exchange: Exchange) -> None:
        answer = await control(exchange.request, self.backend)
        exchange.respond(200, answer, b"application/octet-stream")

    # The rest.

    def _models(self, exchange: Exchange) -> None:
        models = {"object": "list", "data": [self._describe()]}
        exchange.respond(200, msgspec.json.encode(models))

    def _model(self, exchange: Exchange) -> None:
        asked, name = unquote(exchange.request.path.removeprefix(MODELS + "/")), self.backend.name
        if asked == name:
            exchange.respond(200, msgspec.json.encode(self._describe()))
        else:
            self._fail(exchange, 404, f"there is no model {show(asked)} here; there is {show(name)}")

    def _describe(self) -> dict[str, Any]:
        name = self.backend.name
        return {
            "id": name,
            "object": "model",
            "created": int(self._started),
            "owned_by": "outfeed",
            "root": name,
            "parent": None,
            "max_model_len": self.backend.model.context_length,
        }

    def _model_info(self, exchange: Exchange) -> None:
        name = self.backend.name
        info = {"model_path": name, "served_model_name": name, "is_generation": True}
        exchange.respond(200, msgspec.json.encode(info))

    def _health(self, exchange: Exchange) -> None:
        why = "the gateway is draining" if self.draining else self.backend.trouble()
        if why is None:
            exchange.respond(200)
        else:
            self._fail(exchange, 503, f"not healthy: {why}")

    def _server_info(self, exchange: Exchange) -> None:
        info = {
            "version": __version__,
            "model": self.backend.name,
            "context_length": self.backend.model.context_length,
            "vocab_size": self.backend.model.vocab_size,
            "incremental": self.options.incremental,
            "chat": self.template is not None,
            "draining": self.draining,
            "live": self.live,
            "limits": msgspec.to_builtins(self.limits),
            **self.backend.info(),
        }
        exchange.respond(200, msgspec.json.encode(info))

    def _abort_request(self, exchange: Exchange) -> None:
        try:
            body = decode_body(exchange.request.body, max_bytes=MAX_ABORT_BYTES)
            rid = body.get("rid") if type(body) is dict else None
            if type(body) is dict and body.get("abort_all"):
                raise BadRequest("abort_all", "is not taken here: a client ends its own requests, by rid")
            if type(rid) is not str or not 0 < len(rid) <= MAX_RID_CHARACTERS:
                raise BadRequest(
                    "rid", f"must be a string of 1 to {MAX_RID_CHARACTERS} characters, got {show(rid)}"
                )
            text(rid, "rid")
        except Refused as error:
            return self._fail(exchange, error.status, error.message)
        aborted = self.abort(rid)
        if not aborted and self.siblings is not None:
            self.siblings.abort(rid)
        return exchange.respond(200, msgspec.json.encode({"rid": rid, "aborted_here": aborted}))

    async def _metrics(self, exchange: Exchange) -> None:
        states = [] if self.siblings is None else await self.siblings.states()
        total = Metrics()
        for state in (self.state(), *states):
            try:
                total.add(state)
            except ValueError as error:
                log.warning("another gateway's counts are left out: %s", error)
        exchange.respond(200, total.text(self.backend.readings()).encode(), CONTENT_TYPE)

    # What they share.

    def _in_task(self, handler: Handling, always: bool = False) -> Callable[[Exchange], None]:
        """Run a handler in a task of its own, which ends when the client goes; `always`: in a drain too."""

        def start(exchange: Exchange) -> None:
            if self.draining and not always:
                message = "the server is draining: it finishes what runs and takes nothing new; try another"
                exchange.request.keep_alive = False
                return self._fail(exchange, 503, message)
            task = asyncio.get_running_loop().create_task(self._run(handler, exchange))

            def ended(_: object) -> None:
                self._tasks.discard(task)
                # By `close`, perhaps before it had begun; a client that is gone gets nothing.
                if task.cancelled():
                    self._fail(exchange, 503, STOPPING)

            exchange.on_gone = task.cancel
            self._tasks.add(task)
            task.add_done_callback(ended)
            return None

        return start

    async def _run(self, handler: Handling, exchange: Exchange) -> None:
        try:
            try:
                await handler(exchange)
            except Refused as error:
                self._refuse(exchange, error)
            except Exception:
                log.exception("%s failed", exchange.request.path)
                if exchange.status:
                    exchange.cut()  # its answer has begun: another one cannot follow it
                else:
                    self._fail(exchange, 500, FAILED)
        except Exception:
            # Not even the refusal could be said. No answer would leave the client waiting for ever.
            log.exception("%s could not be answered", exchange.request.path)
            exchange.cut()

    def _over(self, exchange: Exchange, endpoint: str, status: int) -> None:
        self.metrics.answered(endpoint, status)
        self.metrics.disconnects += exchange.gone

    def _may(self, exchange: Exchange, path: str) -> bool:
        if path != SHOWN and (not self.options.api_key or path == "/health"):
            return True
        scheme, _, key = exchange.request.headers.get(b"authorization", b"").partition(b" ")
        expected = self._admin_key if path == SHOWN else self._key
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(b" "), expected)

    async def _body(self, exchange: Exchange) -> Any:
        if exchange.request.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise Encoded("a body is read as it is here; send it without a Content-Encoding")
        return await self.backend.tokenize.read(exchange.request.body, self.limits.body_bytes)

    def _stream(
        self,
        exchange: Exchange,
        batch: str | None,
        streams: Sequence[Stream],
        renderers: Sequence[Renderer],
        closing: Callable[[], bytes] | None = None,
    ) -> None:
        most, ended = self.limits.answer_bytes, self._running.ended
        answer = StreamAnswer(exchange, streams, self.metrics, ended, renderers, most, closing)
        self._running.start(answer, batch)

    def _whole(
        self,
        exchange: Exchange,
        batch: str | None,
        streams: Sequence[Stream],
        collectors: Sequence[Collector],
        render: Callable[[], bytes],
    ) -> None:
        most, ended = self.limits.answer_bytes, self._running.ended
        answer = WholeAnswer(exchange, streams, self.metrics, ended, collectors, render, most)
        self._running.start(answer, batch)

    def _refuse(self, exchange: Exchange, error: Refused) -> None:
        param = None
        if isinstance(error, BadRequest) and error.field:
            param = error.field.removeprefix("sampling_params.")
        self._fail(exchange, http_status(error.status), error.message, param)

    def _fail(
        self,
        exchange: Exchange,
        status: int,
        message: str,
        param: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        exchange.respond(status, error_json(status, message, exchange.openai, param=param), headers=headers)


def _batch_rid(body: dict[str, Any]) -> str | None:
    """Return the one rid that a client gave to several prompts, if it did."""
    rid = body.get("rid")
    return rid if type(rid) is str and generate.is_batch(body) else None
