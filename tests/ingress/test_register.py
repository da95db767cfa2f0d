"""A request's way onto the rings: in order, or not at all."""

import threading
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
from outfeed.ingress import register as register_module
from outfeed.ingress.errors import BadRequest, RidInUse, TicketClosed, Unavailable
from outfeed.ingress.register import ATTACH_WAIT_S, Ingress
from outfeed.ingress.request import Model, Ready, parse_generate, ready
from outfeed.ingress.routes import RouteTable
from outfeed.ring import Consumer, Doorbell, LaneWriter, Ring
from outfeed.ring.errors import FrameTooLarge, RingFull
from outfeed.ring.frames import (
    Attach,
    Control,
    Forget,
    Generate,
    Register,
    Restored,
    Tag,
    decode,
    encode,
)

from tests.instances import unique


class NoTokenizer:
    def encode(self, sequence: str, /) -> Any:
        raise AssertionError("these prompts are ids")


MODEL = Model(vocab_size=1000, context_length=200, tokenizer=cast(Any, NoTokenizer()))


class Lane:
    """A lane that keeps what is written to it, and is full or too small when told so."""

    def __init__(self, log: list[tuple[str, int, Any]], name: str) -> None:
        self.log, self.name = log, name
        self.error: Exception | None = None
        self.max_frame = 4096
        self.waits = 0.0

    def write(self, tag: int, /, *parts: Any, timeout: float = 0.0) -> None:
        assert timeout == self.waits
        if self.error is not None:
            raise self.error
        self.log.append((self.name, tag, decode(tag, b"".join(parts))))


class Rig:
    def __init__(self, slots: int = 4) -> None:
        self.log: list[tuple[str, int, Any]] = []
        self.control, self.request = Lane(self.log, "control"), Lane(self.log, "request")
        self.routes = RouteTable(0, 2, slots)
        self.ingress = Ingress(self.control, self.request, self.routes)

    def tags(self) -> list[tuple[str, int]]:
        return [(name, tag) for name, tag, _ in self.log]

    def nothing_stays(self) -> bool:
        return (
            self.ingress.live() == 0 and self.routes.loads() == [0, 0] and self.ingress.route_of("r") is None
        )


def prompt(rid: str = "r", **params: Any) -> Ready:
    body = {
        "input_ids": list(range(1, 81)),
        "rid": rid,
        "sampling_params": {"max_new_tokens": 9, **params},
        "stream": True,
    }
    one = parse_generate(body, MODEL).prompts[0]
    assert one.ids is not None
    return ready(one, one.ids, True, MODEL)


def batch(count: int, tokens: int = 3, rid: str = "r", **params: Any) -> list[Ready]:
    body = {
        "input_ids": [[7] * tokens] * count,
        "rid": [f"{rid}{at}" for at in range(count)],
        "sampling_params": {"max_new_tokens": 9, **params},
    }
    found = []
    for one in parse_generate(body, MODEL).prompts:
        assert one.ids is not None
        found.append(ready(one, one.ids, True, MODEL))
    return found


@pytest.mark.parametrize(
    ("params", "ring"),
    [
        ({"json_schema": "x" * 3000}, "request ring"),
        ({"custom_params": {"a": "x" * 3000}}, "request ring"),
        ({"logit_bias": {str(token): 1.0 for token in range(300)}}, "request ring"),
        ({"stop_token_ids": list(range(1000))}, "control ring"),
        ({"stop": ["x" * 3000]}, "control ring"),
    ],
)
def test_a_batch_that_the_empty_rings_could_not_hold_is_the_clients_fault(
    params: dict[str, Any], ring: str
) -> None:
    rig = Rig(slots=100)
    rig.ingress.must_fit(batch(2, **params))
    rig.request.max_frame = 4096 if ring == "request ring" else 1 << 20
    with pytest.raises(BadRequest, match=f"{ring} holds 16384; send fewer prompts"):
        rig.ingress.must_fit(batch(100, **params))
    assert rig.log == []
    assert rig.nothing_stays()


@pytest.fixture
def lanes() -> Iterator[tuple[list[LaneWriter], Consumer]]:
    """A control and a request lane of 16 KiB, and who reads both."""
    name = f"outfeed-{unique('register')}"
    ring = Ring.create(name, lanes=2, consumers=1, capacity=1 << 14)
    with Doorbell.create(f"{name}.bell") as bell, ring:
        yield [ring.writer(0), ring.writer(1)], ring.consumer(0, bell)
        ring.unlink()


@pytest.mark.parametrize("tokens", [1, 3, 60, 190])
@pytest.mark.parametrize("params", [{}, {"stop": ["深" * 40]}, {"json_schema": "x" * 300}])
def test_what_fits_goes_into_empty_lanes_wherever_they_stand(
    lanes: tuple[list[LaneWriter], Consumer], tokens: int, params: dict[str, Any]
) -> None:
    """And what does not would have been most of a lane."""
    writers, reader = lanes
    ingress = Ingress(writers[0], writers[1], RouteTable(0, 2, 1000))
    most = 0
    while True:
        prompts = batch(most + 1, tokens=tokens, rid="深", **params)
        try:
            ingress.must_fit(prompts)
        except BadRequest:
            break
        most += 1
    prompts = batch(most, tokens=tokens, rid="深", **params)
    for place in range(40):
        if place:
            for writer in writers:
                writer.write(0, bytes(61 * place))
        reader.read(4096)
        reader.release()
        for one in prompts:
            ingress.submit(ingress.open(one))
        used = [0, 0]
        for lane, _, body in reader.read(4096):
            used[lane] += len(body)
        reader.release()
        assert max(used) > 6000
        for one in prompts:
            ingress.end(ingress.route_of(one.rid) or 0)


@pytest.mark.parametrize("length", range(40, 56))
def test_each_of_many_small_frames_is_measured_with_all_that_it_takes(length: int) -> None:
    """A byte too few for each of hundreds is more than what is left free for the lane's end."""
    name = f"outfeed-{unique('register')}"
    ring = Ring.create(name, lanes=1, consumers=1, capacity=1 << 17)
    ring.unlink()
    with Doorbell.create(f"{name}.bell") as bell, ring:
        reader = ring.consumer(0, bell)
        request = Lane([], "request")
        request.max_frame = 1 << 30
        ingress = Ingress(ring.writer(0), request, RouteTable(0, 1, 1000))
        one = batch(1, tokens=130)[0]
        prompts = [replace(one, rid=f"{at:0{length}}") for at in range(1000)]
        most = bisect_left(range(2, 1000), True, key=lambda count: is_refused(ingress, prompts[:count])) + 1
        assert 300 < most < 400
        for one in prompts[:most]:
            ingress.submit(ingress.open(one))
        assert len(reader.read(4096)) == most


def is_refused(ingress: Ingress, prompts: list[Ready]) -> bool:
    try:
        ingress.must_fit(prompts)
    except BadRequest:
        return True
    return False


def test_a_batch_of_more_prompts_than_there_are_places_is_the_clients_fault() -> None:
    rig = Rig(slots=4)
    rig.ingress.must_fit(batch(4))
    with pytest.raises(BadRequest, match="5 prompts, and this server runs 4 at most"):
        rig.ingress.must_fit(batch(5))


def test_what_a_batch_shares_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []

    def counted(message: Any) -> bytes:
        encoded.append(message)
        return encode(message)

    monkeypatch.setattr(register_module, "encode", counted)
    rig = Rig(slots=100)
    rig.control.max_frame = rig.request.max_frame = 1 << 20
    rig.ingress.must_fit(batch(100, json_schema="x" * 3000))
    assert len(encoded) == 2


def test_register_comes_before_generate() -> None:
    rig = Rig()
    ticket = rig.ingress.open(
        prompt(stop=["END"], stop_token_ids=[7], no_stop_trim=True, top_p=0.5, min_new_tokens=3)
    )
    assert rig.log == []
    rig.ingress.submit(ticket)
    assert rig.tags() == [("control", Tag.REGISTER), ("request", Tag.GENERATE)]
    register, generate = rig.log[0][2], rig.log[1][2]
    assert isinstance(register, Register)
    assert isinstance(generate, Generate)
    assert register.route == generate.route == ticket.route
    assert register.rid == generate.rid == "r"
    assert (register.options.stop, register.options.stop_token_ids, register.options.no_stop_trim) == (
        ["END"],
        [7],
        True,
    )
    assert register.options.min_new_tokens == 3
    assert (register.prompt_tokens, len(register.prompt_tail), len(generate.input_ids)) == (80, 256, 320)
    assert generate.sampling_params["top_p"] == 0.5
    assert generate.sampling_params["stop_strs"] == ["END"]
    assert generate.stream


def test_a_rid_in_use_is_a_409_until_its_request_ends() -> None:
    rig = Rig()
    ticket = rig.ingress.open(prompt())
    with pytest.raises(RidInUse) as caught:
        rig.ingress.open(prompt())
    assert caught.value.status == 409
    assert rig.routes.loads() in ([1, 0], [0, 1])
    rig.ingress.submit(ticket)
    rig.ingress.end(ticket.route)
    assert rig.tags()[-1] == ("control", Tag.FORGET)
    again = rig.ingress.open(prompt())
    assert again.route != ticket.route
    assert rig.ingress.route_of("r") == again.route


def test_a_full_control_ring_is_a_503_and_nothing_was_written() -> None:
    rig = Rig()
    rig.control.error = RingFull("full")
    with pytest.raises(Unavailable) as caught:
        rig.ingress.submit(rig.ingress.open(prompt()))
    assert caught.value.status == 503
    assert rig.log == []
    assert rig.nothing_stays()


def test_a_full_request_ring_is_a_503_and_the_shard_forgets() -> None:
    rig = Rig()
    rig.request.error = RingFull("full")
    ticket = rig.ingress.open(prompt())
    with pytest.raises(Unavailable):
        rig.ingress.submit(ticket)
    assert rig.tags() == [("control", Tag.REGISTER), ("control", Tag.FORGET)]
    assert rig.log[1][2] == Forget(ticket.route)
    assert rig.nothing_stays()


def test_a_prompt_larger_than_a_frame_is_a_400() -> None:
    rig = Rig()
    rig.request.error = FrameTooLarge("320 bytes, at most 64")
    with pytest.raises(BadRequest):
        rig.ingress.submit(rig.ingress.open(prompt()))
    assert rig.nothing_stays()


def test_a_forget_that_finds_the_ring_full_is_sent_later_and_before_any_register() -> None:
    rig = Rig()
    ticket = rig.ingress.open(prompt("a"))
    rig.ingress.submit(ticket)
    rig.control.error = RingFull("full")
    rig.ingress.end(ticket.route)
    assert rig.ingress.live() == 0
    with pytest.raises(Unavailable, match="behind"):
        rig.ingress.submit(rig.ingress.open(prompt("b")))
    assert (rig.ingress.live(), rig.ingress.route_of("b"), rig.routes.loads()) == (0, None, [0, 0])
    rig.control.error = None
    rig.ingress.submit(rig.ingress.open(prompt("c")))
    assert rig.tags()[2:] == [("control", Tag.FORGET), ("control", Tag.REGISTER), ("request", Tag.GENERATE)]
    assert rig.log[2][2] == Forget(ticket.route)


def test_ending_twice_or_an_unknown_route_changes_nothing() -> None:
    rig = Rig()
    ticket = rig.ingress.open(prompt())
    rig.ingress.submit(ticket)
    rig.ingress.end(ticket.route)
    rig.ingress.end(ticket.route)
    rig.ingress.end(12345)
    assert len(rig.log) == 3
    with pytest.raises(ValueError, match="closed"):
        rig.ingress.submit(ticket)


def test_every_slot_taken_is_a_503_and_the_rid_stays_free() -> None:
    rig = Rig(slots=1)
    first = rig.ingress.open(prompt("a"))
    with pytest.raises(Unavailable):
        rig.ingress.open(prompt("b"))
    assert rig.ingress.route_of("b") is None
    rig.ingress.end(first.route)
    rig.ingress.open(prompt("b"))


def test_an_abort_reaches_the_scheduler_even_when_the_request_is_gone_here() -> None:
    rig = Rig()
    rig.ingress.abort(77, "gone")
    assert rig.tags() == [("request", Tag.ABORT)]
    rig.request.error = RingFull("full")
    with pytest.raises(RingFull):
        rig.ingress.abort(77, "gone")


@pytest.mark.parametrize("restored", [False, True])
def test_a_request_that_is_aborted_before_it_is_submitted_is_not_submitted(restored: bool) -> None:
    """Its ABORT would come before its GENERATE, and mean nobody. Its shard may be a new one meanwhile."""
    rig = Rig()
    ticket = rig.ingress.open(prompt())
    if restored:
        rig.ingress.restore(ticket.route, b"", 0)
    rig.ingress.abort(ticket.route)
    assert rig.nothing_stays()
    with pytest.raises(TicketClosed):
        rig.ingress.submit(ticket)
    rig.ingress.end(ticket.route)
    tags = [tag for _, tag in rig.tags()]
    assert tags == [Tag.RESTORE, Tag.FORGET] if restored else [Tag.FORGET]


def test_a_control_request_has_a_route_and_no_registration() -> None:
    rig = Rig()
    ticket = rig.ingress.open_control()
    rig.ingress.submit_control(ticket, "health", b"{}")
    assert rig.log == [("request", Tag.CONTROL, Control(ticket.route, ticket.rid, "health", b"{}"))]
    rig.ingress.end(ticket.route)
    assert len(rig.log) == 1
    assert rig.nothing_stays()
    rig.request.error = RingFull("full")
    with pytest.raises(Unavailable):
        rig.ingress.submit_control(rig.ingress.open_control("h"), "health")
    assert rig.nothing_stays()
    with pytest.raises(ValueError, match="submit_control"):
        rig.ingress.submit(rig.ingress.open_control())


def test_many_threads_register_and_end_in_order() -> None:
    rig = Rig(slots=64)

    def work(name: str) -> None:
        for i in range(50):
            ticket = rig.ingress.open(prompt(f"{name}-{i}"))
            rig.ingress.submit(ticket)
            rig.ingress.end(ticket.route)

    threads = [threading.Thread(target=work, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rig.ingress.live() == 0
    seen: dict[int, list[int]] = {}
    for _, tag, message in rig.log:
        seen.setdefault(message.route, []).append(tag)
    assert len(seen) == 200
    assert all(tags == [Tag.REGISTER, Tag.GENERATE, Tag.FORGET] for tags in seen.values())


def test_the_scheduler_is_told_what_was_submitted_and_has_not_ended() -> None:
    """Not what has a route and was not submitted yet: it never got that."""
    rig = Rig(slots=8)
    rig.ingress.open(prompt("not submitted"))
    running, ended = rig.ingress.open(prompt("a")), rig.ingress.open(prompt("b"))
    control = rig.ingress.open_control("c")
    rig.ingress.submit(running)
    rig.ingress.submit(ended)
    rig.ingress.submit_control(control, "health")
    rig.ingress.end(ended.route)
    rig.log.clear()
    assert rig.ingress.live_from(0) == 8
    ((lane, tag, live),) = rig.log
    assert (lane, tag) == ("request", Tag.LIVE)
    assert (live.reader, live.first, live.end) == (0, 0, 8)
    assert sorted(live.routes) == sorted([running.route, control.route])


def test_what_is_live_is_told_in_frames_that_fit() -> None:
    rig = Rig(slots=300)
    tickets = [rig.ingress.open(prompt(str(at))) for at in range(300)]
    for ticket in tickets:
        rig.ingress.submit(ticket)
    rig.log.clear()
    rig.request.max_frame = 1024
    slot = 0
    while slot < 300:
        slot = rig.ingress.live_from(slot)
    told = [live for _, _, live in rig.log]
    assert [live.first for live in told[1:]] == [live.end for live in told[:-1]]
    assert sorted(route for live in told for route in live.routes) == sorted(t.route for t in tickets)
    assert all(len(encode(live)) <= 1024 for live in told)
    rig.request.error = RingFull("full")
    with pytest.raises(RingFull):
        rig.ingress.live_from(0)


def test_a_new_process_says_so_on_both_lanes() -> None:
    rig = Rig()
    rig.control.waits = rig.request.waits = ATTACH_WAIT_S
    rig.ingress.attach()
    assert rig.log == [("control", Tag.ATTACH, Attach(0)), ("request", Tag.ATTACH, Attach(0))]


def test_a_new_shard_is_told_of_the_requests_that_have_text_and_have_not_ended() -> None:
    rig = Rig()
    running, ended = rig.ingress.open(prompt("r", stop=["END"])), rig.ingress.open(prompt("over"))
    control = rig.ingress.open_control()
    rig.ingress.submit(running)
    rig.ingress.submit(ended)
    rig.ingress.end(ended.route)
    rig.log.clear()
    for ticket in (running, ended, control):
        rig.ingress.restore(ticket.route, b"\x05\0\0\0", 3)
    rig.ingress.restored(1, 77)
    ((lane, tag, restore), last) = rig.log
    assert (lane, tag) == ("control", Tag.RESTORE)
    assert (restore.route, restore.rid, restore.ids, restore.text_bytes) == (
        running.route,
        "r",
        b"\x05\0\0\0",
        3,
    )
    registered = running.prompt
    assert registered is not None
    assert restore.options == registered.decode_options()
    assert (restore.prompt_tail, restore.prompt_tokens) == (registered.prompt_tail, 80)
    assert last == ("control", Tag.RESTORED, Restored(0, 1, 77))
    rig.control.error = RingFull("full")
    with pytest.raises(RingFull):
        rig.ingress.restore(running.route, b"", 0)
