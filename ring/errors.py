"""What can go wrong on a ring: one type per thing a caller may do about it."""


class RingError(Exception):
    """Any refusal of the ring."""


class NotARing(RingError):
    """The segment has no ring in it, or one whose header does not add up."""


class WrongVersion(NotARing):
    """The segment's layout is another version's: its writer and this process are different builds."""


class OtherNamespace(RingError):
    """The segment was made in another pid or time namespace, a container of its own, say: who owns what in
    it cannot be told from here.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f"segment {name!r} was made in another pid or time namespace, whose pids name other processes "
            "here: run all that share it in one namespace (containers: --pid=container:NAME, or in a pod "
            "shareProcessNamespace: true)"
        )


class FrameTooLarge(RingError):
    """A body above a quarter of the lane: split it, or make the lanes larger."""


class RingFull(RingError):
    """No room in the lane by the deadline: a consumer is slow or gone. Nothing was written."""


class LaneOwned(RingError):
    """A live process has the lane, the cursor or the doorbell."""


class LockHeld(RingError):
    """A lock that is only ever held for a moment was not to be had; the message names its file."""

    def __init__(self, path: str, waited: float) -> None:
        super().__init__(
            f"{path}: another process has had it locked for {waited:g} s, where a moment was expected; "
            "lslocks (its inode: ls -di) or fuser -v says which: end that process and start again"
        )


class CorruptLane(RingError):
    """A lane's bytes are not a ring's. The lane is quarantined for the segment's life; others go on.

    `ring`, `lane` and `position` (bytes since the ring was made) name the place.
    """

    def __init__(self, ring: str, lane: int, position: int) -> None:
        super().__init__(
            f"ring {ring!r}: lane {lane} is corrupt at position {position}: no record, head or tail that "
            "a writer or consumer leaves; the lane is quarantined, and only a new segment brings it back"
        )
        self.ring = ring
        self.lane = lane
        self.position = position


class NoSharedMemory(RingError):
    """/dev/shm cannot be used at all."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"/dev/shm {what}: expected a tmpfs there that this user may write to (ls -ld /dev/shm; df -hi "
            "/dev/shm); in a container give it one (--shm-size; Kubernetes: an emptyDir of medium Memory)"
        )


class NotOurs(RingError, PermissionError):
    """The segment is another user's, or others may open it."""

    def __init__(self, name: str, user: int, mode: int, me: int) -> None:
        super().__init__(
            f"segment {name!r} is of user {user}, mode {mode:04o}: expected one of this user ({me}) that "
            "nobody else may open (0600); run all of an instance as one user, or take another --instance"
        )


class NoRoom(RingError):
    """/dev/shm has too little room for `what`. `needed` and `free` are bytes, `remedy` says what to do."""

    def __init__(self, what: str, needed: int, free: int) -> None:
        self.needed = needed
        self.free = free
        mib = -(-needed // (1 << 20))
        self.remedy = (
            "in a container start it with a larger --shm-size (Kubernetes: an emptyDir of medium Memory at "
            "/dev/shm); on a host: mount -o remount,size=... /dev/shm; or ask for "
            "less: smaller --request-bytes, --control-bytes, --step-bytes and --egress-bytes, fewer --shards "
            "or --readers"
        )
        super().__init__(
            f"{what} needs {needed} bytes ({mib} MiB) of /dev/shm, where {free} are free: {self.remedy}"
        )


class BadCapacity(RingError, ValueError):
    """Lanes, consumers or capacity out of limits; the message holds the limits."""


class RingClosed(RingError):
    """The handle is closed, or was made before this process was forked and belongs to its parent."""


class WriterBusy(RingError):
    """A second thread in one LaneWriter, or a write while a reservation is open: a lane has one writer, which
    does one thing at a time. Use a lock, or a lane each.
    """


class ConsumerBusy(RingError):
    """Two threads in one Consumer or waiting on one Doorbell."""
