"""Chaos: hurts a running pipeline in every way we know, and compares every stream with the truth.

A launcher with its shards, a replay scheduler and gateway processes (two, with 60 streams each) are at work.
Meanwhile, from a seed: shards are killed (one, two at once, two in a row), stopped until they count as hung,
stopped for a moment; schedulers (of several ranks one at a time, or rank 0 at once with a gateway) and
gateways are killed or stopped for a moment; /dev/shm is filled to the last byte; clients vanish. The next
hurt comes when the last one has healed.
At the end every stream must have been told the truth byte for byte, or, where its own client, gateway or
scheduler died, must have ended cleanly, and nothing may be live that no client waits for: a request in a
gateway's slots, a shard's or the scheduler's, which would stay there. The plan of hurts follows from the seed
alone.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from chaos_gateway import DROP_SHARE, Marks
from chaos_tally import Gateway, Tally
from options import MAX_S, MAX_SEED, between
from outfeed.ring.board import MAX_EACH, Board, Role, State
from outfeed.ring.instance import Instance
from outfeed.shards.launcher import LaunchError, find_tokenizer
from outfeed.sidecar.replay import load_text
from pipeline import Pipeline, PipelineError, demo_tokenizer
from rich.console import Console
from rich.table import Table
from texts import MULTILINGUAL
from top_sample import Watch

HEAL_LIMIT_S = 30.0
GATEWAY_LIMIT_S = 180.0
"""How long a gateway may take to start: a second of CPU, which may be half a minute where twenty others want
it, too. One that ends meanwhile is seen at once."""
HEARTBEAT_LIMIT_S = 1.0
LEAK_LIMIT_S = 20.0
SHM = Path("/dev/shm")
SHM_BYTES = 768 << 20
WARM_S = 20.0
STREAMS_EACH = 60
MAX_KILLS = 1_000_000

# (weight, name): what may be done to a pipeline. `--only shard` keeps those that hurt shards alone.
Hurts = tuple[tuple[int, str], ...]
SHARD_HURTS: Hurts = ((50, "kill"), (8, "kill two"), (8, "kill twice"), (4, "hang"), (12, "pause"))
OTHER_HURTS: Hurts = (
    (3, "scheduler kill"),
    (4, "scheduler pause"),
    (4, "gateway kill"),
    (4, "gateway pause"),
    (3, "fill shm"),
)
RANK_HURTS: Hurts = ((3, "rank 0 and gateway kill"),)
"""What is done to several ranks as well."""


class Chaos:
    """One run. `run` does it all and returns the figures."""

    def __init__(self, args: argparse.Namespace, marks: Path) -> None:
        self.args = args
        self.random = random.Random(args.seed)
        self.instance = f"chaos-{os.getpid()}"
        self.tokenizer = find_tokenizer(args.tokenizer or demo_tokenizer())
        self.marks_path = marks
        marks.touch()
        self.marks = Marks(str(marks), args.shards, args.gateways)
        self.tally = Tally()
        self.gateways: dict[int, Gateway] = {}
        self.selector = selectors.DefaultSelector()
        self.hurts: Counter[str] = Counter()
        self.shard_kills = 0
        self.recovery_ms: list[float] = []
        self.rss: dict[tuple[str, int], list[float]] = {}
        self.began = time.monotonic()
        self.sampled = 0.0
        self.left_out: list[str] = []
        self.leaked: dict[str, int] = {}
        self.seen: dict[str, Any] | None = None
        if not args.private_shm:
            self.left_out.append("fill shm: needs a /dev/shm of its own (root and unshare)")

    def run(self) -> dict[str, Any]:
        """Run until the kills or the seconds asked for are reached; return what --json prints."""
        args = self.args
        launch = [f"--shards={args.shards}", f"--readers={args.gateways}", f"--tokenizer={self.tokenizer}"]
        launch += [f"--ranks={args.ranks}", f"--heartbeat-limit={HEARTBEAT_LIMIT_S}"]
        launch += [f"--{ring}-bytes={1 << 22}" for ring in ("request", "control", "step", "egress")]
        replay = [f"--tokenizer={self.tokenizer}", f"--text={args.text}", f"--seed={args.seed}"]
        replay += [f"--batch={STREAMS_EACH * args.gateways}", "--tokens-per-step=3", "--steps-per-second=100"]
        pids: set[int] = set()
        with Pipeline(self.instance, launch, replay, args.ranks) as pipeline:
            self.pipeline = pipeline
            opened = Instance.attach(self.instance)
            self.board: Board = opened.board
            for reader in range(args.gateways):
                self._start_gateway(reader)
            all_ready = lambda: all(g.ready for g in self.gateways.values())  # noqa: E731
            self._until("all gateways to be ready", all_ready, GATEWAY_LIMIT_S)
            self.began = time.monotonic()
            while not self._done():
                self._hurt()
                self._listen_for(self.random.uniform(0.0, 0.25))
            self._listen_for(1.0)
            self._finish()
            pids = self._pids()
            opened.close()
        return self._figures(pids)

    def _done(self) -> bool:
        kills, seconds = self.args.kills, self.args.seconds
        if kills is not None:
            return self.shard_kills >= int(kills)
        return time.monotonic() - self.began >= float(seconds)

    # -- hurting ------------------------------------------------------------------------------------

    def _hurt(self) -> None:
        choices = SHARD_HURTS
        if self.args.only != "shard":
            choices += OTHER_HURTS + (RANK_HURTS if self.args.ranks > 1 else ())
        if not self.args.private_shm:
            choices = tuple(choice for choice in choices if choice[1] != "fill shm")
        (name,) = self.random.choices([name for _, name in choices], [weight for weight, _ in choices])
        shard = self.random.randrange(self.args.shards)
        pause = self.random.uniform(0.02, 0.3)
        self.hurts[name] += 1
        match name:
            case "kill":
                self._kill_shards([shard])
            case "kill two":
                self._kill_shards(sorted({shard, (shard + 1) % self.args.shards}))
            case "kill twice":
                self._kill_shards([shard])
                self._kill_shards([shard])
            case "hang":
                self._kill_shards([shard], signal.SIGSTOP)
            case "pause":
                self._pause(self.board.row(Role.SHARD, shard).owner.pid, pause)  # type: ignore[union-attr]
            case "scheduler kill":
                self._kill_rank(self._rank())
            case "scheduler pause":
                self._pause(self.pipeline.schedulers[self._rank()].pid, pause)
            case "gateway kill":
                self._kill_gateway(self.random.randrange(self.args.gateways))
            case "rank 0 and gateway kill":
                self._kill_gateway(self.random.randrange(self.args.gateways), and_rank_0=True)
            case "gateway pause":
                self._pause(self.gateways[self.random.randrange(self.args.gateways)].process.pid, pause)
            case "fill shm":
                self._fill_shm(pause)

    def _kill_shards(self, shards: list[int], how: signal.Signals = signal.SIGKILL) -> None:
        """Kill (or stop for good) shards and wait until each has delivered a step pushed after that."""
        now = {}
        for shard in shards:
            self._until("a shard to kill", functools.partial(self._runs, shard))
            now[shard] = time.monotonic_ns()
            self.marks.set_hurt(shard, now[shard])
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.board.row(Role.SHARD, shard).owner.pid, how)  # type: ignore[union-attr]
            self.shard_kills += 1
        for shard in shards:
            healed = functools.partial(self._healed, shard, now[shard])
            self._until(f"shard {shard} to deliver again", healed)
            first = min(at for hurt, at in self._seen(shard) if hurt == now[shard])
            if how == signal.SIGKILL:
                self.recovery_ms.append((first - now[shard]) / 1e6)

    def _runs(self, shard: int) -> bool:
        row = self.board.row(Role.SHARD, shard)
        return row.state == State.RUNNING and row.alive

    def _seen(self, shard: int) -> list[tuple[int, int]]:
        return [self.marks.healed(reader, shard) for reader in range(self.args.gateways)]

    def _healed(self, shard: int, hurt: int) -> bool:
        return any(seen == hurt for seen, _ in self._seen(shard))

    def _pause(self, pid: int, seconds: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self._listen_for(seconds)
            os.kill(pid, signal.SIGCONT)

    def _rank(self) -> int:
        # One rank is not drawn for: its plans stay what they were.
        return self.random.randrange(self.args.ranks) if self.args.ranks > 1 else 0

    def _kill_rank(self, rank: int) -> None:
        """Kill a rank of the scheduler, and wait until streams end again and the next one has work."""
        killed = self.pipeline.schedulers[rank]
        killed.kill()
        killed.wait()
        before = self._ended()
        self.pipeline.start_scheduler(rank)
        row = self.board.row(Role.SCHEDULER, rank)
        pushed = row.get("rows")
        self._until("streams to end again after the scheduler's death", lambda: self._ended() > before + 5)
        self._until(f"scheduler rank {rank} to have work again", lambda: row.get("rows") > pushed)

    def _ended(self) -> int:
        return sum(self.tally.ends.values())

    def _kill_gateway(self, reader: int, *, and_rank_0: bool = False) -> None:
        """Kill a gateway, at once with rank 0 of the scheduler or alone, and wait until another is ready."""
        gateway = self.gateways.pop(reader)
        gateway.process.kill()
        if and_rank_0:
            self.pipeline.schedulers[0].kill()
        gateway.process.wait()
        self._drain(gateway)
        self.tally.bury(gateway)
        self._start_gateway(reader, gateway.life + 1)
        if and_rank_0:
            self._kill_rank(0)
        self._until("the new gateway to be ready", lambda: self.gateways[reader].ready, GATEWAY_LIMIT_S)

    def _fill_shm(self, seconds: float) -> None:
        """Take every byte that /dev/shm has left, for a while."""
        path = SHM / "chaos-fill"
        free = shutil.disk_usage(SHM).free
        with path.open("wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, free)
        self._kill_shards([self.random.randrange(self.args.shards)])
        self._listen_for(seconds)
        path.unlink()

    # -- gateways -----------------------------------------------------------------------------------

    def _start_gateway(self, reader: int, life: int = 0) -> None:
        args = self.args
        numbers = {"reader": reader, "life": life, "gateways": args.gateways, "shards": args.shards}
        numbers |= {"streams": STREAMS_EACH, "seed": args.seed, "die-with-parent": os.getpid()}
        command = [sys.executable, str(Path(__file__).with_name("chaos_gateway.py"))]
        command += ["--instance", self.instance, "--tokenizer", self.tokenizer, "--text", args.text]
        drop_share = 0 if args.only == "shard" else DROP_SHARE
        command += ["--marks", str(self.marks_path), "--drop-share", str(drop_share)]
        command += [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.pipeline.said, text=True
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        gateway = Gateway(reader, life, process)
        self.gateways[reader] = gateway
        self.selector.register(process.stdout, selectors.EVENT_READ, gateway)

    def _listen_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._listen(min(left, 0.05))

    def _listen(self, timeout: float) -> None:
        for key, _ in self.selector.select(timeout):
            self._take(key.data)
        now = time.monotonic()
        if now - self.sampled > 2.0:
            self.sampled = now
            self._sample_rss()
            self.pipeline.check()
            self._check_gateways()

    def _check_gateways(self) -> None:
        for reader, gateway in self.gateways.items():
            if (status := gateway.process.poll()) is not None:
                raise PipelineError(
                    f"gateway {reader} ended with status {status}: {self.pipeline.last_words()}"
                )

    def _take(self, gateway: Gateway) -> bool:
        """Take in what a gateway has said; False at its end."""
        assert gateway.process.stdout is not None
        data = os.read(gateway.process.stdout.fileno(), 1 << 16).decode()
        *lines, gateway.unread = (gateway.unread + data).split("\n")
        for line in lines:
            self.tally.hear(gateway, line)
        return bool(data)

    def _drain(self, gateway: Gateway) -> None:
        assert gateway.process.stdout is not None
        self.selector.unregister(gateway.process.stdout)
        while self._take(gateway):
            pass
        gateway.process.stdout.close()
        if gateway.process.stdin is not None:
            gateway.process.stdin.close()

    def _until(self, what: str, condition: Callable[[], bool], limit: float = HEAL_LIMIT_S) -> None:
        deadline = time.monotonic() + limit
        while not condition():
            if time.monotonic() > deadline:
                self._check_gateways()
                raise PipelineError(
                    f"waited {limit:.0f} s in vain for {what}; seed {self.args.seed}; the last "
                    f"that was said: {self.pipeline.last_words()}"
                )
            self._listen(0.002)

    def _finish(self) -> None:
        """Let every stream come to its end, then the gateways."""
        for gateway in self.gateways.values():
            assert gateway.process.stdin is not None
            gateway.process.stdin.write("finish\n")
            gateway.process.stdin.flush()
        deadline = time.monotonic() + 90.0
        while any(gateway.hung is None for gateway in self.gateways.values()) and time.monotonic() < deadline:
            self._listen(0.05)
        if any(gateway.hung for gateway in self.gateways.values()):
            self._look()
        else:
            self.leaked = self._left_live()
        for gateway in self.gateways.values():
            assert gateway.process.stdin is not None
            gateway.process.stdin.close()
            gateway.process.wait(30)
            self._drain(gateway)

    def _left_live(self) -> dict[str, int]:
        """Return how many requests each process still has, once they are as few as they will be."""
        deadline = time.monotonic() + LEAK_LIMIT_S
        while left := self._live():
            if time.monotonic() > deadline:
                self._look()
                break
            self._listen(0.05)
        return left

    def _live(self) -> dict[str, int]:
        roles = (Role.SCHEDULER, Role.SHARD, Role.READER)
        rows = [row for role in roles for row in self.board.rows(role) if row.alive]
        return {f"{row.role}{row.index}": live for row in rows if (live := row.get("live"))}

    def _look(self) -> None:
        """Keep what the instance looks like while something hangs: over a second, for the rates."""
        watch = Watch(Instance.attach(self.instance))
        watch.sample()
        self._listen_for(1.0)
        self.seen = watch.sample().to_json()
        watch.close()

    # -- figures ------------------------------------------------------------------------------------

    def _processes(self) -> Iterator[tuple[str, int]]:
        assert self.pipeline.launcher is not None
        yield "launcher", self.pipeline.launcher.pid
        for scheduler in self.pipeline.schedulers.values():
            yield "scheduler", scheduler.pid
        for row in self.board.rows(Role.SHARD):
            if row.owner is not None:
                yield "shard", row.owner.pid
        for gateway in self.gateways.values():
            yield "gateway", gateway.process.pid

    def _sample_rss(self) -> None:
        for role, pid in self._processes():
            with contextlib.suppress(OSError, StopIteration, ValueError):
                lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
                kib = next(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:",)))
                self.rss.setdefault((role, pid), []).append(kib / 1024)

    def _rss_growth(self) -> dict[str, float]:
        """Return, per role, the most that one process's own memory grew after its first WARM_S seconds."""
        skip = int(WARM_S / 2.0)
        growth: dict[str, float] = {}
        for (role, _), samples in self.rss.items():
            warm = samples[skip:]
            grown = warm[-1] - warm[0] if len(warm) > 1 else 0.0
            growth[role] = round(max(growth.get(role, 0.0), grown), 2)
        return growth

    def _pids(self) -> set[int]:
        return {pid for _, pid in self._processes()}

    def _figures(self, pids: set[int]) -> dict[str, Any]:
        ends = self.tally.ends
        hung = sum(gateway.hung or 0 for gateway in self.gateways.values())
        clean = sum(ends[name] for name in ("dropped", "scheduler_gone", "gateway_gone"))
        recovery = np.array(self.recovery_ms or [0.0])
        leaked = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        result: dict[str, Any] = {
            "seed": self.args.seed,
            "seconds": round(time.monotonic() - self.began, 1),
            "shard_kills": self.shard_kills,
            "hurts": dict(self.hurts),
            "streams": self.tally.started,
            "identical": ends["identical"],
            "failed_cleanly": clean,
            "ended": dict(ends),
            "hung": hung,
            "mismatched": ends["mismatched"],
            "double_ended": ends["double_ended"],
            "leaked_requests": sum(self.leaked.values()),
            "leaked_segments": len(self.pipeline.leaked_segments()),
            "leaked_processes": len(leaked),
            "recovery_ms": {
                "p50": round(float(np.percentile(recovery, 50)), 1),
                "p99": round(float(np.percentile(recovery, 99)), 1),
                "max": round(float(recovery.max()), 1),
            },
            "rss_growth_mb": self._rss_growth(),
            "left_out": self.left_out,
            "faults": [
                *self.tally.faults[:20],
                *(f"{name}: {live} live" for name, live in self.leaked.items()),
            ],
            "instance": self.seen,
        }
        bad = ("hung", "mismatched", "double_ended", "leaked_requests", "leaked_segments", "leaked_processes")
        accounted = result["identical"] + result["failed_cleanly"] == result["streams"]
        result["ok"] = accounted and not any(result[name] for name in bad)
        return result


def in_private_shm(argv: Sequence[str]) -> int | None:
    """Run this script again where /dev/shm is its own, so that it may be filled; None if that cannot be."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return None
    mount = f"mount -t tmpfs -o size={SHM_BYTES} tmpfs /dev/shm"
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True, check=False).returncode:
        return None
    again = [sys.executable, __file__, *argv, "--private-shm"]
    command = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "chaos", *again]
    return subprocess.run(command, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Run chaos from the command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="chaos", description=(__doc__ or "").partition("\n")[0])
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--kills", type=between(1, MAX_KILLS), help="run until so many shards were killed (default 30)"
    )
    length.add_argument("--seconds", type=between(0.0, MAX_S), help="run for so long")
    parser.add_argument("--seed", type=between(0, MAX_SEED), default=1)
    parser.add_argument("--only", choices=["shard"], help="hurt nothing but shards")
    each = between(1, MAX_EACH)
    parser.add_argument("--shards", type=each, default=3)
    parser.add_argument("--gateways", type=each, default=2)
    parser.add_argument("--ranks", type=each, default=1, help="scheduler processes (default 1)")
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="a tokenizer.json or its folder (default: deepseek)"
    )
    parser.add_argument(
        "--text", metavar="FILE", default=str(MULTILINGUAL), help="UTF-8 text (default: the demo's)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--private-shm", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.kills is None and args.seconds is None:
        args.kills = 30
    try:
        load_text(args.text)
    except ValueError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 2
    if not args.private_shm and args.only is None and (code := in_private_shm(words)) is not None:
        return code
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = Chaos(args, Path(folder) / "marks").run()
        except (LaunchError, PipelineError) as error:
            print(f"chaos: {error}", file=sys.stderr)
            return 2 if isinstance(error, LaunchError) else 1
    if args.json:
        print(json.dumps(result))
    else:
        table = Table(title="Outfeed chaos", show_header=False)
        for name, value in result.items():
            table.add_row(name, str(value))
        Console().print(table)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
