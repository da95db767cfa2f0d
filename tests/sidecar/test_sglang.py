"""SGLang's scheduler on a port: what it is given, what becomes of its batches, and what it outlives.

The test plays SGLang's scheduler, a gateway and a shard.
"""

import math
import time
from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from outfeed.ingress.sampling import SamplingParams
from outfeed.ring.batch import Batch, decode_batch
from outfeed.ring.board import Phase
from outfeed.ring.frames import (
    Abort,
    Control,
    ErrorFrame,
    Generate,
    LogprobOptions,
    Result,
    Tag,
    decode,
    encode,
)
from outfeed.ring.instance import Instance
from outfeed.ring.names import BadInstanceName
from outfeed.ring.route import make_route
from outfeed.sidecar import Kind, SchedulerPort, sglang
from outfeed.sidecar.sglang import SGLangServer

from tests.eventually import until
from tests.instances import small_config

from . import sglang_types
from .conftest import Bench

A, B, C = make_route(0, 0, 1, 1), make_route(0, 0, 2, 1), make_route(1, 0, 1, 1)
LENGTH = {"type": "length", "length": 1}


@pytest.fixture
def ranks() -> int:
    return 1


@pytest.fixture(autouse=True)
def types(monkeypatch: pytest.MonkeyPatch) -> None:
    sglang_types.provide(monkeypatch)


def scheduler(**more: Any) -> Any:
    """A scheduler of SGLang's, as far as it is asked."""
    args = {"dp_size": 1, "disaggregation_mode": "null"}
    fields = {"is_generation": True, "model_config": SimpleNamespace(context_len=1 << 30)} | more
    args |= {name: fields.pop(name) for name in args if name in fields}
    return SimpleNamespace(server_args=SimpleNamespace(**args), **fields)


def launch(instance: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> SGLangServer:
    monkeypatch.setenv(sglang.INSTANCE, instance)
    monkeypatch.setattr(sglang, "LOOK_EVERY_S", 0.0)
    return SGLangServer.launch(scheduler(**more))


@pytest.fixture
def server(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[SGLangServer]:
    server = launch(bench.name, monkeypatch)
    yield server
    if server._port is not None:
        server._port.close()


def generate(route: int, rid: str = "r", logprobs: LogprobOptions | None = None, **params: Any) -> Generate:
    sampling = SamplingParams.parse(params, vocab_size=1000).to_scheduler()
    return Generate(route, rid, array("i", [1, 2, 3]).tobytes(), sampling, logprobs or LogprobOptions())


def received(bench: Bench, server: SGLangServer, *routes: int) -> list[str]:
    """Send requests, and return what SGLang calls them."""
    bench.send(*(generate(route) for route in routes))
    return [request.rid for request in server.drain(0)]


def frames(bench: Bench) -> list[Any]:
    """Return what the shard reads; a BATCH decoded."""
    found = [
        decode_batch(body) if tag == Tag.BATCH else decode(tag, body) for _, tag, body in bench.shard.read()
    ]
    bench.shard.release()
    return found


def step(bench: Bench) -> Batch:
    (found,) = frames(bench)
    assert isinstance(found, Batch)
    return found


def push(server: SGLangServer, rids: list[str], ids: list[list[int]], *reasons: Any, **more: Any) -> None:
    server.push_generation(sglang_types.batch(rids, ids, list(reasons), **more), {})


# -- the plugin


@pytest.mark.parametrize(("named", "rust", "hooks"), [(False, True, 0), (True, False, 0), (True, True, 1)])
def test_sglang_is_left_alone_unless_an_instance_is_named(
    named: bool,
    rust: bool,
    hooks: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from sglang.srt.environ import envs
    from sglang.srt.plugins.hook_registry import HookRegistry

    registered: list[tuple[str, Callable[..., Any], Any]] = []
    monkeypatch.setattr(HookRegistry, "register", lambda *hook: registered.append(hook))
    monkeypatch.setattr(envs.SGLANG_RUST_SERVER, "get", lambda: rust)
    monkeypatch.delenv(sglang.INSTANCE, raising=False)
    if named:
        monkeypatch.setenv(sglang.INSTANCE, "mine")
    sglang.register()
    assert len(registered) == hooks
    if hooks:
        target, hook, kind = registered[0]
        assert target == "sglang.srt.managers.scheduler.Scheduler.get_rust_server_class"
        assert kind.value == "replace"
        assert hook(object()) is SGLangServer
    assert ("set SGLANG_RUST_SERVER=1" in caplog.text) == (named and not rust)


@pytest.mark.skipif(not sglang_types.INSTALLED, reason="SGLang is not installed")
def test_sglang_has_what_the_plugin_replaces() -> None:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.rust_server.server import RustServer

    assert callable(Scheduler.get_rust_server_class)
    ours = {name for name in dir(SGLangServer) if not name.startswith("_")}
    assert {"launch", "drain", "wait_request", "push_generation", "push_abort", "push_control_output"} <= ours
    assert ours - {"startup_time"} <= set(dir(RustServer)), "SGLang calls all of them"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"dp_size": 2}, "does not serve --dp-size 2"),
        ({"disaggregation_mode": "prefill"}, "does not serve --disaggregation-mode prefill"),
        ({"is_generation": False}, "does not serve --is-embedding"),
    ],
)
def test_a_scheduler_that_cannot_be_served_is_refused_at_its_start(
    more: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=message):
        launch("mine", monkeypatch, **more)


def test_a_name_that_no_instance_can_have_is_refused_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInstanceName, match="'No such'"):
        launch("No such", monkeypatch)


def test_an_engine_that_holds_less_than_the_instance_allows_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = launch(bench.name, monkeypatch, model_config=SimpleNamespace(context_len=100))
    assert "start the instance with --context-length 100" in caplog.text
    assert server._port is not None
    server._port.close()


# -- requests


def test_a_request_comes_as_sglangs_own_message(bench: Bench, server: SGLangServer) -> None:
    logprobs = LogprobOptions(True, 3, [5, 7], 0, return_hidden_states=True)
    params = {"stop": ["END", "\n"], "stop_regex": r"\d{3}", "stop_token_ids": [4, 9], "temperature": 0}
    bench.send(generate(A, "a", logprobs, **params), generate(B, "b", max_new_tokens=None))
    first, second = server.drain(0)
    assert isinstance(first.input_ids, array)
    assert (first.input_ids.typecode, first.input_ids.tolist()) == ("q", [1, 2, 3])
    sampling = first.sampling_params
    assert (sampling.stop_strs, sampling.stop_regex_strs, sampling.stop_token_ids) == (
        ["END", "\n"],
        [r"\d{3}"],
        {4, 9},
    )
    assert (sampling.temperature, sampling.top_k, sampling.max_new_tokens) == (1.0, 1, 128)
    assert (sampling.stop_str_max_len, sampling.stop_regex_max_len, sampling.is_normalized) == (3, 3, True)
    assert (first.return_logprob, first.top_logprobs_num, first.token_ids_logprob) == (True, 3, [5, 7])
    assert (first.logprob_start_len, first.return_hidden_states, first.stream) == (0, True, True)
    assert (second.sampling_params.max_new_tokens, second.sampling_params.stop_token_ids) == (None, None)
    assert (second.return_logprob, second.logprob_start_len, second.token_ids_logprob) == (False, -1, None)


def test_a_release_with_other_fields_costs_the_requests_and_not_the_scheduler(
    bench: Bench, server: SGLangServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.managers import io_struct

    def other(**fields: Any) -> None:
        raise TypeError("Unexpected keyword argument 'input_ids'")

    with monkeypatch.context() as context:
        context.setattr(io_struct, "TokenizedGenerateReqInput", other)
        bench.send(generate(A))
        assert server.drain(0) == []
    (error,) = frames(bench)
    assert (error.route, error.status, error.type) == (A, 500, "not_taken")
    assert "Unexpected keyword argument 'input_ids'" in error.message
    assert (server._routes, server._names) == ({}, {})
    assert len(received(bench, server, B)) == 1


def test_no_name_is_the_beginning_of_another_nor_of_a_health_check(
    bench: Bench, server: SGLangServer
) -> None:
    """SGLang aborts whatever begins with the name it is given, and drops health checks when it is busy."""
    bench.send(generate(A, ""), generate(B, "HEALTH_CHECK_1"))
    bench.other.write(Tag.GENERATE, encode(generate(C, "")))
    names = [request.rid for request in server.drain(0)]
    assert len(names) == 3
    for name in names:
        assert not name.startswith("HEALTH")
        assert [other for other in names if other.startswith(name)] == [name]


def test_a_client_that_goes_away_is_aborted_once(bench: Bench, server: SGLangServer) -> None:
    a, b = received(bench, server, A, B)
    bench.send(Abort(A), Abort(A))
    assert [(type(message).__name__, message.rid) for message in server.drain(0)] == [("AbortReq", a)]
    push(server, [a], [[5]])
    assert frames(bench) == [], "a late batch of nobody's is not handed over"
    push(server, [a, b], [[5], [6]])
    batch = step(bench)
    assert (batch.routes.tolist(), batch.ids.tolist()) == ([B], [6])


def test_at_most_so_many_come_at_once_as_sglang_asks_for(bench: Bench, server: SGLangServer) -> None:
    bench.send(*(generate(make_route(0, 0, slot, 1)) for slot in range(5)))
    assert [len(server.drain(2)) for _ in range(4)] == [2, 2, 1, 0]


# -- batches


def test_a_batch_becomes_a_step(bench: Bench, server: SGLangServer) -> None:
    a, b = received(bench, server, A, B)
    push(server, [b, a], [[7, 8], [9]], None, LENGTH)
    batch = step(bench)
    assert (batch.routes.tolist(), batch.ids.tolist(), batch.counts.tolist()) == ([B, A], [7, 8, 9], [2, 1])
    assert [(row, reason.to_json()) for row, reason in batch.finishes] == [(1, LENGTH)]
    push(server, [b, a], [[1], [2]])
    batch = step(bench)
    assert (batch.routes.tolist(), batch.first.tolist()) == ([B], [2]), "who has ended has no more rows"


def test_a_batch_of_nobody_is_none(bench: Bench, server: SGLangServer) -> None:
    push(server, [], [])
    push(server, ["never"], [[1]])
    assert frames(bench) == []


def test_log_probabilities_and_hidden_states_are_those_of_their_rows(
    bench: Bench, server: SGLangServer
) -> None:
    names = received(bench, server, A, B)
    push(
        server,
        names,
        [[5], [6, 7]],
        output_token_logprobs_val=[[], [-0.5, -0.25]],
        output_token_logprobs_idx=[[], [6, 7]],
        input_token_logprobs_val=[[], [None, -1.0]],
        input_token_logprobs_idx=[[], [1, 2]],
        output_top_logprobs_val=[[], [[-0.5, -2.0], [-0.25, -3.0]]],
        output_top_logprobs_idx=[[], [[6, 1], [7, 2]]],
        input_top_logprobs_val=[[], [None, [-1.0, -1.5]]],
        input_top_logprobs_idx=[[], [None, [2, 3]]],
        output_token_ids_logprobs_val=[[], [[-4.0], [-5.0]]],
        output_token_ids_logprobs_idx=[[], [[11], [11]]],
        input_token_ids_logprobs_val=[[], []],
        input_token_ids_logprobs_idx=[[], []],
        # A prompt's states are one entry, each token's another.
        output_hidden_states=[None, [[[1.0, 2.0], [3.0, 4.0]], [5.0, 6.0]]],
    )
    batch = step(bench)
    found = dict(zip(Kind, batch.families, strict=True))
    assert {kind for kind, family in found.items() if family is not None} == set(Kind) - {
        Kind.INPUT_IDS_LOGPROBS
    }
    for family in found.values():
        assert family is None or family.rows.tolist() == [1]

    def columns(kind: Kind) -> tuple[list[float], list[int], list[int]]:
        family = found[kind]
        assert family is not None
        lengths = [] if family.lengths is None else family.lengths.tolist()
        ids = [] if family.ids is None else family.ids.tolist()
        return family.values.tolist(), ids, lengths

    assert columns(Kind.OUTPUT_LOGPROBS) == ([-0.5, -0.25], [6, 7], [])
    values, ids, _ = columns(Kind.INPUT_LOGPROBS)
    assert (math.isnan(values[0]), values[1], ids) == (True, -1.0, [1, 2])
    assert columns(Kind.OUTPUT_TOP_LOGPROBS) == ([-0.5, -2.0, -0.25, -3.0], [6, 1, 7, 2], [2, 2])
    assert columns(Kind.INPUT_TOP_LOGPROBS) == ([-1.0, -1.5], [2, 3], [0, 2])
    assert columns(Kind.OUTPUT_IDS_LOGPROBS) == ([-4.0, -5.0], [11, 11], [1, 1])
    hidden = found[Kind.HIDDEN_STATES]
    assert hidden is not None
    assert (hidden.width, hidden.values.tolist()) == (2, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def test_columns_go_with_their_rows_when_others_are_left_out(bench: Bench, server: SGLangServer) -> None:
    a, b = received(bench, server, A, B)
    bench.send(Abort(A))
    server.drain(0)
    columns = {
        "output_token_logprobs_val": [[-9.0], [-0.5]],
        "output_token_logprobs_idx": [[9], [6]],
        "output_hidden_states": [[1.0, 2.0], [3.0, 4.0]],  # the last one alone
    }
    push(server, [a, b], [[5], [6]], **columns)
    batch = step(bench)
    logprobs, hidden = batch.families[Kind.OUTPUT_LOGPROBS], batch.families[Kind.HIDDEN_STATES]
    assert logprobs is not None
    assert hidden is not None
    assert (batch.routes.tolist(), logprobs.rows.tolist(), logprobs.values.tolist()) == ([B], [0], [-0.5])
    assert hidden.values.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_a_row_that_cannot_be_handed_over_ends_and_the_others_do_not(
    bad: int, bench: Bench, server: SGLangServer
) -> None:
    routes = [make_route(0, 0, slot, 1) for slot in range(4)]
    names = received(bench, server, *routes)
    reasons: list[Any] = [None] * 4
    reasons[bad] = {"type": "stop", "matched": b"no JSON"}
    push(server, names, [[slot] for slot in range(4)], *reasons)
    found = frames(bench)
    handed_over = [route for one in found if isinstance(one, Batch) for route in one.routes.tolist()]
    assert handed_over == [route for route in routes if route != routes[bad]]
    (error,) = [one for one in found if isinstance(one, ErrorFrame)]
    assert (error.route, error.status, error.type) == (routes[bad], 500, "not_handed_over")
    assert [message.rid for message in server.drain(0)] == [names[bad]], "SGLang is to stop it"
    assert server.drain(0) == []


def test_a_step_that_fits_no_frame_is_cut(bench: Bench, server: SGLangServer) -> None:
    routes = [make_route(0, 0, slot, 1) for slot in range(4)]
    names = received(bench, server, *routes)
    large = [[slot] * 2500 for slot in range(4)]  # 40 KB in all; a frame has a quarter of 64 KiB
    push(server, names, large)
    found = frames(bench)
    assert len(found) > 1
    assert [route for batch in found for route in batch.routes.tolist()] == routes
    assert np.concatenate([batch.ids for batch in found]).tolist() == np.concatenate(large).tolist()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, {"type": "abort", "message": "the engine ended it before it ran"}),
        ({"abort_message": "queue is full"}, {"type": "abort", "message": "queue is full"}),
        ({"finished_reason": {"type": "abort", "status_code": 503}}, {"type": "abort", "status_code": 503}),
    ],
)
def test_what_sglang_ends_outside_a_batch_ends(
    fields: dict[str, Any], reason: dict[str, Any], bench: Bench, server: SGLangServer
) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    (a,) = received(bench, server, A)
    for name in (a, a, "never"):  # twice is once
        server.push_abort(AbortReq(rid=name, **fields), None)
    batch = step(bench)
    assert (batch.routes.tolist(), batch.ids.tolist()) == ([A], [])
    assert [(row, found.to_json()) for row, found in batch.finishes] == [(0, reason)]


def test_an_end_that_has_no_json_form_is_an_error(bench: Bench, server: SGLangServer) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    (a,) = received(bench, server, A)
    server.push_abort(AbortReq(rid=a, finished_reason={"type": "abort", "message": b"no JSON"}), None)
    (error,) = frames(bench)
    assert (type(error), error.route, error.status) == (ErrorFrame, A, 500)


# -- operations


def test_sglang_carries_out_an_operation_and_answers(bench: Bench, server: SGLangServer) -> None:
    from sglang.srt.managers.io_struct import FlushCacheReqOutput

    bench.send(Control(A, "x", "flush_cache"), Control(B, "y", "internal_state"))
    flush, state = server.drain(0)
    assert [type(one).__name__ for one in (flush, state)] == ["FlushCacheReqInput", "GetInternalStateReq"]
    server.push_control_output(state, {"path": object})
    server.push_control_output(flush, FlushCacheReqOutput(success=True, message="done"))
    server.push_control_output(flush, FlushCacheReqOutput(success=False))  # it has its answer
    first, second = frames(bench)
    assert isinstance(first, Result)
    assert isinstance(second, Result)
    assert (first.route, msgspec.json.decode(first.body)) == (B, {"path": str(object)})
    assert (second.route, msgspec.json.decode(second.body)) == (A, {"success": True, "message": "done"})


def test_an_answer_that_fits_no_frame_is_an_error(bench: Bench, server: SGLangServer) -> None:
    bench.send(Control(A, "x", "internal_state"))
    (state,) = server.drain(0)
    server.push_control_output(state, {"large": "x" * (1 << 16)})
    (error,) = frames(bench)
    assert (type(error), error.route, error.status) == (ErrorFrame, A, 500)


def test_health_and_what_is_unknown_are_answered_at_once(bench: Bench, server: SGLangServer) -> None:
    bench.send(Control(A, "x", "health"), Control(B, "y", "explode"))
    assert server.drain(0) == []
    health, unknown = frames(bench)
    assert isinstance(health, Result)
    assert health.route == A
    assert isinstance(unknown, ErrorFrame)
    assert (unknown.route, unknown.status) == (B, 400)
    assert "this scheduler has flush_cache, health, internal_state" in unknown.message


# -- the instance


def test_a_scheduler_outlives_its_instance_and_serves_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = small_config("outlives", shards=1, readers=1, slots=64)
    server = launch(config.instance, monkeypatch)
    assert server.drain(0) == []
    assert caplog.text.count("not attached to instance") == 1, "said once"
    for rid in ("first", "next"):
        instance = Instance.create(config)
        with instance.request() as request, request.writer(0) as gateway:
            until("the scheduler to attach", lambda: server.drain(0) == [] and server._port is not None)
            gateway.write(Tag.GENERATE, encode(generate(A, rid)))
            (name,) = (request.rid for request in server.drain(0))
            assert name.endswith(f":{rid}")
        instance.board.phase = Phase.STOPPING
        (abort,) = until("the scheduler to see that its instance has ended", lambda: server.drain(0))
        assert (type(abort).__name__, abort.rid) == ("AbortReq", name), "nobody waits for it"
        push(server, [name], [[1]])
        server.push_abort(abort, None)
        assert server.drain(0) == []
        assert server._port is None, "an instance that is being stopped is not attached to again"
        assert (server._routes, server._names) == ({}, {})
        stopping = [line for line in caplog.messages if "it is being stopped" in line]
        assert len(stopping) == ("first", "next").index(rid) + 1, "said once each time"
        instance.remove()
        instance.close()


def test_it_sleeps_at_its_port_and_without_one_until_it_looks_again(
    bench: Bench, server: SGLangServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    with monkeypatch.context() as context:
        context.setattr(SchedulerPort, "wait", lambda port, seconds: slept.append(seconds))
        server.wait_request(20)
    missing = launch(small_config("missing").instance, monkeypatch)
    monkeypatch.setattr(sglang, "LOOK_EVERY_S", 0.5)
    monkeypatch.setattr(time, "sleep", slept.append)
    missing.wait_request(100)
    missing.wait_request(60_000)
    assert slept == [0.02, 0.1, 0.5]


def test_a_ring_that_stays_full_costs_the_requests_and_not_the_scheduler(
    bench: Bench, server: SGLangServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sglang, "PUSH_WAIT_S", 0.01)
    (a,) = received(bench, server, A)
    for _ in range(100):  # nobody reads the step ring
        push(server, [a], [[1] * 1000])
        if server._port is None:
            break
    assert "no room" in caplog.text
    frames(bench)
    abort, again = until("the scheduler to attach again", lambda: server.drain(0))
    assert (type(abort).__name__, abort.rid) == ("AbortReq", a)
    assert again.rid == a, "it comes once more, and after the end of what it was"


def test_what_came_with_what_made_it_leave_is_aborted_at_once(
    bench: Bench, server: SGLangServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "PUSH_WAIT_S", 0.01)
    (a,) = received(bench, server, A)
    assert server._port is not None
    for _ in range(4):
        server._port.push_tokens([A], [1] * 3900, [3900])  # nobody reads: not even an answer has room
    bench.send(generate(B), *(Control(make_route(0, 0, slot, 1), "x", "health") for slot in range(3, 60)))
    b, *aborts = server.drain(0)
    assert server._port is None
    assert [(type(message).__name__, message.rid) for message in aborts] == [
        ("AbortReq", a),
        ("AbortReq", b.rid),
    ]


def test_nothing_is_kept_of_who_has_ended(bench: Bench, server: SGLangServer) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    a, b, c, d = received(bench, server, *(make_route(0, 0, slot, 1) for slot in range(4)))
    bench.send(Control(make_route(0, 0, 5, 1), "x", "flush_cache"), Abort(make_route(0, 0, 3, 1)))
    flush, _ = server.drain(0)
    assert (len(server._routes), len(server._names)) == (4, 4)
    push(server, [a, b], [[1], [2]], LENGTH, {"type": "stop", "matched": b"no JSON"})
    server.push_abort(AbortReq(rid=c), None)
    server.push_control_output(flush, {})
    assert d not in server._routes
    assert (server._routes, server._names) == ({}, {})


def test_an_instance_that_another_scheduler_serves_is_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with SchedulerPort.attach(bench.name):
        server = launch(bench.name, monkeypatch)
        assert server._port is None
        assert "has a live scheduler of rank 0" in caplog.text
    until("the scheduler to attach", lambda: server.drain(0) == [] and server._port is not None)
    assert server._port is not None
    server._port.close()
