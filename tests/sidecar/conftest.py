"""An instance without its processes: the test plays gateway and shard on real rings."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from outfeed.ring import Consumer, Doorbell, LaneWriter
from outfeed.ring.frames import TAG_OF, Handover, Message, encode
from outfeed.ring.instance import Instance, leftovers

from tests.instances import small_config


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
def ranks() -> int:
    """How many ranks the instance has."""
    return 2


@pytest.fixture
def bench(ranks: int) -> Iterator[Bench]:
    instance = Instance.create(small_config("side", shards=1, readers=2, ranks=ranks, slots=64))
    request, step = instance.request(), instance.step()
    bell = Doorbell.create(f"outfeed-{instance.name}.bell-test")
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
    assert leftovers(instance.name) == []
