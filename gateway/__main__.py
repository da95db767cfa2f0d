"""`python -m outfeed.gateway`, `outfeed-gateway`: one gateway process, or what is missing for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

NEEDS = ("uvloop", "httptools", "jinja2")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a gateway process until a signal; 2 when the extra `gateway` is not installed."""
    try:
        from .server import main as run
    except ModuleNotFoundError as missing:
        if missing.name not in NEEDS:
            raise
        print(
            f"outfeed-gateway: {missing.name} is missing: install outfeed with its extra `gateway` "
            "(from a checkout: pip install '.[gateway]'; of a wheel: pip install 'WHEEL[gateway]')",
            file=sys.stderr,
        )
        return 2
    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
