"""The replay scheduler: serves every request with the token ids of a real text.

It stands where an engine would: it receives requests through the port, runs up to `batch` of them at once,
pushes one step at a time at a set rate with 1 to k tokens per row, and honours max_new_tokens, stop token
ids, stop strings, stop patterns and aborts. Of several ranks each does so with its share of the requests.
What a request gets depends on its rid alone (`replay_start`), so whoever checks a stream can work out the
truth without asking.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..ring import logs
from ..ring.errors import RingError, RingFull
from ..ring.families import Family
from ..ring.finish import FinishReason
from ..ring.frames import Abort, Control, Generate, LogprobOptions
from ..ring.process import die_with_parent, fail, settle
from .port import SchedulerPort
from .replay_columns import logprob_families
from .replay_ranks import Sharing, sharing
from .replay_stops import Detokenize, Stops, prompt_tail
from .steps import MAX_ROWS

log = logging.getLogger(__name__)

PUSH_WAIT_S: Final = 0.5
COMMAND: Final = "outfeed-replay"
AHEAD_TOKENS: Final = 1024
"""Ids that are looked up at once, for steps to come: numpy's calls cost as much for one row's."""

_ANSWERS: Final = {"health": b'{"healthy":true}', "flush_cache": b'{"success":true}'}

Counts = NDArray[np.uint32] | NDArray[np.int64]


def replay_start(rid: str, corpus: int) -> int:
    """Return where in a corpus of `corpus` tokens the replay of request `rid` starts."""
    return zlib.crc32(rid.encode("utf-8", "surrogatepass")) % corpus


@dataclass(slots=True)
class ReplayOptions:
    """How the replay scheduler behaves.

    batch: rows per step at most. tokens_per_step: a row carries 1 to this many tokens. steps_per_second:
    None runs unthrottled. seed: decides the tokens of each row when there may be several.
    Raises ValueError when one is out of its range.
    """

    batch: int = 256
    tokens_per_step: int = 1
    steps_per_second: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.batch <= MAX_ROWS:
            raise ValueError(f"a batch of {self.batch} rows: give 1 to {MAX_ROWS}")
        if not 1 <= self.tokens_per_step <= 1024:
            raise ValueError(f"{self.tokens_per_step} tokens per step: give 1 to 1024")
        if self.steps_per_second is not None and not 0 < self.steps_per_second <= 1e6:
            raise ValueError(
                f"{self.steps_per_second} steps per second: give up to 1000000, or 0 for no limit"
            )
        if self.seed < 0:
            raise ValueError(f"a seed of {self.seed}: give 0 or more")


class Replay:
    """A scheduler over one port. `run` until told to stop; `step` is one decode step."""

    def __init__(
        self,
        port: SchedulerPort,
        corpus: NDArray[np.int32],
        tokenizer: Detokenize | None = None,
        options: ReplayOptions | None = None,
        shared: Sharing | None = None,
    ) -> None:
        if corpus.size == 0:
            raise ValueError("the replayed text has no tokens: give a text that is not empty")
        self._port = port
        self._shared = shared
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._options = options or ReplayOptions()
        self._stop: Callable[[], bool] = lambda: False
        self._random = np.random.default_rng(self._options.seed)
        self._waiting: dict[int, Generate] = {}  # route → request, oldest first
        self._at: dict[int, int] = {}  # route → its row in the arrays below
        self._routes = np.zeros(self._options.batch, dtype=np.uint64)
        self._position = np.zeros(self._options.batch, dtype=np.int64)
        self._left = np.zeros(self._options.batch, dtype=np.int64)
        self._limit = np.zeros(self._options.batch, dtype=np.int64)
        self._ones = np.ones(self._options.batch, dtype=np.int64)
        self._ahead: list[NDArray[np.int32]] = []  # ids of the next plain steps, the last one's first
        self._stops: dict[int, Stops] = {}  # route → stops, for the few requests that have any
        self._logprobs: dict[int, LogprobOptions] = {}  # route → what it wants beside its tokens

    @property
    def running(self) -> int:
        """Requests in the batch now."""
        return len(self._at)

    def run(self, stop: Callable[[], bool]) -> None:
        """Serve until `stop()` is true or the instance is gone."""
        self._stop = stop
        rate = self._options.steps_per_second
        due = time.monotonic()
        while not stop() and self._port.alive:
            self.receive()
            if not self._at:
                self._wait(0.5)
                due = time.monotonic()
                continue
            self.step()
            if rate is not None:
                due = max(due + 1.0 / rate, time.monotonic() - 1.0)
                while (rest := due - time.monotonic()) > 0 and not stop():
                    time.sleep(min(rest, 0.5))

    def receive(self) -> None:
        """Take in what the gateways sent, then fill the batch from what waits."""
        received = self._port.recv()
        for message in received if self._shared is None else self._shared.share(self._port, received):
            match message:
                case Generate():
                    self._waiting[message.route] = message
                case Abort(route=route):
                    self._abort(route)
                case Control():
                    self._answer(message)
        while self._waiting and len(self._at) < self._options.batch:
            self._admit(self._waiting.pop(next(iter(self._waiting))))

    def _wait(self, timeout: float) -> None:
        if self._shared is None:
            self._port.wait(timeout)
        else:
            self._shared.wait(self._port, timeout)

    def step(self) -> None:
        """Push one decode step for every running request."""
        rows = len(self._at)
        if not rows:
            return
        if self._ahead or self._look_ahead(rows):
            ids = self._ahead.pop()
            self._push(self._routes[:rows], ids)
            return
        counts, ids = self._next_tokens(rows)
        finishes = self._finishes(rows, counts)
        if self._stops:
            counts, ids = self._apply_stops(counts, ids, finishes)
        families = self._families(counts, ids) if self._logprobs else None
        plain = None if self._options.tokens_per_step == 1 else counts
        self._push(self._routes[:rows], ids, plain, finishes, families)
        self._position[:rows] += counts
        self._left[:rows] -= counts
        for route in [int(self._routes[row]) for row in finishes]:
            self._leave(route)

    def _look_ahead(self, rows: int) -> bool:
        """Look up the ids of the next steps; whether there is a plain one: one token a row, and nobody ends.

        The rows are as far then as they will be behind these steps; `_stay` takes back those not pushed.
        """
        if self._options.tokens_per_step > 1 or self._stops or self._logprobs:
            return False
        steps = min(int(self._left[:rows].min()) - 1, max(1, AHEAD_TOKENS // rows))
        if steps < 1:
            return False
        position = self._position[:rows]
        index = (position + np.arange(steps)[::-1, np.newaxis]) % self._corpus.size
        self._ahead = list(self._corpus[index])
        position += steps
        self._left[:rows] -= steps
        return True

    def _stay(self) -> None:
        """Take back what was looked up and not pushed: the batch is about to change."""
        rows = len(self._at)
        self._position[:rows] -= len(self._ahead)
        self._left[:rows] += len(self._ahead)
        self._ahead.clear()

    def _next_tokens(self, rows: int) -> tuple[Counts, NDArray[np.int32]]:
        most = self._options.tokens_per_step
        position = self._position[:rows]
        if most == 1:
            return self._ones[:rows], self._corpus[position % self._corpus.size]
        drawn = self._random.integers(1, most + 1, size=rows)
        counts = np.minimum(drawn, self._left[:rows]).astype(np.uint32)
        ends = np.cumsum(counts, dtype=np.int64)
        index = np.arange(ends[-1]) + np.repeat(position - (ends - counts), counts)
        return counts, self._corpus[index % self._corpus.size]

    def _finishes(self, rows: int, counts: Counts) -> dict[int, FinishReason]:
        done = np.flatnonzero(self._left[:rows] <= counts)
        return {int(row): FinishReason.length(int(self._limit[row])) for row in done}

    def _apply_stops(
        self, counts: Counts, ids: NDArray[np.int32], finishes: dict[int, FinishReason]
    ) -> tuple[Counts, NDArray[np.int32]]:
        counts = counts.copy()
        ends = np.cumsum(counts, dtype=np.int64)
        keep = np.ones(len(ids), dtype=bool)
        for route, stops in self._stops.items():
            row = self._at[route]
            start, end = int(ends[row] - counts[row]), int(ends[row])
            kept, reason = stops.check(ids[start:end].tolist(), self._tokenizer)
            if reason is not None:
                finishes[row] = reason
                keep[start + kept : end] = False
                counts[row] = kept
        return counts, ids if keep.all() else ids[keep]

    def _families(self, counts: Counts, ids: NDArray[np.int32]) -> list[Family | None]:
        ends = np.cumsum(counts, dtype=np.int64)
        wanting = sorted((self._at[route], options) for route, options in self._logprobs.items())
        return logprob_families(
            [
                (row, options, int(self._position[row]), ids[ends[row] - counts[row] : ends[row]])
                for row, options in wanting
            ]
        )

    def _push(
        self,
        routes: NDArray[np.uint64],
        ids: NDArray[np.int32],
        counts: Counts | None = None,
        finishes: dict[int, FinishReason] | None = None,
        families: Sequence[Family | None] | None = None,
    ) -> None:
        self._until_taken(
            lambda: self._port.push_tokens(
                routes, ids, counts, finishes=finishes, families=families, timeout=PUSH_WAIT_S
            )
        )

    def _until_taken(self, push: Callable[[], None]) -> None:
        """Push until the step ring has room for it, or nobody wants it any more."""
        while True:
            try:
                push()
                return
            except RingFull:
                if self._stop() or not self._port.alive:
                    return
                log.warning("the step ring has been full for %.1f s; pushing again", PUSH_WAIT_S)

    def _admit(self, request: Generate) -> None:
        limit = request.sampling_params.get("max_new_tokens")
        limit = self._corpus.size if limit is None else int(limit)  # no limit: the text once
        if limit == 0:
            self._push(
                np.array([request.route], dtype=np.uint64),
                np.empty(0, dtype=np.int32),
                np.zeros(1, dtype=np.uint32),
                {0: FinishReason.length(0)},
            )
            return
        self._stay()
        row = len(self._at)
        self._at[request.route] = row
        self._routes[row] = request.route
        self._position[row] = replay_start(request.rid, self._corpus.size)
        self._left[row] = self._limit[row] = limit
        if request.logprobs.return_logprob or request.logprobs.top_logprobs_num:
            self._logprobs[request.route] = request.logprobs
        if stops := Stops.of(request.sampling_params):
            stops.prompt = prompt_tail(request.input_ids, self._tokenizer)
            self._stops[request.route] = stops

    def _abort(self, route: int) -> None:
        if route in self._at:
            self._leave(route)
        else:
            self._waiting.pop(route, None)

    def _leave(self, route: int) -> None:
        """Take a request out of the batch; the last row moves into its place."""
        self._stay()
        row = self._at.pop(route)
        self._stops.pop(route, None)
        self._logprobs.pop(route, None)
        last = len(self._at)
        if row != last:
            for column in (self._routes, self._position, self._left, self._limit):
                column[row] = column[last]
            self._at[int(self._routes[row])] = row

    def _answer(self, message: Control) -> None:
        answer = _ANSWERS.get(message.op)
        if answer is not None:
            self._until_taken(lambda: self._port.push_result(message.route, answer, timeout=PUSH_WAIT_S))
            return
        why = f"control operation {message.op!r} is unknown here: use health or flush_cache"
        self._until_taken(
            lambda: self._port.push_error(message.route, 400, "BadRequest", why, timeout=PUSH_WAIT_S)
        )


def load_text(path: str) -> str:
    """Read a text to replay.

    Raises:
        ValueError: the file is missing, not UTF-8 or has nothing in it; the message says which and where.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the text {path}: {error.strerror}; give a UTF-8 text file") from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the text {path} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start} "
            f"({error.reason}); convert it, for example with iconv"
        ) from None
    if not text.strip():
        raise ValueError(f"the text {path} is empty: give a text with something to replay")
    return text


def load_tokenizer(path: str) -> Any:
    """Load a tokenizer.json.

    Raises:
        ValueError: it cannot be loaded; the message says which and why.
    """
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(Path(path).read_bytes())
    except BaseException as error:  # the library raises plain Exception, whatever is wrong, or it crashes
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ValueError(
            f"cannot load the tokenizer {path}: {error}; give the instance's tokenizer.json"
        ) from error


def load_corpus(tokenizer: Any, text: str) -> NDArray[np.int32]:
    """Return the token ids of a text, i32[tokens], without special tokens added around it."""
    return np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        usage="%(prog)s --instance NAME --tokenizer PATH --text FILE [options]",
        description="Serve an instance by replaying a text.",
    )
    parser.add_argument("--instance", required=True, metavar="NAME", help="the running instance to serve")
    parser.add_argument("--tokenizer", required=True, metavar="PATH", help="the instance's tokenizer.json")
    parser.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text to replay")
    parser.add_argument(
        "--batch", type=int, default=256, metavar="N", help="rows per step at most (default 256)"
    )
    parser.add_argument(
        "--tokens-per-step",
        type=int,
        default=1,
        metavar="N",
        help="a row carries 1 to this many tokens (default 1)",
    )
    parser.add_argument(
        "--steps-per-second",
        type=float,
        default=0.0,
        metavar="X",
        help="decode steps per second at most (default 0: as fast as it goes)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="decides how many tokens each row carries, when more than 1 is allowed (default 0)",
    )
    parser.add_argument(
        "--rank",
        type=int,
        default=0,
        metavar="K",
        help="which of the instance's ranks to be (default 0, which receives the requests and shares them "
        "with the others)",
    )
    parser.add_argument("--die-with-parent", type=int, metavar="PID", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the replay scheduler as a process of its own, until SIGTERM or the instance is gone.

    Returns 0, or 2 when it cannot start: an option, a file or the instance is not as it must be.
    """
    settle()
    args = _parse(argv)
    logs.start("replay")
    if args.die_with_parent:
        die_with_parent(args.die_with_parent)
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)

    try:
        options = ReplayOptions(args.batch, args.tokens_per_step, args.steps_per_second or None, args.seed)
        tokenizer = load_tokenizer(args.tokenizer)
        corpus = load_corpus(tokenizer, load_text(args.text))
        with ExitStack() as ending:
            port = ending.enter_context(SchedulerPort.attach(args.instance, rank=args.rank))
            shared = sharing(port, args.rank)
            if shared is not None:
                ending.callback(shared.close)
            Replay(port, corpus, tokenizer, options, shared).run(lambda: stopped)
    except (ValueError, IndexError, RingError) as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        return fail(COMMAND, error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
