"""Builds the C cores: one cffi API-mode module per room that has a `core/` folder.

Everything else about the package is in pyproject.toml. cffi reads the functions below through
`cffi_modules`; each room's `core/api.h` is both its C header and the declarations Python sees.
"""

import os
import sys
import sysconfig
from pathlib import Path

from cffi import FFI
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
FLAGS = ["-std=c11", "-O2", "-g", "-fvisibility=hidden", "-Wall", "-Wextra"]
# Our scripts and CI turn warnings into errors; a user's newer compiler must not break an install.
if os.environ.get("OUTFEED_WERROR"):
    FLAGS.append("-Werror")


# What a BATCH body looks like: every room that lays one out in C includes these.
BODY = ("ring/core/batch.h", "ring/core/check.h")


def core(room: str, module: str, *shared: str) -> FFI:
    """Describe `outfeed.<room>.<module>`, built from every C file in `<room>/core/`.

    shared: headers of other rooms that it includes.
    """
    folder = Path(room) / "core"
    ffi = FFI()
    ffi.cdef((ROOT / folder / "api.h").read_text(encoding="utf-8"))
    ffi.set_source(
        f"outfeed.{room}.{module}",
        '#include <stddef.h>\n#include <stdint.h>\n#include "api.h"\n',
        sources=sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).glob("*.c")),
        include_dirs=[str(folder)],
        depends=[*sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).glob("*.h")), *shared],
        extra_compile_args=FLAGS,
        libraries=["pthread"],
        py_limited_api=True,
    )
    return ffi


def ring() -> FFI:
    """The lanes: `outfeed.ring._core`."""
    return core("ring", "_core")


def ingress() -> FFI:
    """The worst text for a stop pattern: `outfeed.ingress._worst`."""
    return core("ingress", "_worst")


def shards() -> FFI:
    """The detokenizing kernel: `outfeed.shards._kernel`."""
    return core("shards", "_kernel", *BODY)


def sidecar() -> FFI:
    """The scheduler's row table: `outfeed.sidecar._rows`."""
    return core("sidecar", "_rows", *BODY)


def methods(module: str, sources: str, *depends: str) -> Extension:
    """Describe an extension of hot calls as Python methods: the first file's head says why it is one."""
    return Extension(
        f"outfeed.{module}",
        sources=sources.split(),
        depends=list(depends),
        extra_compile_args=FLAGS,
        py_limited_api=True,
    )


class BuildPy(build_py):
    """The root is the package, and this file lies in it: keep it out of the wheel."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Return (package, module, file) for all but this file."""
        found: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        return [entry for entry in found if (entry[0], entry[1]) != ("outfeed", "setup")]


if __name__ == "__main__":
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        sys.exit(
            "outfeed does not run on a free-threaded Python: its C cores are built for the stable ABI, which "
            "that has not, and count on the GIL; install it in a Python of the same version that has the GIL"
        )
    setup(
        cmdclass={"build_py": BuildPy},
        cffi_modules=["setup.py:ring", "setup.py:ingress", "setup.py:shards", "setup.py:sidecar"],
        ext_modules=[
            methods(
                "ring._fast",
                "ring/core/python/fast.c ring/core/python/view.c",
                "ring/core/python/view.h",
                "ring/core/api.h",
                "ring/core/clock.h",
            ),
            methods("ring._body", "ring/core/python/body.c", *BODY),
            methods(
                "sidecar._push",
                "sidecar/core/python/push.c",
                "ring/core/api.h",
                "ring/core/clock.h",
                "sidecar/core/api.h",
            ),
            methods("sink._deliver", "sink/core/deliver.c", "sink/core/fields.h"),
        ],
    )
