"""The C cores are there and speak the ABI that the Python side expects."""

from outfeed.ring import _core
from outfeed.shards import _kernel
from outfeed.sidecar import _rows


def test_every_core_is_built() -> None:
    assert _core.lib.outfeed_ring_abi() == 1
    assert _kernel.lib.outfeed_shards_abi() == 1
    assert _rows.lib.outfeed_sidecar_abi() == 1
