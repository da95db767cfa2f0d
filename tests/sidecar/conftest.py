"""An instance without its processes: the test plays gateway and shard on real rings."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from outfeed.ring import Consumer, Doorbell, LaneWriter
from outfeed.ring.board import InstanceConfig
from outfeed.ring.frames import TAG_OF, Handover, Message, encode
from outfeed.ring.instance import Instance, leftovers

NUMBERS = itertools.count()


@dataclass
class Bench:
    """A bare instance with two gateways' lanes to write and one shard cursor to read."""

    instance: Instance
    gateway: LaneWriter
    other: LaneWriter
    shard: Consumer

    @property
    def name(self) -> str:
        return self.instance.name

    def send(self, *messages: Message | Handover) -> None:
        for message in messages:
            self.gateway.write(TAG_OF[type(message)], encode(message))


@pytest.fixture
def bench() -> Iterator[Bench]:
    sizes: dict[str, Any] = {f"{ring}_bytes": 1 << 16 for ring in ("request", "control", "step", "egress")}
    name = f"t-side-{os.getpid()}-{next(NUMBERS)}"
    config = InstanceConfig(instance=name, tokenizer="none", shards=1, readers=2, ranks=2, slots=64, **sizes)
    instance = Instance.create(config)
    request, step = instance.request(), instance.step()
    bell = Doorbell.create(f"outfeed-{name}.bell-test")
    gateway, other, shard = request.writer(0), request.writer(1), step.consumer(0, bell)
    yield Bench(instance, gateway, other, shard)
    gateway.close()
    other.close()
    shard.close()
    request.close()
    step.close()
    bell.close()
    instance.remove()
    instance.close()
    assert leftovers(name) == []
