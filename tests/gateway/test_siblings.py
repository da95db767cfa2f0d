"""Gateways among each other: aborts and counts find their way, nonsense and strangers do not."""

import asyncio
import os
import socket

import pytest
from outfeed.gateway import siblings
from outfeed.gateway.siblings import Siblings

from tests.eventually import LIMIT_S, until_async
from tests.instances import unique


class Gateway:
    """One gateway's part, and what reached it."""

    def __init__(self, instance: str, me: int, count: int) -> None:
        self.aborted: list[str] = []
        self.siblings = Siblings(instance, me, count, self.aborted.append, f"state {me}".encode)


def test_an_abort_reaches_the_others_and_a_scrape_hears_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    name = unique("siblings")
    # Nobody is waited for who has answered, or does not run.
    monkeypatch.setattr(siblings, "WAIT_S", 4 * LIMIT_S)

    async def run() -> None:
        gateways = [Gateway(name, me, 3) for me in range(3)]
        for gateway in gateways:
            gateway.siblings.start()
        gateways[0].siblings.abort("rid")
        await until_async("both aborts", lambda: gateways[1].aborted == ["rid"] == gateways[2].aborted)
        assert gateways[0].aborted == []
        assert await gateways[1].siblings.states() == [b"state 0", b"state 2"]
        gateways[2].siblings.close()
        assert await gateways[1].siblings.states() == [b"state 0"]
        gateways[0].siblings.close()
        assert await gateways[1].siblings.states() == []
        gateways[1].siblings.close()

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def test_one_alone_waits_for_nobody() -> None:
    async def run() -> None:
        gateway = Gateway(unique("siblings"), 0, 1)
        gateway.siblings.start()
        gateway.siblings.abort("rid")
        assert await gateway.siblings.states() == []
        gateway.siblings.close()

    asyncio.run(run())


def test_a_silent_one_is_waited_for_only_so_long() -> None:
    name = unique("siblings")

    async def run() -> None:
        gateway = Gateway(name, 0, 3)
        gateway.siblings.start()
        talks = Gateway(name, 2, 3)
        talks.siblings.start()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as silent:
            silent.bind(f"\0outfeed-{name}.gateway1".encode())
            assert await gateway.siblings.states() == [b"state 2"]
        gateway.siblings.close()
        talks.siblings.close()

    asyncio.run(run())


def test_one_that_is_late_is_taken_at_its_last_word_until_it_ends() -> None:
    name = unique("siblings")

    async def run() -> None:
        asking, late = Gateway(name, 0, 2), Gateway(name, 1, 2)
        asking.siblings.start()
        late.siblings.start()
        assert await asking.siblings.states() == [b"state 1"]
        asyncio.get_running_loop().remove_reader(late.siblings._socket)  # busy with something else
        for _ in range(2):
            assert await asking.siblings.states() == [b"state 1"]
        late.siblings.close()
        assert await asking.siblings.states() == []
        asking.siblings.close()

    asyncio.run(run())


def test_nonsense_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    name = unique("siblings")

    async def run() -> None:
        gateway = Gateway(name, 0, 2)
        gateway.siblings.start()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            for data in (
                b"",
                b"\xff" * 100,
                b"\x93\xa6_Abort\x01",
                os.urandom(1000),
                b"\x93\xa5_Tell\x01\x07",
            ):
                stranger.sendto(data, f"\0outfeed-{name}.gateway0".encode())
        await until_async("four warnings", lambda: caplog.text.count("dropped a message") >= 4)
        other = Gateway(name, 1, 2)
        other.siblings.start()
        other.siblings.abort("still listening")
        await until_async("the abort", lambda: gateway.aborted == ["still listening"])
        gateway.siblings.close()
        other.siblings.close()

    asyncio.run(run())


def test_a_number_that_is_taken_is_said() -> None:
    name = unique("siblings")

    async def run() -> None:
        first, second = Gateway(name, 0, 1), Gateway(name, 0, 1)
        first.siblings.start()
        with pytest.raises(OSError, match="in use"):
            second.siblings.start()
        second.siblings._socket.close()
        first.siblings.close()

    asyncio.run(run())
