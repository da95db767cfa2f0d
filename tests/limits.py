"""Limits of this process, set for a moment, and what it has open."""

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def no_more_memory() -> Iterator[None]:
    """Nothing further is mapped: for a call that needs no more than what is there already."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def no_more_files() -> Iterator[None]:
    """Every further open fails with EMFILE, as in a process that has as many as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_files() -> list[str]:
    """List the descriptors that this process has open, besides those of what is garbage already."""
    gc.collect()
    return sorted(os.listdir("/proc/self/fd"))


def locks() -> int:
    """Count the descriptors with a lock, which whoever uses a segment holds on it; not those of garbage."""
    gc.collect()
    return sum("lock:" in info.read_text() for info in Path("/proc/self/fdinfo").iterdir() if info.exists())
