"""Run with growth.c preloaded: steps that fit, behind large ones whose memory ends a little later each time.

Arguments: the library that is preloaded, a token table, a token's id. Prints how many large steps found none.
"""

import ctypes
import itertools
import sys
from pathlib import Path

import numpy as np
from outfeed.ring.batch import Batch
from outfeed.ring.route import make_route
from outfeed.shards.kernel import Kernel

FIT, LARGE = 20_000, 200_000


def main() -> None:
    library, table, token = sys.argv[1:]
    until_failure = ctypes.c_uint32.in_dll(ctypes.CDLL(library), "growths_until_failure")
    routes = np.array([make_route(0, 0, slot, 1) for slot in range(FIT)], "<u8")
    ids, ones = np.full(FIT, int(token), "<i4"), np.ones(FIT, "<u4")
    strangers, two = np.full(LARGE, make_route(0, 0, FIT, 1), "<u8"), np.full(LARGE, 2, "<u4")
    large = Batch(0, strangers, two, two, two, np.full(2 * LARGE, int(token), "<i4")).core

    def fits(kernel: Kernel, turn: int) -> None:
        first = np.full(FIT, turn, "<u4")
        made = kernel.decode(Batch(0, routes, first, ones, first + 7, ids).core, 0, 0, [])
        assert made.routes.tolist() == routes.tolist()
        assert made.first.tolist() == first.tolist()
        assert made.prompt_tokens.tolist() == (first + 7).tolist()
        assert made.counts.tolist() == made.generated.tolist() == made.text_lens.tolist() == ones.tolist()
        assert made.ids.tolist() == ids.tolist()

    for failing in itertools.count(1):
        kernel = Kernel(Path(table).read_bytes())
        for route in routes.tolist():
            kernel.register(route, 0, [], b"", 0)
        fits(kernel, 0)
        until_failure.value = failing
        try:
            kernel.decode(large, 0, 0, [])
        except MemoryError:
            assert not until_failure.value, "it failed before its memory ended"
            fits(kernel, 1)
        else:
            assert until_failure.value, "it had no memory, and nothing told so"
            fits(kernel, 1)
            print(failing - 1)
            return


main()
