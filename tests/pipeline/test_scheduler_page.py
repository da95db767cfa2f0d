"""The scheduler's page: what it shows is run as it stands there."""

import asyncio
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from outfeed.gateway.front import Front
from outfeed.ingress.errors import Refused
from outfeed.ring.frames import TAG_OF, Generate, encode
from outfeed.ring.instance import Instance
from outfeed.ring.route import make_route
from outfeed.sidecar import SchedulerPort
from outfeed.sink import Done, Error, Frame
from tokenizers import Tokenizer

from tests.instances import unique

from .commands import launched, served

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scheduler.md"


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def page(small_tokenizer: Path, tmp_path: Path) -> Iterator[str]:
    """An instance that the page's scheduler serves."""
    instance = unique("page")
    script = tmp_path / "scheduler.py"
    script.write_text(blocks()[0], encoding="utf-8")
    with served(instance, small_tokenizer, sys.executable, str(script)):
        yield instance


async def answers(front: Front, body: dict[str, Any]) -> tuple[str, list[int], str]:
    (stream,) = await front.submit(body)
    text, ids, reason = "", [], ""
    async for item in stream:
        match item:
            case Frame(event) | Done(event):
                text += event.text
                ids += event.ids.tolist()
                reason = event.finish.type if event.finish else reason
            case Error():
                raise AssertionError(item)
    return text, ids, reason


def test_the_page_has_a_complete_scheduler_in_under_60_lines(page: str, small_tokenizer: Path) -> None:
    assert len(blocks()[0].splitlines()) < 60
    tokenizer = Tokenizer.from_file(str(small_tokenizer))
    prompt = tokenizer.encode("The river flows. 川は流れる").ids

    async def ask(front: Front) -> None:
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 3 * len(prompt)}}
        text, ids, reason = await answers(front, body)
        assert (text, ids, reason) == (tokenizer.decode(prompt * 3), prompt * 3, "length")
        body["sampling_params"] = {"stop_token_ids": [prompt[4]]}
        assert await answers(front, body) == (tokenizer.decode(prompt[:4]), prompt[:4], "stop")
        body["sampling_params"] = {"max_new_tokens": 0}
        assert await answers(front, body) == ("", [], "length")
        body["sampling_params"] = {"max_new_tokens": None}
        (endless,) = await front.submit(body)
        async with endless:
            await anext(endless.source)  # leaving it aborts it
        assert await front.control("health") == b'{"success":true}'
        with pytest.raises(Refused, match="'dance' is unknown: use health"):
            await front.control("dance")

    with Front.attach(page) as front:
        asyncio.run(ask(front))


def test_the_other_examples_run(small_tokenizer: Path) -> None:
    _, families, by_rid, hand_on = blocks()
    instance = unique("page")
    with launched(instance, "--tokenizer", str(small_tokenizer)), SchedulerPort.attach(instance) as port:
        routes = [make_route(0, 0, slot, 1) for slot in range(2)]
        for route in routes:
            port.adopt(Generate(route, "", b"", {}))
        names: dict[str, Any] = {
            "port": port,
            "routes": np.array(routes, "u8"),
            "ids": np.array([5, 6], "i4"),
        }
        exec(families, names)
        here = Instance.attach(instance)
        request = here.request()
        with request.writer(0) as gateway:
            for slot, rid in enumerate(("one", "two"), 10):
                message = Generate(make_route(0, 0, slot, 1), rid, b"", {})
                gateway.write(TAG_OF[Generate], encode(message))
        exec(by_rid, names | {"rid": "one", "other": "two"})
        assert not port.is_live(make_route(0, 0, 10, 1))
        here_end, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with here_end, there:
            request_of_0 = Generate(make_route(0, 0, 12, 1), "three", b"\1\0\0\0", {"top_p": 1.0})
            give, _, take = hand_on.partition("\n")
            exec(give, names | {"sock": here_end, "message": request_of_0, "msgspec": msgspec})
            handed = names | {"sock": there, "msgspec": msgspec, "Generate": Generate}
            exec(take, handed)
        assert handed["request"] == request_of_0
        assert port.is_live(request_of_0.route)
        request.close()
        here.close()
