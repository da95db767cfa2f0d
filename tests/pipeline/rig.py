"""An instance whose scheduler and gateway are the test itself: it pushes the steps and reads the streams."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from outfeed.gateway.front import Front, Stream
from outfeed.ring.board import Role, State
from outfeed.ring.instance import leftovers, sweep_dead
from outfeed.sidecar import Abort, FinishReason, Generate, SchedulerPort
from outfeed.sink import Done, Frame, Item
from tokenizers import Tokenizer

from tests.eventually import LIMIT_S, until
from tests.instances import unique

from .commands import LAUNCHER, launched, shard_pids


class Rig:
    """One instance; the test pushes the steps and reads the streams."""

    def __init__(self, instance: str, tokenizer: Path, launcher: subprocess.Popen[str]) -> None:
        self.name = instance
        self.launcher = launcher
        self.tokenizer: Any = Tokenizer.from_file(str(tokenizer))
        self.port = SchedulerPort.attach(instance)
        self.front = Front.attach(instance, tokenizer=self.tokenizer)
        self.aborted: list[int] = []

    def submit(self, count: int = 1, **params: Any) -> list[Stream]:
        """Open streams; the scheduler has received them."""

        async def all_of_them() -> list[Stream]:
            body = {"input_ids": [[1]] * count, "sampling_params": {"max_new_tokens": 4096, **params}}
            return await self.front.submit(body)

        streams = asyncio.run(all_of_them())
        seen: set[int] = set()
        wanted = {stream.route for stream in streams}

        def received() -> bool:
            seen.update(self.receive())
            return wanted <= seen

        until("the scheduler to receive the requests", received)
        return streams

    def receive(self) -> list[int]:
        """Take in what the gateway sent; return the routes of new requests, note the aborts."""
        routes = []
        for message in self.port.recv():
            match message:
                case Generate(route=route):
                    routes.append(route)
                case Abort(route=route):
                    self.aborted.append(route)
        return routes

    def push(
        self,
        streams: list[Stream],
        ids: list[int],
        finish: FinishReason | None = None,
        port: SchedulerPort | None = None,
    ) -> None:
        """One step: every stream gets `ids`, from rank 0 unless another one's port is given."""
        routes = np.array([stream.route for stream in streams], dtype=np.uint64)
        counts = np.full(len(streams), len(ids), dtype=np.uint32)
        ends = dict.fromkeys(range(len(streams)), finish) if finish else None
        (port or self.port).push_tokens(routes, ids * len(streams), counts, finishes=ends, timeout=5)

    def adopt(self, *streams: Stream, port: SchedulerPort | None = None) -> None:
        """Have a rank, rank 0 unless another one's port is given, say that it runs these."""
        for stream in streams:
            (port or self.port).adopt(Generate(stream.route, stream.rid, b"\1\0\0\0", {}))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def kill_shard(self, shard: int, how: int = signal.SIGKILL) -> int:
        """Kill a shard; return its pid."""
        pid = shard_pids(self.name)[shard]
        os.kill(pid, how)
        return pid

    def stop_shards(self) -> None:
        """Stop every shard where it is, so that steps pile up behind each other."""
        for pid in shard_pids(self.name):
            os.kill(pid, signal.SIGSTOP)

    def go_on_shards(self) -> None:
        """Let stopped shards go on."""
        for pid in shard_pids(self.name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def let_the_shards_have_it(self) -> None:
        """Wait until every shard, or who takes its place, has written what was pushed so far."""
        until(
            "the shards to have every step",
            lambda: not any(consumer.lag for consumer in self.front.ring_stats()["step"].consumers),
        )

    def until_replaced(self, shard: int, pid: int) -> None:
        row = self.front.board.row(Role.SHARD, shard)
        until(
            f"shard {shard} to be replaced",
            lambda: (owner := row.owner) is not None and owner.pid != pid and row.state == State.RUNNING,
        )

    def close(self) -> None:
        self.front.close()
        self.port.close()


@contextmanager
def running_rig(
    name: str, tokenizer: Path, *options: str, launcher: Sequence[str] = LAUNCHER
) -> Iterator[Rig]:
    """Run an instance with its rig; afterwards both are gone, and the instance has left nothing."""
    instance = unique(name)
    with launched(instance, "--tokenizer", str(tokenizer), *options, launcher=launcher) as process:
        rig = Rig(instance, tokenizer, process)
        try:
            yield rig
        finally:
            rig.close()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(LIMIT_S)  # one that hangs fails here
    if process.returncode == -signal.SIGKILL:  # it could remove nothing: the next start does, or we
        until("what it left to be swept", lambda: (sweep_dead(), leftovers(instance))[1] == [])
    assert leftovers(instance) == []


def rest_of(stream: Stream) -> tuple[str, list[int], list[Item]]:
    """Read a stream to its end: its text, its ids and the items that ended it."""
    text = ""
    ids: list[int] = []
    ends: list[Item] = []
    while not ends:
        item = stream.source.receive_sync(timeout=60)
        match item:
            case Frame(event):
                text += event.text
                ids += event.ids.tolist()
            case Done(event):
                text += event.text
                ids += event.ids.tolist()
                ends.append(item)
            case _:
                ends.append(item)
    return text, ids, ends
