"""Limits of this process, set for a moment."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


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
