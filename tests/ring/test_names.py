"""What is an instance's in /dev/shm, told by its name alone."""

import pytest
from outfeed.ring.names import doorbell_name, is_doorbell, segment_name, split_name


@pytest.mark.parametrize(
    "name",
    [
        "outfeed-m",
        "outfeed-m.",
        "outfeed-.board",
        "outfeed-m.board~",
        "outfeed-m.board.old",
        "my-outfeed-m.board",
        "outfeed-m.my_board",
        f"outfeed-{'m' * 33}.board",
    ],
)
def test_what_is_named_otherwise_is_no_instances(name: str) -> None:
    assert split_name(name) is None
    assert not is_doorbell(name)


@pytest.mark.parametrize("instance", ["m", "7", "my-model_7b", "m" * 32])
def test_whose_a_segment_is_can_be_read_from_its_name(instance: str) -> None:
    assert split_name(segment_name(instance, "egress0")) == (instance, "egress0")


def test_a_doorbell_is_told_from_what_an_instance_is_removed_with() -> None:
    """Doorbells go with their owners: a name that only has such a part in it is a segment's."""
    assert is_doorbell(doorbell_name("m", "reader0"))
    assert not is_doorbell(segment_name("m", "step"))
    assert not is_doorbell(segment_name("m", "no-bell-0"))
    assert not is_doorbell(segment_name("bell-0", "step"))
