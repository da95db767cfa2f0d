"""Ways to move frames between processes, each in its best honest configuration, behind one small interface.

A transport is made in the reading process; `send` runs in each writing process and `receive` in the
reading one. Every writer sends bodies until its time is up and then one END; `receive` looks at every frame
in Python, as any user must, and returns when every END has come. All of them deliver the whole body
to Python: a view, bytes or a sample, whatever the transport gives its users for least cost.
"""

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import faster_fifo
import iceoryx2
import zmq
from outfeed.ring import Doorbell, Ring, RingFull, wait

END = b"."
BODY, LAST = 1, 2  # tags on the ring
TRIES = 3
LONGEST_RUN_S = 20
LONGEST_SPIN_S = 200e-6  # a reader with a core of its own, as iceoryx2's, which polls without end
FORK = multiprocessing.get_context("fork")


def send_for(seconds: float, burst: int, send: Callable[[Any], object], body: Any) -> None:
    """Send `body` over and over, looking at the clock after each burst."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for item in repeat(body, burst):
            send(item)


class Transport:
    """One way to move frames of `size` bytes from `writers` processes to this one."""

    name = ""

    def __init__(self, size: int, writers: int, tag: str) -> None:
        self.size = size
        self.writers = writers
        self.tag = tag
        self.burst = max(1, min(64, (1 << 20) // size))

    def connect(self) -> None:
        """In the reading process, after the writers were forked."""

    def send(self, writer: int, seconds: float, go: Callable[[], object]) -> None:
        """In a writing process: connect, `go()`, send for `seconds`, then END."""
        raise NotImplementedError

    def receive(self) -> tuple[int, float]:
        """Return the frames received and the seconds from the first of them to the last END."""
        raise NotImplementedError

    def counting(self, take: Callable[[], Any]) -> tuple[int, float]:
        """Receive one frame at a time."""
        count = ended = 0
        start = 0.0
        while ended < self.writers:
            frame = take()
            if not start:
                start = time.perf_counter()
            if len(frame) == 1:
                ended += 1
            else:
                count += 1
        return count, time.perf_counter() - start

    def close(self) -> None:
        """Let go of everything."""


class Outfeed(Transport):
    """This project's ring: one lane per writer, one parked consumer."""

    name = "outfeed"

    def __init__(self, size: int, writers: int, tag: str) -> None:
        super().__init__(size, writers, tag)
        self.ring = Ring.create(f"outfeed-bench-{tag}", lanes=writers, consumers=1, capacity=lane_bytes(size))
        self.bell = Doorbell.create(f"outfeed-bench-{tag}.bell", longest_spin=LONGEST_SPIN_S)
        self.consumer = self.ring.consumer(0, self.bell)

    def send(self, writer: int, seconds: float, go: Callable[[], object]) -> None:
        """One `write` per frame; a full lane is waited for."""
        with Ring.attach(self.ring.name) as ring:
            lane = ring.writer(writer)
            write = lane.write

            def send(body: bytes) -> None:
                write(BODY, body, timeout=10.0)

            go()
            body = os.urandom(self.size)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                for item in repeat(body, self.burst):
                    try:
                        write(BODY, item)
                    except RingFull:
                        send(item)
            write(LAST, END, timeout=10.0)

    def receive(self) -> tuple[int, float]:
        """Batches of views; each frame's tag is looked at."""
        count = ended = 0
        start = 0.0
        consumer = self.consumer
        while ended < self.writers:
            frames = consumer.read(256)
            if not frames:
                wait([consumer], 1.0)
                continue
            if not start:
                start = time.perf_counter()
            for _lane, tag, _body in frames:
                if tag == BODY:
                    count += 1
                else:
                    ended += 1
            consumer.release()
        return count, time.perf_counter() - start

    def close(self) -> None:
        """Remove the segment and the doorbell."""
        self.ring.close()
        self.ring.unlink()
        self.bell.close()


class Queue(Transport):
    """multiprocessing.Queue."""

    name = "multiprocessing.Queue"

    def __init__(self, size: int, writers: int, tag: str) -> None:
        super().__init__(size, writers, tag)
        # Bounded, or the feeder thread's backlog is what gets measured; by memory, so large enough to batch.
        self.queue = FORK.Queue(max(8, min(30_000, (64 << 20) // size)))

    def send(self, writer: int, seconds: float, go: Callable[[], object]) -> None:
        """`put` one by one."""
        go()
        send_for(seconds, self.burst, self.queue.put, os.urandom(self.size))
        self.queue.put(END)
        self.queue.close()
        self.queue.join_thread()

    def receive(self) -> tuple[int, float]:
        """`get` one by one."""
        return self.counting(self.queue.get)

    def close(self) -> None:
        """Close this end."""
        self.queue.close()


class Pipe(Transport):
    """multiprocessing.Pipe with send_bytes; several writers share it under a lock."""

    name = "multiprocessing.Pipe"

    def __init__(self, size: int, writers: int, tag: str) -> None:
        super().__init__(size, writers, tag)
        self.reader, self.writer = FORK.Pipe(duplex=False)
        self.lock = FORK.Lock()

    def send(self, writer: int, seconds: float, go: Callable[[], object]) -> None:
        """`send_bytes`, under the lock when there are others."""
        send_bytes = self.writer.send_bytes

        def locked(body: bytes) -> None:
            with self.lock:
                send_bytes(body)

        go()
        send = send_bytes if self.writers == 1 else locked
        send_for(seconds, self.burst, send, os.urandom(self.size))
        send(END)

    def receive(self) -> tuple[int, float]:
        """`recv_bytes` one by one."""
        return self.counting(self.reader.recv_bytes)

    def close(self) -> None:
        """Close both ends."""
        self.reader.close()
        self.writer.close()


class Zmq(Transport):
    """pyzmq PUSH/PULL over ipc; large bodies without pyzmq's own copies."""

    name = "pyzmq"

    def __init__(self, size: int, writers: int, tag: str) -> None:
        super().__init__(size, writers, tag)
        self.folder = tempfile.TemporaryDirectory(prefix="outfeed-bench-")
        self.address = f"ipc://{self.folder.name}/{tag}"
        self.copy = size < 65536
        self.done = FORK.Event()

    def connect(self) -> None:
        """Bind the PULL end."""
        self.context = zmq.Context()
        self.pull = self.context.socket(zmq.PULL)
        self.pull.setsockopt(zmq.RCVHWM, 10_000 if self.size < 65536 else 1000)
        self.pull.bind(self.address)

    def send(self, writer: int, seconds: float, go: Callable[[], object]) -> None:
        """`send` one by one."""
        context = zmq.Context()
        push = context.socket(zmq.PUSH)
        push.setsockopt(zmq.SNDHWM, 10_000 if self.size < 65536 else 1000)
        push.connect(self.address)
        go()
        body = os.urandom(self.size)
        if self.copy:
            send_for(seconds, self.burst, push.send, body)
        else:
            send_for(seconds, self.burst, lambda item: push.send(item, copy=False), body)
        push.send(END)
        # A sender that leaves while its reader is at the high-water mark takes its last messages with it.
        self.done.wait(LONGEST_RUN_S)
        push.close(linger=0)
        context.term()

    def receive(self) -> tuple[int, float]:
        """`recv` one by one; frames for large bodies."""
        try:
            return self.counting(self.pull.recv if self.copy else lambda: self.pull.recv(copy=False))
        finally:
            self.done.set()

    def close(self) -> None:
        """Close the socket and remove its file."""
        self.pull.close(linger=0)
        self.context.term()
        self.folder.cleanup()


def _same(value: Any) -> Any:
    return value


class FasterFifo(Transport):
    """faster-fifo without its pickling: bytes in, bytes out, get_many."""

    name = "faster-fifo"

    def __init__(self, size: int, writers: int, tag: str) -> None:
        super().__init__(size, writers, tag)
        self.queue = faster_fifo.Queue(max_size_bytes=max(4 << 20, 16 * size), loads=bytes, dumps=_same)

    def send(self, writer: int, seconds: float, go: Callable[[], object]) -> None:
        """`put` one by one, as the frames come."""
        go()
        put = self.queue.put
        send_for(seconds, self.burst, lambda item: put(item, timeout=60.0), os.urandom(self.size))
        put(END, timeout=60.0)

    def receive(self) -> tuple[int, float]:
        """`get_many`, as many as there are."""
        count = ended = 0
        start = 0.0
        while ended < self.writers:
            frames = self.queue.get_many(timeout=60.0, max_messages_to_get=4096)
            if not start:
                start = time.perf_counter()
            for frame in frames:
                if len(frame) == 1:
                    ended += 1
                else:
                    count += 1
        return count, time.perf_counter() - start

    def close(self) -> None:
        """Close the queue."""
        self.queue.close()


class Iceoryx(Transport):
    """iceoryx2 publish/subscribe of byte slices: loan, copy in, send; nothing may be dropped."""

    name = "iceoryx2"

    def __init__(self, size: int, writers: int, tag: str) -> None:
        super().__init__(size, writers, tag)
        iceoryx2.set_log_level(iceoryx2.LogLevel.Fatal)
        self.depth = max(4, min(1024, (8 << 20) // size))

    def _service(self) -> Any:
        self.node = iceoryx2.NodeBuilder.new().create(iceoryx2.ServiceType.Ipc)
        return (
            self.node.service_builder(iceoryx2.ServiceName.new(f"outfeed-bench-{self.tag}"))
            .publish_subscribe(iceoryx2.Slice[ctypes.c_uint8])
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(self.depth)
            .max_publishers(8)
            .open_or_create()
        )

    def connect(self) -> None:
        """Subscribe."""
        self.service = self._service()
        self.subscriber = self.service.subscriber_builder().create()

    def send(self, writer: int, seconds: float, go: Callable[[], object]) -> None:
        """Loan a sample, copy the body in, send it."""
        service = self._service()
        publisher = (
            service.publisher_builder()
            .initial_max_slice_len(self.size)
            .backpressure_strategy(iceoryx2.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )

        def send(body: bytes) -> None:
            sample = publisher.loan_slice_uninit(len(body))
            ctypes.memmove(sample.payload_ptr, body, len(body))
            sample.assume_init().send()

        go()
        send_for(seconds, self.burst, send, os.urandom(self.size))
        send(END)
        done = Path(tempfile.gettempdir()) / f"outfeed-bench-{self.tag}.done"
        while not done.exists():  # a publisher that goes takes its samples with it
            time.sleep(0.001)

    def receive(self) -> tuple[int, float]:
        """Poll, as iceoryx2's own benchmark does, and look at each payload."""
        count = ended = 0
        start = 0.0
        receive = self.subscriber.receive
        while ended < self.writers:
            sample = receive()
            if sample is None:
                continue
            if not start:
                start = time.perf_counter()
            if sample.payload().len() == 1:
                ended += 1
            else:
                count += 1
            sample.delete()
        elapsed = time.perf_counter() - start
        (Path(tempfile.gettempdir()) / f"outfeed-bench-{self.tag}.done").touch()
        return count, elapsed

    def close(self) -> None:
        """Drop the ports, the service and the node."""
        self.subscriber.delete()
        del self.service, self.subscriber, self.node
        (Path(tempfile.gettempdir()) / f"outfeed-bench-{self.tag}.done").unlink(missing_ok=True)


class Memcpy(Transport):
    """No transport: two C loops, memcpy into a shared area of a lane's size and a counter each way."""

    name = "C memcpy"

    def __init__(self, size: int, writers: int, tag: str) -> None:
        super().__init__(size, writers, tag)
        self.folder = tempfile.TemporaryDirectory(prefix="outfeed-bench-")
        library = Path(self.folder.name) / "memcpy.so"
        source = Path(__file__).with_name("memcpy.c")
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-std=gnu11", "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
        self.library = ctypes.CDLL(str(library))
        self.library.area.restype = ctypes.c_void_p
        self.library.copy_in.restype = ctypes.c_uint64
        self.slots = max(2, lane_bytes(size) // size)
        self.shared = ctypes.c_void_p(self.library.area(ctypes.c_uint64(self.slots * size + 4096)))

    def send(self, writer: int, seconds: float, go: Callable[[], object]) -> None:
        """The C loop that copies out."""
        body = ctypes.create_string_buffer(os.urandom(self.size), self.size)
        go()
        self.library.copy_out(
            self.shared,
            body,
            ctypes.c_uint64(self.size),
            ctypes.c_uint64(self.slots),
            ctypes.c_double(seconds),
        )

    def receive(self) -> tuple[int, float]:
        """The C loop that follows it."""
        elapsed = ctypes.c_double()
        count = self.library.copy_in(
            self.shared, ctypes.c_uint64(self.size), ctypes.c_uint64(self.slots), ctypes.byref(elapsed)
        )
        return int(count), elapsed.value

    def close(self) -> None:
        """Remove the library; the area goes with the process."""
        self.library.drop(self.shared, ctypes.c_uint64(self.slots * self.size + 4096))
        self.folder.cleanup()


def lane_bytes(size: int) -> int:
    """A lane for frames of `size` bytes: 1 MiB, or the least that takes such frames.

    The less memory a reader that only looks lets a writer go round in, the more of it is still in the caches.
    """
    return max(1 << 20, 4 * size)


PEERS: list[type[Transport]] = [Queue, Pipe, Zmq, FasterFifo, Iceoryx]


def _writer(transport: Transport, writer: int, seconds: float, barrier: Any) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        transport.send(writer, seconds, barrier.wait)


def _too_long(*_: object) -> None:
    raise TimeoutError


def _measure_once(kind: type[Transport], size: int, writers: int, seconds: float, tag: str) -> float:
    transport = kind(size, writers, tag)
    barrier = FORK.Barrier(writers + 1)
    children = [
        FORK.Process(target=_writer, args=(transport, index, seconds, barrier), daemon=True)
        for index in range(writers)
    ]
    for child in children:
        child.start()
    try:
        transport.connect()
        barrier.wait(LONGEST_RUN_S)
        count, elapsed = transport.receive()
        for child in children:
            child.join(LONGEST_RUN_S)
    finally:
        for child in children:
            child.kill()
            child.join()
        transport.close()
    return count / elapsed


def measure(kind: type[Transport], size: int, writers: int, seconds: float, tag: str) -> float:
    """Return frames per second of one run. One that hangs (a peer lost its last message) is done again."""
    previous = signal.signal(signal.SIGALRM, _too_long)
    try:
        for again in range(TRIES):
            signal.alarm(LONGEST_RUN_S)
            try:
                return _measure_once(kind, size, writers, seconds, f"{tag}-{again}")
            except TimeoutError:
                print(
                    f"{kind.name}: {size} B, {writers} writers: no end in {LONGEST_RUN_S} s", file=sys.stderr
                )
            finally:
                signal.alarm(0)
    finally:
        signal.signal(signal.SIGALRM, previous)
    raise TimeoutError(f"{kind.name} did not finish in {TRIES} runs of {size} B with {writers} writers")
