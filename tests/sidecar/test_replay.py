"""The replay scheduler: what it gives each request, and when it stops."""

import contextlib
import random
import re
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outfeed.ingress.sampling import SamplingParams
from outfeed.ring.batch import decode_batch
from outfeed.ring.frames import Abort, Control, ErrorFrame, Generate, LogprobOptions, Result, Tag, decode
from outfeed.ring.route import make_route
from outfeed.sidecar import FinishReason, RingFull, SchedulerPort
from outfeed.sidecar import replay as under_test
from outfeed.sidecar.replay import Replay, ReplayOptions, replay_start
from outfeed.sidecar.replay_columns import replay_logprobs
from outfeed.sidecar.replay_stops import Stops

from tests.eventually import LIMIT_S, until

from .conftest import Bench

CORPUS = np.arange(1000, 1200, dtype=np.int32)


class Letters:
    """A tokenizer whose token n is the letter n modulo 26."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + token % 26) for token in ids)


def route(slot: int) -> int:
    return make_route(0, 0, slot, 1)


def generate(slot: int, logprobs: LogprobOptions | None = None, **params: Any) -> Generate:
    prompt = array("i", [7, 8]).tobytes()
    return Generate(route(slot), f"rid-{slot}", prompt, params, logprobs or LogprobOptions())


def expected(slot: int, count: int) -> list[int]:
    start = replay_start(f"rid-{slot}", len(CORPUS))
    return [int(CORPUS[(start + k) % len(CORPUS)]) for k in range(count)]


@pytest.fixture
def port(bench: Bench) -> Iterator[SchedulerPort]:
    with SchedulerPort.attach(bench.name) as port:
        yield port


def serve(bench: Bench, replay: Replay, steps: int = 100) -> dict[int, tuple[list[int], FinishReason | None]]:
    """Let it run; return each slot's ids of these steps and finish reason as a shard sees them."""
    got: dict[int, tuple[list[int], FinishReason | None]] = {}
    started: dict[int, int] = {}
    replay.receive()
    for _ in range(steps):
        replay.step()
        for _, tag, body in bench.shard.read():
            assert tag == Tag.BATCH
            batch = decode_batch(body)
            ends, at = dict(batch.finishes), 0
            for row in range(batch.rows):
                slot, count = int(batch.routes[row]) & 0xFFFFF, int(batch.counts[row])
                ids, before = got.get(slot, ([], None))
                assert before is None, "a row after its request had ended"
                first = int(batch.first[row])
                assert first == started.setdefault(slot, first) + len(ids)
                got[slot] = (ids + batch.ids[at : at + count].tolist(), ends.get(row))
                at += count
        bench.shard.release()
        replay.receive()
    return got


@pytest.mark.parametrize("tokens_per_step", [1, 3, 16])
def test_each_request_gets_its_place_in_the_text_up_to_its_limit(
    bench: Bench, port: SchedulerPort, tokens_per_step: int
) -> None:
    replay = Replay(port, CORPUS, options=ReplayOptions(tokens_per_step=tokens_per_step))
    bench.send(*(generate(slot, max_new_tokens=limit) for slot, limit in ((1, 5), (2, 1), (3, 40), (4, 0))))
    assert serve(bench, replay) == {
        slot: (expected(slot, limit), FinishReason.length(limit))
        for slot, limit in ((1, 5), (2, 1), (3, 40), (4, 0))
    }
    assert replay.running == 0


def test_a_request_without_a_limit_gets_the_text_once(bench: Bench, port: SchedulerPort) -> None:
    replay = Replay(port, CORPUS, options=ReplayOptions(tokens_per_step=16))
    bench.send(generate(1, max_new_tokens=None))
    assert serve(bench, replay) == {1: (expected(1, len(CORPUS)), FinishReason.length(len(CORPUS)))}


def test_who_comes_and_goes_moves_nobody_else_in_the_text(bench: Bench, port: SchedulerPort) -> None:
    replay = Replay(port, CORPUS)
    bench.send(generate(1, max_new_tokens=30), generate(2))
    before = serve(bench, replay, steps=5)
    bench.send(generate(3, max_new_tokens=9), Abort(route(2)))
    after = serve(bench, replay, steps=40)
    assert before == {slot: (expected(slot, 5), None) for slot in (1, 2)}
    assert after == {
        1: (expected(1, 30)[5:], FinishReason.length(30)),
        3: (expected(3, 9), FinishReason.length(9)),
    }


def test_more_requests_than_the_batch_holds_wait_their_turn(bench: Bench, port: SchedulerPort) -> None:
    replay = Replay(port, CORPUS, options=ReplayOptions(batch=2))
    bench.send(*(generate(slot, max_new_tokens=3) for slot in range(7)))
    replay.receive()
    assert replay.running == 2
    got = serve(bench, replay)
    assert got == {slot: (expected(slot, 3), FinishReason.length(3)) for slot in range(7)}


@pytest.mark.parametrize("tokens_per_step", [1, 5])
def test_stops_end_a_request(bench: Bench, port: SchedulerPort, tokens_per_step: int) -> None:
    replay = Replay(port, CORPUS, Letters(), ReplayOptions(tokens_per_step=tokens_per_step))
    text = Letters().decode(expected(2, 40))
    bench.send(
        generate(1, max_new_tokens=40, stop_token_ids=[expected(1, 40)[12], 5]),
        generate(2, max_new_tokens=40, stop_strs=["no such", text[9:13]], stop_str_max_len=7),
        generate(3, max_new_tokens=40, stop_regex_strs=["[" + Letters().decode(expected(3, 9)[8:9]) + "]"]),
        generate(4, max_new_tokens=9, stop_token_ids=[1], stop_strs=["no such"]),
    )
    got = serve(bench, replay)
    assert got[1] == (expected(1, 13), FinishReason.stop(expected(1, 40)[12]))
    assert got[2][1] == FinishReason.stop(text[9:13])
    assert text[9:13] in Letters().decode(got[2][0])
    assert got[2][0] == expected(2, len(got[2][0]))
    assert got[3][1] is not None
    assert got[3][1].type == "stop"
    assert got[4] == (expected(4, 9), FinishReason.length(9))


class Words:
    """A tokenizer whose tokens are words, spaces and pieces of words."""

    WORDS = ("s", "word", "foo", "x", " ", "\n", "lorem ", "ipsum ")

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.WORDS[token] for token in ids)


@pytest.mark.parametrize(
    "pattern", [r"\bword\b", r"^foo", r"\Ax", r"(?<!x)foo", r"(?:^|\n)foo", r"\bs\b", "foo"]
)
def test_a_pattern_is_found_where_it_is_in_the_text(pattern: str) -> None:
    """And nowhere else: what the scheduler looks at begins in the middle of it."""
    rng = random.Random(pattern)
    sampling = SamplingParams.parse({"stop_regex": pattern, "max_new_tokens": 400}, vocab_size=9)
    params = sampling.to_scheduler()
    for _ in range(40):
        # Something that is nearly a match, far behind, and perhaps a real one at last.
        ids = [*rng.choices(range(8), k=3), *([6, 7] * rng.randint(20, 90)), *rng.choices(range(8), k=3)]
        texts = [Words().decode(ids[: count + 1]) for count in range(len(ids))]
        want = next((count for count, text in enumerate(texts) if re.search(pattern, text)), None)
        stops = Stops.of(params)
        assert stops is not None
        found = (count for count, token in enumerate(ids) if stops.check([token], Words())[1])
        assert next(found, None) == want


class Bytes:
    """A tokenizer whose token n is the byte n; a run that is no UTF-8 is U+FFFD throughout (ByteFallback)."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(ids)


@pytest.mark.parametrize("open_ids", [0, 1, 2])
def test_a_stop_is_found_behind_a_prompt_whose_tail_begins_inside_a_character(
    bench: Bench, port: SchedulerPort, open_ids: int
) -> None:
    """And which may end inside one, that the output completes."""
    prompt, output = list(("川" * 30).encode()), list("水は山から".encode())
    prompt, output = prompt + output[:open_ids], output[open_ids:]
    params = SamplingParams.parse({"stop": "山"}, vocab_size=256).to_scheduler()
    corpus = np.array(output, dtype=np.int32)
    rid = next(rid for rid in map(str, range(1000)) if replay_start(rid, len(corpus)) == 0)
    bench.send(Generate(route(1), rid, array("i", prompt).tobytes(), params, LogprobOptions()))
    ids, reason = serve(bench, Replay(port, corpus, Bytes()))[1]
    assert bytes(prompt[90:] + ids).decode() == "水は山"
    assert reason == FinishReason.stop("山")


def test_an_abort_ends_a_request_running_or_waiting(bench: Bench, port: SchedulerPort) -> None:
    replay = Replay(port, CORPUS, options=ReplayOptions(batch=2))
    bench.send(*(generate(slot, max_new_tokens=None) for slot in range(4)))
    replay.receive()
    bench.send(Abort(route(0)), Abort(route(3)), Abort(route(9)))
    replay.receive()
    assert replay.running == 2
    bench.send(Abort(route(1)), Abort(route(2)))
    replay.receive()
    assert replay.running == 0


def test_control_requests_are_answered(bench: Bench, port: SchedulerPort) -> None:
    replay = Replay(port, CORPUS)
    bench.send(*(Control(route(n), "c", op) for n, op in enumerate(("health", "flush_cache", "dance"), 1)))
    replay.receive()
    health, flush, dance = (decode(tag, body) for _, tag, body in bench.shard.read())
    assert health == Result(route(1), b'{"healthy":true}')
    assert flush == Result(route(2), b'{"success":true}')
    assert isinstance(dance, ErrorFrame)
    assert (dance.status, dance.route) == (400, route(3))
    assert "'dance' is unknown" in dance.message


@pytest.fixture
def full(port: SchedulerPort, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step ring has no room, for the smallest frame neither: its shard stands still."""
    monkeypatch.setattr(under_test, "PUSH_WAIT_S", 0.01)
    with contextlib.suppress(RingFull):
        while True:
            port._writer.write(Tag.ERROR, b"")


@contextlib.contextmanager
def in_a_thread(run: Callable[[], None], caplog: pytest.LogCaptureFixture) -> Iterator[threading.Thread]:
    """Let the replay scheduler run until it has found the ring full."""
    thread = threading.Thread(target=run)
    thread.start()
    try:
        until("the full ring to be found", lambda: "has been full" in caplog.text or not thread.is_alive())
        assert thread.is_alive()
        yield thread
    finally:
        thread.join(LIMIT_S)
    assert not thread.is_alive()


@pytest.mark.usefixtures("full")
def test_a_control_request_is_answered_when_there_is_room_again(
    bench: Bench, port: SchedulerPort, caplog: pytest.LogCaptureFixture
) -> None:
    bench.send(Control(route(2), "c", "health", b""))
    with in_a_thread(Replay(port, CORPUS).receive, caplog):
        answers: list[object] = []

        def answered() -> bool:
            for _, tag, body in bench.shard.read():
                if tag == Tag.RESULT:
                    answers.append(decode(tag, bytes(body)))
            bench.shard.release()
            return bool(answers)

        until("the answer", answered)
    assert answers == [Result(route(2), b'{"healthy":true}')]


@pytest.mark.usefixtures("full")
def test_a_full_ring_does_not_keep_it_from_stopping(
    bench: Bench, port: SchedulerPort, caplog: pytest.LogCaptureFixture
) -> None:
    bench.send(generate(2, max_new_tokens=None))
    stop = threading.Event()
    try:
        with in_a_thread(lambda: Replay(port, CORPUS).run(stop.is_set), caplog):
            stop.set()
    finally:
        bench.shard.read()
        bench.shard.release()


def test_logprobs_go_to_those_who_asked(bench: Bench, port: SchedulerPort) -> None:
    replay = Replay(port, CORPUS, options=ReplayOptions(tokens_per_step=4))
    wants = LogprobOptions(return_logprob=True, top_logprobs_num=3)
    bench.send(generate(1, max_new_tokens=9), generate(2, wants, max_new_tokens=9))
    values: list[float] = []
    replay.receive()
    while replay.running:
        replay.step()
        for _, _, body in bench.shard.read():
            batch = decode_batch(body)
            flat, top = (batch.families[0], batch.families[2]) if batch.families else (None, None)
            if flat is not None and top is not None:
                assert [int(batch.routes[row]) for row in flat.rows] == [route(2)]
                assert top.lengths is not None
                assert set(top.lengths.tolist()) == {3}
                values += flat.values.tolist()
        bench.shard.release()
    start = replay_start("rid-2", len(CORPUS))
    assert values == replay_logprobs(start, np.array(expected(2, 9), dtype=np.int32)).tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "a batch of 0 rows"),
        ({"batch": 1 << 17}, "a batch of 131072 rows"),
        ({"tokens_per_step": 0}, "0 tokens per step"),
        ({"steps_per_second": -1.0}, "-1.0 steps per second"),
        ({"seed": -1}, "a seed of -1: give 0 or more"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayOptions(**options)


def test_an_empty_text_is_refused(port: SchedulerPort) -> None:
    with pytest.raises(ValueError, match="has no tokens"):
        Replay(port, np.empty(0, dtype=np.int32))


CRASHES = '{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}'
"""A file that the tokenizer library crashes at, instead of raising an exception."""


@pytest.mark.parametrize(
    "content", [None, "{", "{}", CRASHES], ids=["missing", "cut off", "no tokenizer", "a crash"]
)
def test_a_tokenizer_that_cannot_be_loaded_is_said_in_one_line(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    command = [sys.executable, "-m", "outfeed.sidecar.replay", "--instance", "t-none", "--text", __file__]
    done = subprocess.run(
        [*command, "--tokenizer", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    *library, said = done.stderr.splitlines()
    assert said.startswith(f"outfeed-replay: cannot load the tokenizer {file}: ")
    assert said.endswith("; give the instance's tokenizer.json")
    assert "Traceback" not in done.stderr
    assert content == CRASHES or not library
