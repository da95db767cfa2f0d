"""SGLang's scheduler on a port: what it takes for the server that is embedded in it.

With SGLANG_RUST_SERVER=1 SGLang (0.5.23) has no front end of its own. Its scheduler starts a server instead,
drains requests from it and pushes batches to it. `register`, a plugin of SGLang's (pyproject.toml names it),
puts this one there when OUTFEED_INSTANCE names an instance. The scheduler outlives instances: while there is
none it has no requests, and the next one of that name is attached to.

A request is named `<route>:<rid>` at SGLang: it aborts whatever begins with the name it is given, and takes
names that begin with a certain word for its health checks. No route with its colon begins another name, as a
client's rid may, by which `Requests` goes.

Must not know HTTP, nor import anything of SGLang before SGLang calls.
"""

from __future__ import annotations

import logging
import os
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from ..ring.errors import FrameTooLarge, RingError
from ..ring.frames import Abort, Control, Generate
from ..ring.names import check_instance
from .port import SchedulerPort
from .sglang_columns import families

log = logging.getLogger(__name__)

INSTANCE: Final = "OUTFEED_INSTANCE"
PUSH_WAIT_S: Final = 60.0
LOOK_EVERY_S: Final = 0.5
"""How often it looks whether the instance still runs, or is there now."""
MOST_AT_ONCE: Final = 1024
_NO_ANSWER: Final = ("rid", "http_worker_ipc")
"""What SGLang's answers have for its own front end."""
_GET_SERVER: Final = "sglang.srt.managers.scheduler.Scheduler.get_rust_server_class"


def register() -> None:
    """Say to SGLang which class to start: its entry point `sglang.srt.plugins`.

    Without OUTFEED_INSTANCE in the environment nothing is changed.
    """
    if not os.environ.get(INSTANCE):
        return
    from sglang.srt.environ import envs
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not envs.SGLANG_RUST_SERVER.get():
        log.error("%s is set, and SGLang serves by itself: set SGLANG_RUST_SERVER=1, too", INSTANCE)
        return
    HookRegistry.register(_GET_SERVER, _server_class, HookType.REPLACE)


def _server_class(scheduler: Any) -> type[SGLangServer]:
    return SGLangServer


class SGLangServer:
    """A port with the methods that SGLang's scheduler calls of its server, on the scheduler's thread."""

    def __init__(self, instance: str, context_length: int) -> None:
        self._instance = check_instance(instance)
        self._context_length = context_length
        """The engine's."""
        self._port: SchedulerPort | None = None
        self._routes: dict[str, int] = {}
        """Of each live request, by the name that SGLang has for it."""
        self._names: dict[int, str] = {}
        self._in_vain: list[str] = []
        """Those that SGLang still runs for nobody."""
        self._look_due = 0.0
        self._said = ""
        self.startup_time: Mapping[str, Any] | None = None
        """SGLang's, for its internal state."""

    @classmethod
    def launch(cls, scheduler: Any) -> SGLangServer:
        """Return the server of a scheduler's first rank, attached when the instance is there already.

        Raises:
            RuntimeError: it is a scheduler whose requests cannot come from here.
            BadInstanceName: no instance can have the name in OUTFEED_INSTANCE.
        """
        args = scheduler.server_args
        refused = {
            f"--dp-size {args.dp_size}: one instance serves one data-parallel rank": args.dp_size > 1,
            f"--disaggregation-mode {args.disaggregation_mode}": args.disaggregation_mode != "null",
            "--is-embedding, or a model that generates nothing": not scheduler.is_generation,
        }
        for what, is_so in refused.items():
            if is_so:
                raise RuntimeError(f"outfeed does not serve {what}; unset {INSTANCE} and SGLANG_RUST_SERVER")
        server = cls(os.environ[INSTANCE], scheduler.model_config.context_len)
        server._attached()
        return server

    # -- what comes in

    def drain(self, max_recv: int) -> list[Any]:
        """Return what came since the last call, as SGLang's messages.

        max_recv: of the gateways' at most so many, if it is above 0.
        """
        port = self._attached()
        # First: what is received once more, from a new attachment on, has the name it had.
        found = self._aborts()
        if port is None:
            return found
        limit = min(max_recv, MOST_AT_ONCE) if max_recv > 0 else MOST_AT_ONCE
        try:
            for message in port.recv(limit):
                found += self._message(port, message)
        except RingError as error:
            self._detach(str(error))
            found += self._aborts()
        return found

    def _aborts(self) -> list[Any]:
        found = [_abort(name) for name in self._in_vain]
        self._in_vain.clear()
        return found

    def wait_request(self, timeout_ms: int) -> None:
        """Sleep until something is there for `drain`, at most so long (and 1 s at most)."""
        port = self._attached()
        if port is None:
            time.sleep(min(timeout_ms / 1000, LOOK_EVERY_S))
            return
        try:
            port.wait(timeout_ms / 1000)
        except RingError as error:
            self._detach(str(error))

    def _message(self, port: SchedulerPort, message: Generate | Abort | Control) -> list[Any]:
        match message:
            case Generate():
                asked = self._name(message)
                try:
                    return [_generate(asked, message)]
                except TypeError as error:  # SGLang's types have other fields than the release this is for
                    log.error("SGLang does not take requests of this form: %s", error)
                    self._forget(asked)
                    why = f"the engine does not take this request: {error}; its log says the same"
                    port.push_error(message.route, 500, "not_taken", why, timeout=PUSH_WAIT_S)
            case Abort(route=route):
                name = self._names.get(route)
                if name is None:
                    return []
                self._forget(name)
                return [_abort(name)]
            case Control(route=route, op="health"):
                port.push_result(route, b'{"healthy":true}', timeout=PUSH_WAIT_S)
            case Control(route=route, op=op) if op not in _CONTROLS:
                known = ", ".join(sorted([*_CONTROLS, "health"]))
                why = f"operation {op!r} is unknown: this scheduler has {known}"
                port.push_error(route, 400, "BadRequest", why, timeout=PUSH_WAIT_S)
            case Control(op=op):
                return [_CONTROLS[op](self._name(message))]
        return []

    def _name(self, message: Generate | Control) -> str:
        name = f"{message.route:x}:{message.rid}"
        self._routes[name] = message.route
        self._names[message.route] = name
        return name

    def _forget(self, name: str) -> None:
        route = self._routes.pop(name, None)
        if route is not None:
            del self._names[route]

    # -- what goes out

    def push_generation(self, payload: Any, decode_latencies: Mapping[int, float]) -> None:
        """Hand over a batch's new tokens (its BatchTokenIDOutput); rows of who has ended are left out."""
        rids = payload.rids
        if not rids or self._port is None:
            return
        try:
            self._push(payload, range(len(rids)))
        except KeyError:
            rows = [row for row, rid in enumerate(rids) if rid in self._routes]
            if rows:
                self._push(payload, rows)

    def _push(self, payload: Any, rows: Sequence[int]) -> None:
        """Hand over these rows of a batch; those that cannot be handed over end, the others do not.

        Raises:
            KeyError: one of them is of a request that has ended; nothing was handed over.
        """
        port = self._port
        if port is None:
            return
        rids, ids, reasons = payload.rids, payload.output_ids, payload.finished_reasons
        if len(rows) < len(rids):
            rids, ids, reasons = ([column[row] for row in rows] for column in (rids, ids, reasons))
        routes = np.fromiter(map(self._routes.__getitem__, rids), np.uint64, len(rids))
        ended = {row: reason for row, reason in enumerate(reasons) if reason} if any(reasons) else {}
        try:
            port.push_tokens(
                routes,
                # Ids of a vocabulary, so there is nothing to check.
                np.frombuffer(b"".join(map(array.tobytes, ids)), np.int64).astype(np.int32),
                np.fromiter(map(len, ids), np.uint32, len(ids)),
                finishes=ended,
                families=families(payload, rows),
                timeout=PUSH_WAIT_S,
            )
        except (FrameTooLarge, ValueError) as error:
            if len(rows) == 1:
                self._fail(rids[0], str(error))
                return
            middle = len(rows) // 2
            self._push(payload, rows[:middle])
            self._push(payload, rows[middle:])
            return
        except RingError as error:
            self._detach(str(error))
            return
        for row in ended:
            self._forget(rids[row])

    def push_abort(self, abort: Any, req: Any) -> None:
        """End a request that SGLang ended outside of any batch (its AbortReq)."""
        route = self._routes.get(abort.rid)
        if route is None or self._port is None:
            return
        message = abort.abort_message or "the engine ended it before it ran"
        reason = abort.finished_reason or {"type": "abort", "message": message}
        try:
            self._port.push_tokens([route], [], [0], finishes={0: reason}, timeout=PUSH_WAIT_S)
        except ValueError as error:
            self._fail(abort.rid, str(error))
        except RingError as error:
            self._detach(str(error))
        self._forget(abort.rid)

    def push_control_output(self, recv_req: Any, output: Any) -> None:
        """Answer an operation with SGLang's own answer, as a JSON object."""
        route = self._routes.get(recv_req.rid)
        if route is None or self._port is None:
            return
        answer = msgspec.structs.asdict(output) if isinstance(output, msgspec.Struct) else output
        if isinstance(answer, dict):
            answer = {name: value for name, value in answer.items() if name not in _NO_ANSWER}
        try:
            self._port.push_result(route, msgspec.json.encode(answer, enc_hook=str), timeout=PUSH_WAIT_S)
        except FrameTooLarge as error:
            self._fail(recv_req.rid, str(error))
        except RingError as error:
            self._detach(str(error))
        self._forget(recv_req.rid)

    def push_health_ack(self) -> None:
        """Nothing: SGLang's own health checks do not come from here."""

    def set_startup_time(self, scheduler_startup_time: Mapping[str, Any]) -> None:
        """Keep what SGLang says of its start, for its internal state."""
        self.startup_time = scheduler_startup_time

    def mm_transport_stats(self) -> dict[str, int]:
        """Return none: no images come from here."""
        return {}

    def _fail(self, name: str, why: str) -> None:
        """End a request whose rows cannot be handed over, here and at SGLang."""
        log.error("ending %s: its rows cannot be handed over: %s", name, why)
        port, route = self._port, self._routes.get(name)
        self._in_vain.append(name)
        self._forget(name)
        if port is None or route is None:
            return
        try:
            port.push_error(route, 500, "not_handed_over", why, timeout=PUSH_WAIT_S)
        except RingError as error:
            self._detach(str(error))

    # -- the instance

    def _attached(self) -> SchedulerPort | None:
        """Return the port; now and then look whether its instance still runs, or is there again."""
        now = time.monotonic()
        if now >= self._look_due:
            self._look_due = now + LOOK_EVERY_S
            if self._port is not None and not self._port.alive:
                self._detach("the instance has ended")
            if self._port is None:
                self._attach()
        return self._port

    def _attach(self) -> None:
        try:
            port = SchedulerPort.attach(self._instance, timeout=0)
        except (RingError, OSError) as error:
            self._not_attached(str(error))
            return
        if not port.alive:
            port.close()
            self._not_attached("it is being stopped")
            return
        self._port = port
        self._said = ""
        log.info("attached to instance %r", self._instance)
        given, most = port.config.context_length, self._context_length
        if given > most:
            log.warning(
                "instance %r takes requests of %d tokens and the engine of %d: longer ones end with its "
                "error; start the instance with --context-length %d",
                self._instance,
                given,
                most,
                most,
            )

    def _not_attached(self, why: str) -> None:
        if why != self._said:  # once for each reason
            log.warning("not attached to instance %r: %s; it is looked for again", self._instance, why)
        self._said = why

    def _detach(self, why: str) -> None:
        """Leave the instance: whoever has a request there is told, and SGLang runs them for nobody."""
        log.error("leaving instance %r with %d requests: %s", self._instance, len(self._routes), why)
        self._in_vain += self._routes
        self._routes.clear()
        self._names.clear()
        port, self._port = self._port, None
        if port is not None:
            port.close()


def _generate(name: str, request: Generate) -> Any:
    """Return SGLang's message for a request."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    ids = array("q")
    ids.frombytes(np.frombuffer(request.input_ids, "<i4").astype(np.int64).tobytes())
    params = dict(request.sampling_params)
    params["stop_token_ids"] = set(params["stop_token_ids"] or ()) or None
    wanted = request.logprobs
    return TokenizedGenerateReqInput(
        rid=name,
        input_text=None,
        input_ids=ids,
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=SamplingParams(**params),
        return_logprob=wanted.return_logprob,
        logprob_start_len=wanted.logprob_start_len,
        top_logprobs_num=wanted.top_logprobs_num,
        token_ids_logprob=wanted.token_ids_logprob or None,
        stream=request.stream,
        return_hidden_states=wanted.return_hidden_states,
    )


def _abort(name: str) -> Any:
    from sglang.srt.managers.io_struct import AbortReq

    return AbortReq(rid=name)


def _flush_cache(name: str) -> Any:
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    return FlushCacheReqInput(rid=name)


def _internal_state(name: str) -> Any:
    from sglang.srt.managers.io_struct import GetInternalStateReq

    return GetInternalStateReq(rid=name)


_CONTROLS: Final[Mapping[str, Callable[[str], Any]]] = {
    "flush_cache": _flush_cache,
    "internal_state": _internal_state,
}
"""Operations that SGLang's scheduler answers, beside `health`, by the name that a gateway has for them."""
