"""What requests may take of a shard's memory in all, whatever a gateway sends: above it they are refused."""

from collections.abc import Callable

import numpy as np
import pytest
from outfeed.ring.frames import DecodeOptions, ErrorFrame, Forget, Register, Restore
from outfeed.ring.route import make_route
from outfeed.shards.budget import Budget
from outfeed.shards.decoder import STOP_BYTE, STREAM_BYTES, Decoder
from outfeed.shards.errors import BadRegistration
from outfeed.shards.patterns import PATTERN_BYTES, WATCH_BYTES
from outfeed.shards.table import TokenTable

from .rig import Rig, only_batch

STOPS = DecodeOptions(stop=["x" * 1000])
PATTERNS = DecodeOptions(stop_regex=["a+b", "c"], detect_stops=True)
BAD = DecodeOptions(stop=["abc"], stop_regex=["a+b", "(", "c"], detect_stops=True)
ROUTES = [make_route(0, 0, slot, 1) for slot in range(6)]
WEIGHT = 1000 * STOP_BYTE


def register(decoder: Decoder, route: int, options: DecodeOptions) -> None:
    decoder.register(Register(route, "", options, b"", 0))


def test_what_is_above_the_limit_is_refused_and_who_is_there_goes_on(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    decoder = rig.shard.decoder
    decoder.budget.limit = 4 * WEIGHT  # three of them through one of two gateways
    rig.register(*ROUTES[:4], options=STOPS)
    rig.register(ROUTES[4])
    rig.push([(route, 0, [65]) for route in ROUTES[:5]])
    rig.shard.turn()
    refused, rows = rig.hear()
    assert isinstance(refused, ErrorFrame)
    assert (refused.route, refused.status, refused.type) == (ROUTES[3], 503, "no_memory")
    assert f"{decoder.budget.limit} bytes" in refused.message
    assert "fewer or shorter stops" in refused.message
    assert only_batch([rows]).routes.tolist() == [*ROUTES[:3], ROUTES[4]]
    assert decoder.budget.used == 3 * WEIGHT

    rig.say(Forget(ROUTES[0]))
    rig.register(ROUTES[5], options=STOPS)
    rig.push([(ROUTES[1], 1, [65]), (ROUTES[5], 0, [65])])
    rig.shard.turn()
    assert only_batch(rig.hear()).routes.tolist() == [ROUTES[1], ROUTES[5]]
    for route in ROUTES:
        rig.say(Forget(route))
    rig.shard.turn()
    assert (decoder.budget.used, decoder.live, rig.shard._routes[0]) == (0, 0, {})


def test_a_gateway_that_never_says_forget_fills_no_shard(make_rig: Callable[..., Rig]) -> None:
    """Generation after generation in one slot: what was there before is gone."""
    rig = make_rig()
    decoder = rig.shard.decoder
    for generation in range(1, 5):
        rig.register(make_route(0, 0, 5, generation), options=STOPS)
        rig.shard.turn()
        assert (decoder.live, decoder.budget.used) == (1, WEIGHT)
        assert rig.shard._routes[0] == {5: make_route(0, 0, 5, generation)}
    rig.say(Forget(make_route(0, 0, 5, 3)))  # late: of one that is gone
    rig.push([(make_route(0, 0, 5, 4), 0, [65])])
    rig.shard.turn()
    assert only_batch(rig.hear()).rows == 1


def test_who_is_registered_twice_pays_once(table_of: Callable[[str], TokenTable]) -> None:
    decoder = Decoder(table_of("deepseek"))
    for _ in range(2):
        register(decoder, ROUTES[0], STOPS)
        register(decoder, ROUTES[1], PATTERNS)
    decoder.forget(ROUTES[0])
    assert decoder.budget.used == 4 * STOP_BYTE + WATCH_BYTES + 2 * PATTERN_BYTES
    decoder.forget(ROUTES[1])
    assert decoder.budget.used == 0


def test_a_pattern_is_compiled_and_paid_once_for_all_who_have_it(
    table_of: Callable[[str], TokenTable],
) -> None:
    decoder = Decoder(table_of("deepseek"))
    each = 4 * STOP_BYTE + WATCH_BYTES
    for count, route in enumerate(ROUTES, 1):
        register(decoder, route, PATTERNS)
        assert decoder.budget.used == 2 * PATTERN_BYTES + count * each
    compiled = {id(one) for watch in decoder._watches.values() for one in watch._compiled}
    assert len(compiled) == 2
    for left, route in reversed(list(enumerate(ROUTES))):
        assert decoder.budget.used == 2 * PATTERN_BYTES + (left + 1) * each
        decoder.forget(route)
    assert decoder.budget.used == 0


def test_a_refused_registration_takes_nothing(table_of: Callable[[str], TokenTable]) -> None:
    decoder = Decoder(table_of("deepseek"))
    with pytest.raises(BadRegistration, match="stop_regex"):
        register(decoder, ROUTES[0], BAD)
    with pytest.raises(BadRegistration, match="at most"):
        register(decoder, ROUTES[0], DecodeOptions(stop=["x" * 65_537], stop_regex=["a"], detect_stops=True))
    decoder.budget.limit = PATTERN_BYTES + PATTERN_BYTES // 2
    with pytest.raises(MemoryError):
        register(decoder, ROUTES[0], PATTERNS)
    assert (decoder.budget.used, decoder.live) == (0, 0)
    register(decoder, ROUTES[0], DecodeOptions(stop_regex=["a+b"], detect_stops=True))
    assert decoder.live == 1


def test_text_that_a_restore_leaves_waiting_is_paid(table_of: Callable[[str], TokenTable]) -> None:
    """How much of it was delivered is only said."""
    decoder = Decoder(table_of("deepseek"))
    ids = np.full(1000, 65, dtype="<i4").tobytes()
    restore = Restore(ROUTES[0], "", DecodeOptions(), b"", 0, ids, 0)
    decoder.restore(restore)
    held = len(decoder._kernel.held(ROUTES[0]))
    assert held >= 1000
    assert decoder.budget.used == 2 * held
    decoder.forget(ROUTES[0])
    assert decoder.budget.used == 0
    decoder.budget.limit = 2 * held - 1
    with pytest.raises(MemoryError):
        decoder.restore(restore)
    assert (decoder.budget.used, decoder.live) == (0, 0)


def test_a_stream_without_a_table_is_paid(table_of: Callable[[str], TokenTable]) -> None:
    decoder = Decoder(table_of("wordpiece"))
    register(decoder, ROUTES[0], DecodeOptions())
    assert decoder.budget.used == STREAM_BYTES


def test_no_gateway_has_anothers_requests_refused(make_rig: Callable[..., Rig]) -> None:
    """Not with stops, and not with patterns, the same as the others' included."""
    rig = make_rig()
    rig.shard.decoder.budget.limit = 8 * (PATTERN_BYTES + WATCH_BYTES)
    pattern = DecodeOptions(stop_regex=["a+b"], detect_stops=True)
    mine = [make_route(0, 0, slot, 1) for slot in range(2)]
    rig.register(mine[0], options=pattern)
    hostile = [make_route(1, 0, slot, 1) for slot in range(400)]
    for slot, route in enumerate(hostile[:20]):
        rig.register(route, options=DecodeOptions(stop_regex=[f"a{slot}"], detect_stops=True))
    rig.register(*hostile[20:], options=STOPS)
    rig.shard.turn()
    refused = [message for message in rig.hear(1) if isinstance(message, ErrorFrame)]
    assert len(refused) > 100
    assert "through gateway 1 now" in refused[0].message
    rig.register(mine[1], options=DecodeOptions(stop_regex=["b+c"], detect_stops=True))
    rig.push([(route, 0, [65]) for route in mine])
    rig.shard.turn()
    assert only_batch(rig.hear()).routes.tolist() == mine
    for route in hostile:
        rig.say(Forget(route))
    rig.shard.turn()
    rig.register(*ROUTES[2:6], options=STOPS)
    rig.shard.turn()
    assert rig.hear() == []


@pytest.mark.parametrize("name", ["bytelevel_added", "ctc"])
def test_a_request_that_is_forgotten_leaves_nothing(name: str, table_of: Callable[[str], TokenTable]) -> None:
    """Routes do not come again: what stays of one stays until the shard ends."""
    decoder = Decoder(table_of(name))

    def kept() -> dict[str, int]:
        of_requests = {**vars(decoder), **vars(decoder.budget), **vars(decoder._compiled)}
        return {at: len(held) for at, held in of_requests.items() if isinstance(held, dict | set)}

    everything = DecodeOptions(
        stop=["abc"], stop_regex=["a+b"], detect_stops=True, return_text_in_logprobs=True
    )
    register(decoder, ROUTES[1], everything)
    decoder.forget(ROUTES[1])
    before = kept()  # what a gateway has taken in all is kept as long as it may come again
    register(decoder, ROUTES[0], everything)
    assert sum(kept().values()) >= sum(before.values()) + 6
    assert decoder.forget(ROUTES[0])
    assert kept() == before


def test_the_limit_itself_may_be_taken() -> None:
    budget = Budget(limit=10)
    budget.take(0, "a", 4)
    budget.take(0, "a", 6)
    with pytest.raises(MemoryError, match=r"10 are taken there, and 1 more"):
        budget.take(0, "b", 1)
    budget.give_back(0, "b")
    assert budget.used == 10
    budget.give_back(0, "a")
    assert budget.used == 0


def test_whatever_the_others_take_each_gateway_has_its_share() -> None:
    """Of 24 bytes and three gateways: 4 for each, and 12 for whoever comes first."""
    budget = Budget(3, limit=24)
    for size in (3, 2):  # one whose own share has room, and a common part, too
        budget.take(0, "mine", size)
    budget.take(1, "much", 4 + 11)
    with pytest.raises(MemoryError, match="15 of them through gateway 1 now; 15 are"):
        budget.take(1, "more", 1)
    with pytest.raises(MemoryError):
        budget.take(0, "more", 1)
    budget.take(2, "share", 4)
    with pytest.raises(MemoryError):
        budget.take(2, "more", 1)
    assert budget.used == budget.limit
    budget.give_back(0, "mine")
    budget.take(1, "more", 1)
    budget.take(0, "share", 4)
    assert budget.used == budget.limit
    budget.give_back(1, "much")
    budget.take(2, "more", 12)
