"""What an instance's segments and doorbells are called.

Every name of an instance starts with `outfeed-<instance>.`, so that one look at /dev/shm tells what
belongs to whom, and a dead instance can be swept away by name alone.
"""

import re

from .errors import RingError

PREFIX = "outfeed-"
_BELL = "bell-"
_INSTANCE = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_NAME = re.compile(rf"{PREFIX}(?P<instance>{_INSTANCE.pattern})\.(?P<what>[a-z0-9-]+)")


class BadInstanceName(RingError, ValueError):
    """An instance id that cannot be part of a segment's name."""


def check_instance(instance: str) -> str:
    """Return `instance` if it can name an instance.

    Raises:
        BadInstanceName: it is not 1 to 32 of a-z, 0-9, `_` and `-`, starting with a letter or digit.
    """
    if not _INSTANCE.fullmatch(instance):
        raise BadInstanceName(
            f"instance id {instance!r} is not usable: give 1 to 32 of a-z, 0-9, '_' and '-', "
            "starting with a letter or a digit"
        )
    return instance


def segment_name(instance: str, what: str) -> str:
    """Name the segment `what` of `instance`, as it stands in /dev/shm."""
    return f"{PREFIX}{check_instance(instance)}.{what}"


def egress_name(instance: str, reader: int) -> str:
    """Name the egress ring of reader `reader`."""
    return segment_name(instance, f"egress{reader}")


def doorbell_name(instance: str, process: str) -> str:
    """Name the doorbell of one process, for example `shard0` or `reader0`."""
    return segment_name(instance, f"{_BELL}{process}")


def is_doorbell(name: str) -> bool:
    """Whether a name in /dev/shm is that of an instance's doorbell."""
    names = split_name(name)
    return names is not None and names[1].startswith(_BELL)


def split_name(name: str) -> tuple[str, str] | None:
    """Split a name in /dev/shm into (instance, what); None if it is none of ours."""
    match = _NAME.fullmatch(name)
    return (match["instance"], match["what"]) if match else None
