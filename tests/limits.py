"""Limits of this process, set for a moment, and what it has open."""

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest


@contextmanager
def _at_most(what: int, limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


def no_more_memory() -> AbstractContextManager[None]:
    """Nothing further is mapped: for a call that needs no more than what is there already."""
    return _at_most(resource.RLIMIT_AS, 0)


@contextmanager
def failing_at(at: int, times: int = 1) -> Iterator[None]:
    """Let so many of Python's allocations fail, the `at`-th from here on first."""
    python = pytest.importorskip("_testcapi", reason="this Python was built without its test modules")
    gc.disable()  # what a collection closes would take the allocation that is to fail
    python.set_nomemory(at, at + times)
    try:
        yield
    finally:
        python.remove_mem_hooks()
        gc.enable()


def at_most_files(limit: int) -> AbstractContextManager[None]:
    """No descriptor from `limit` on is given out: an open that would have it fails with EMFILE."""
    return _at_most(resource.RLIMIT_NOFILE, limit)


def no_more_files() -> AbstractContextManager[None]:
    """Every further open fails with EMFILE, as in a process that has as many as it may."""
    return _at_most(resource.RLIMIT_NOFILE, 0)


def open_files() -> list[str]:
    """List the descriptors that this process has open, besides those of what is garbage already."""
    gc.collect()
    return sorted(os.listdir("/proc/self/fd"))


def locks() -> int:
    """Count the descriptors with a lock, which whoever uses a segment holds on it; not those of garbage."""
    gc.collect()
    return sum("lock:" in info.read_text() for info in Path("/proc/self/fdinfo").iterdir() if info.exists())
