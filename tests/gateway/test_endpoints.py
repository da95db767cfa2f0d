"""Health, models, information, metrics, aborts, the key, and what there is not."""

import asyncio
import json
import re

import pytest
from outfeed.gateway.app import Options
from outfeed.gateway.backend import Reading
from outfeed.gateway.front import Answered
from outfeed.gateway.limits import Limits
from outfeed.gateway.metrics import Metrics
from outfeed.gateway.probe import probe
from outfeed.ingress.errors import Unavailable
from outfeed.ingress.request import Model
from outfeed.ring.finish import FinishReason

from .conftest import Serve, eventually
from .fake import VOCABULARY, FakeBackend, WordTokenizer


def test_health_says_what_is_wrong(serve: Serve) -> None:
    running = serve()
    assert running.ask("GET", "/health").status == 200
    running.backend.why = "detokenizer shard 1 has died"
    answer = running.ask("GET", "/health")
    assert answer.status == 503
    assert "shard 1 has died" in answer.json["error"]["message"]


def test_health_generate_is_a_round_trip(serve: Serve) -> None:
    running = serve(lambda played: played.end("x"))
    assert running.ask("GET", "/health_generate").status == 200
    assert running.stream().closed
    running.backend.sick = "shard 1: no answer within 5 s"
    answer = running.ask("GET", "/health_generate")
    assert answer.status == 503
    assert "not healthy: shard 1: no answer" in answer.json["error"]["message"]
    running.backend.script = lambda played: played.fail(503, "the scheduler is gone")
    answer = running.ask("GET", "/health_generate")
    assert answer.status == 503
    assert "the scheduler is gone" in answer.json["error"]["message"]
    running.backend.refuse = Unavailable("no scheduler is attached")
    assert running.ask("GET", "/health_generate").status == 503


@pytest.mark.parametrize(
    "finish", [FinishReason.abort("out of memory", status_code=500), FinishReason.abort("out of memory")]
)
def test_health_generate_is_not_content_with_a_request_that_the_scheduler_gave_up(
    serve: Serve, finish: FinishReason
) -> None:
    running = serve(lambda played: played.end("", finish))
    answer = running.ask("GET", "/health_generate")
    assert answer.status == 503
    assert "out of memory" in answer.json["error"]["message"]


@pytest.mark.parametrize("says", [(), ("a token", "and no end")])
def test_a_token_that_does_not_come_is_said_and_not_waited_for(says: tuple[str, ...]) -> None:
    async def run() -> None:
        backend = FakeBackend(script=lambda played: played.say(*says))
        assert await probe(backend, wait_s=0.01) == "no token was generated within 0.01 s"
        assert backend.streams[0].closed

    asyncio.run(run())


def test_every_shard_has_its_whole_time_to_answer_however_late_the_token_came() -> None:
    class Patient(FakeBackend):
        async def check(self, timeout: float) -> str | None:
            return f"had {timeout:g} s"

    async def run() -> None:
        backend = Patient(script=lambda played: played.end("x"))
        assert await probe(backend, wait_s=1.0) == "not healthy: had 5 s"

    asyncio.run(run())


def test_health_generate_is_not_at_the_mercy_of_the_instances_defaults(serve: Serve) -> None:
    defaults = {"min_new_tokens": 50, "max_new_tokens": 100, "temperature": 1.5, "stop": ["x"]}
    model = Model(VOCABULARY, 4096, WordTokenizer(), defaults=defaults)
    running = serve(lambda played: played.end("x"), model=model)
    assert running.ask("GET", "/health_generate").status == 200
    params = running.stream().prompt.params
    assert (params.min_new_tokens, params.max_new_tokens) == (0, 1)


def test_models_and_server_info(serve: Serve) -> None:
    running = serve()
    models = running.ask("GET", "/v1/models").json
    assert models["object"] == "list"
    assert models["data"][0]["id"] == "fake"
    assert models["data"][0]["object"] == "model"
    assert models["data"][0]["max_model_len"] == 4096
    assert running.ask("GET", "/v1/models/fake").json == models["data"][0]
    missing = running.ask("GET", "/v1/models/other")
    assert missing.status == 404
    assert "there is no model 'other' here; there is 'fake'" in missing.json["error"]["message"]
    for path in ("/model_info", "/get_model_info"):  # how SGLang's clients ask
        assert running.ask("GET", path).json["model_path"] == "fake"
    info = running.ask("GET", "/server_info").json
    assert info["model"] == "fake"
    assert info["instance"] == {"instance": "fake"}
    assert info["limits"]["body_bytes"] > 0


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_a_packed_body_is_a_415(serve: Serve, path: str) -> None:
    running = serve()
    answer = running.ask("POST", path, b"\x1f\x8b\x08\x00", {"Content-Encoding": "gzip"})
    assert answer.status == 415
    assert "without a Content-Encoding" in answer.json["error"]["message"]
    assert running.ask("POST", path, b"{", {"Content-Encoding": "Identity"}).status == 400


def test_an_abort_ends_the_stream_it_names(serve: Serve) -> None:
    running = serve()
    client = running.raw()
    client.post("/generate", {"text": "x", "rid": "mine", "stream": True})
    running.stream().say("a")
    client.until(b"}\n\n")
    answer = running.ask("POST", "/abort_request", {"rid": "mine"})
    assert answer.status == 200
    assert running.backend.aborted == ["mine"]
    assert b'"code":499' in client.until(b"[DONE]")


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_batch_is_aborted_by_its_own_rid_or_each_prompt_by_its(
    serve: Serve, path: str, stream: bool
) -> None:
    running = serve()
    prompts = {"text" if path == "/generate" else "prompt": ["x", "y", "z"]}
    together, alone = running.raw(), running.raw()
    together.post(path, {**prompts, "rid": "B", "stream": stream})
    running.stream(2)
    running.stream(0).end("ended")
    eventually(lambda: running.app.metrics.events == 1, "one has ended")
    alone.post("/generate", {"text": "x", "rid": "B_0"})
    other = running.stream(3)
    asked = running.ask("POST", "/abort_request", {"rid": "B"}).json
    assert asked == {"rid": "B", "aborted_here": True}
    if stream:
        assert together.until(b"[DONE]").count(b'"code":499') == 2
    else:
        assert b"HTTP/1.1 499 " in together.until(b'"code":499')
    assert all(played.closed for played in running.backend.streams[:3])
    assert not other.closed, "a request of its own, which only has the rid that an ended prompt had"
    assert running.ask("POST", "/abort_request", {"rid": "B_0"}).json["aborted_here"] is True
    alone.until(b'"code":499')
    assert running.ask("POST", "/abort_request", {"rid": "B"}).json["aborted_here"] is False
    eventually(lambda: running.app.idle, "idle")
    assert not running.app._running._batches


def test_two_batches_of_one_rid_are_both_aborted_by_it(serve: Serve) -> None:
    """A rid is free when its prompt has ended: here that of the first prompt of a batch whose second runs."""
    running = serve()
    first, second = running.raw(), running.raw()
    first.post("/generate", {"text": ["x", "y"], "rid": "B", "stream": True})
    running.stream(1)
    running.stream(0).end("ended")
    second.post("/generate", {"text": ["z"], "rid": "B", "stream": True})
    running.stream(2)
    assert running.ask("POST", "/abort_request", {"rid": "B"}).json["aborted_here"] is True
    for client in (first, second):
        assert client.until(b"[DONE]").count(b'"code":499') == 1
    eventually(lambda: running.app.idle, "idle")
    assert not running.app._running._batches


def test_an_answers_id_aborts_all_its_prompts_though_each_has_a_rid(serve: Serve) -> None:
    running = serve()
    client = running.raw()
    client.post("/v1/completions", {"prompt": ["x", "y"], "rid": ["a", "b"], "stream": True})
    running.stream(1).say("a")
    first = json.loads(client.until(b"}\n\n").partition(b"data: ")[2].partition(b"\n")[0])
    assert running.ask("POST", "/abort_request", {"rid": first["id"]}).json["aborted_here"]
    assert client.until(b"[DONE]\n\n").count(b"aborted on request") == 2


class Other:
    """The other gateways, as a test has them."""

    def __init__(self, *states: bytes) -> None:
        self.aborted: list[str] = []
        self._states = states

    def abort(self, rid: str) -> None:
        self.aborted.append(rid)

    async def states(self) -> list[bytes]:
        return list(self._states)


def test_an_abort_of_nobody_is_passed_on_and_fine(serve: Serve) -> None:
    running = serve()
    running.app.siblings = other = Other()
    assert running.ask("POST", "/abort_request", {"rid": "other"}).status == 200
    assert other.aborted == ["other"]
    assert running.ask("POST", "/abort_request", {}).status == 400
    assert running.ask("POST", "/abort_request", {"rid": 5}).status == 400
    assert running.ask("POST", "/abort_request", {"rid": ""}).status == 400
    everybody = running.ask("POST", "/abort_request", {"rid": "", "abort_all": True})
    assert (everybody.status, "abort_all" in everybody.json["error"]["message"]) == (400, True)


def test_a_scrape_adds_the_other_gateways_counts(serve: Serve) -> None:
    running = serve(lambda played: played.end("x"))
    running.ask("POST", "/generate", {"text": "x"})
    there = Metrics()
    there.output_tokens = 41
    there.first_token.observe(0.2, 3)
    there.answered("/generate", 200)
    running.app.siblings = Other(there.state(), b"nonsense")
    text = running.ask("GET", "/metrics").body.decode()
    assert "outfeed_generated_tokens_total 42\n" in text
    assert "outfeed_time_to_first_token_seconds_count 4\n" in text
    assert 'outfeed_http_responses_total{endpoint="/generate",status="200"} 2\n' in text
    assert running.app.metrics.output_tokens == 1


def test_what_is_one_gateways_own_stands_beside_the_others(serve: Serve) -> None:
    running = serve(lambda played: played.end("x"))
    running.ask("POST", "/generate", {"text": "x"})
    there = [Reading("live_streams", "gauge", "Live.", 5, {"reader": "1"})]
    running.app.siblings = Other(Metrics().state(there))
    for _ in range(2):
        text = running.ask("GET", "/metrics").body.decode()
        found = re.findall(r"^outfeed_live_streams(.*)$", text, re.M)
        assert sorted(found) == ['{reader="0"} 1', '{reader="1"} 5']
        assert text.count("# TYPE outfeed_live_streams gauge") == 1


def test_metrics_are_prometheus_text(serve: Serve) -> None:
    def three(played: object) -> None:
        played.say("a", "b")  # type: ignore[attr-defined]
        played.end("c")  # type: ignore[attr-defined]

    running = serve(three)
    running.ask("POST", "/generate", {"text": "x", "stream": True})
    running.ask("POST", "/generate", {"text": "x", "bogus": 1})
    running.ask("GET", "/nothing")
    eventually(lambda: running.app.idle, "idle")
    answer = running.ask("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = answer.body.decode()
    values = dict(re.findall(r"^(outfeed_[^ #]+) (\S+)$", text, re.M))
    assert values["outfeed_time_to_first_token_seconds_count"] == "1"
    assert values["outfeed_generated_tokens_total"] == "3"
    assert values["outfeed_prompt_tokens_total"] == "3"
    assert values['outfeed_http_responses_total{endpoint="/generate",status="200"}'] == "1"
    assert values['outfeed_http_responses_total{endpoint="/generate",status="400"}'] == "1"
    assert values['outfeed_http_responses_total{endpoint="other",status="404"}'] == "1"
    for name in ("inter_token_latency_seconds_bucket", "live_streams", "ring_depth_bytes", "restarts_total"):
        assert f"outfeed_{name}" in text
    families = re.findall(r"^# TYPE (\S+)", text, re.M)
    assert len(families) == len(set(families))


def test_histogram_buckets_add_up(serve: Serve) -> None:
    histogram = serve().app.metrics.between_tokens
    for value, times in ((0.0, 3), (1e-5, 1), (0.3, 2), (1000.0, 1)):
        histogram.observe(value, times)
    counts = [int(line.rsplit(" ", 1)[1]) for line in histogram.lines() if "_bucket" in line]
    assert counts == sorted(counts)
    assert counts[0] == 4
    assert counts[-1] == 7


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1", 404),
        ("GET", "/v1/", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions/", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models", 401),
        ("POST", "/v1/completions", 401),
    ],
)
def test_every_error_under_v1_has_openais_shape(serve: Serve, method: str, path: str, status: int) -> None:
    answer = serve(options=Options(api_key="k")).ask(method, path, {"prompt": "x"})
    assert answer.status == status
    error = answer.json["error"]
    assert error.keys() == {"object", "message", "type", "param", "code"}
    assert (error["object"], error["code"], error["param"]) == ("error", status, None)


@pytest.mark.parametrize("path", ["/v2", "/v1x", "/", "/generate"])
def test_no_other_error_has_it(serve: Serve, path: str) -> None:
    assert serve().ask("GET", path).json["error"].keys() == {"message", "code"}


@pytest.mark.parametrize("path", ["/", "/nothing", "/generate/more", "/%2e%2e/etc/passwd"])
def test_what_is_not_there_is_a_404(serve: Serve, path: str) -> None:
    answer = serve().ask("GET", path)
    assert answer.status == 404
    assert answer.json["error"]["code"] == 404


def test_the_wrong_method_is_a_405(serve: Serve) -> None:
    running = serve()
    assert running.ask("GET", "/generate").headers["allow"] == "POST"
    assert running.ask("POST", "/health", {}).status == 405
    assert running.ask("HEAD", "/health").status == 200
    client = running.raw()
    heads = b"".join(
        b"HEAD %b HTTP/1.1\r\nhost: x\r\n\r\n" % path for path in (b"/v1/models", b"/metrics", b"/x")
    )
    client.send(heads + b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answers = client.rest().split(b"\r\n\r\n")  # a body would be taken for the next answer's head
    assert [answer[:12] for answer in answers] == [
        b"HTTP/1.1 200",
        b"HTTP/1.1 200",
        b"HTTP/1.1 404",
        b"HTTP/1.1 200",
        b"",
    ]


def test_the_api_key_guards_everything_but_health(serve: Serve) -> None:
    running = serve(lambda played: played.end("x"), options=Options(api_key="s3cret"))
    assert running.ask("GET", "/health").status == 200
    for path in ("/v1/models", "/server_info", "/metrics", "/health_generate"):
        assert running.ask("GET", path).status == 401
    body = {"text": "x"}
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "s3cret"},
        {"Authorization": "Bearer "},
    ):
        answer = running.ask("POST", "/generate", body, headers)
        assert answer.status == 401
        assert "www-authenticate" in answer.headers
    assert running.backend.streams == []
    assert running.ask("POST", "/generate", body, {"Authorization": "Bearer s3cret"}).status == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer k", 200),
        ("bearer k", 200),
        ("BEARER  k ", 200),
        ("Basic k", 401),
        ("Bearer", 401),
        ("Bearerk", 401),
        ("bearer K", 401),
        ("k", 401),
    ],
)
def test_the_keys_scheme_may_be_written_in_any_case(serve: Serve, header: str, status: int) -> None:
    running = serve(options=Options(api_key="k"))
    assert running.ask("GET", "/v1/models", headers={"Authorization": header}).status == status


def test_every_503_says_when_to_try_again(serve: Serve) -> None:
    running = serve(lambda played: played.fail(503, "the scheduler went away"), limits=Limits(connections=1))
    asked = [
        ("POST", "/generate", {"text": "x"}),
        ("POST", "/v1/completions", {"prompt": "x"}),
        ("GET", "/health_generate", None),
    ]

    def check() -> None:
        for one in asked:
            eventually(lambda: not running.server.connections.open, "room for one")
            answer = running.ask(*one)
            assert (answer.status, answer.headers.get("retry-after")) == (503, "1")

    check()
    running.backend.refuse = Unavailable("no scheduler is attached")
    check()
    running.backend.why = "no scheduler"
    asked.append(("GET", "/health", None))
    check()
    running.app.draining = True
    check()
    held = running.raw()
    eventually(lambda: running.server.connections.open, "held")
    assert b"\r\nretry-after: 1\r\n" in running.raw().until(b"\r\n\r\n")
    held.close()


ROOT = {"Authorization": "Bearer r00t"}


def test_an_operation_reaches_the_scheduler_and_its_answer_the_client_byte_for_byte(serve: Serve) -> None:
    running = serve(options=Options(admin_key="r00t"))
    body, reply = bytes(range(256)), b"\x00 any bytes \xff"
    running.backend.answer = reply
    answer = running.ask("POST", "/control/flush_cache", body, ROOT)
    assert (answer.status, answer.body) == (200, reply)
    assert answer.headers["content-type"] == "application/octet-stream"
    running.backend.answer = b""
    assert running.ask("POST", "/control/" + "a" * 64, None, ROOT).body == b""
    assert running.backend.asked == [("flush_cache", body), ("a" * 64, b"")]
    text = running.ask("GET", "/metrics").body.decode()
    assert 'outfeed_http_responses_total{endpoint="/control/OP",status="200"} 2' in text


def test_without_an_admin_key_there_are_no_operations(serve: Serve) -> None:
    running = serve(options=Options(api_key="s3cret"))
    for headers in ({}, {"Authorization": "Bearer s3cret"}, {"Authorization": "Bearer "}):
        answer = running.ask("POST", "/control/health", None, headers)
        assert answer.status == 404
        assert "/control" not in answer.json["error"]["message"].partition("there are")[2]
    assert running.backend.asked == []


def test_only_the_admin_key_opens_operations_and_it_opens_nothing_else(serve: Serve) -> None:
    running = serve(options=Options(api_key="s3cret", admin_key="r00t"))
    for given in (None, "Bearer s3cret", "Bearer ", "Bearer r00", "Bearer r00tt", "r00t", "Basic r00t"):
        headers: dict[str, str] = {} if given is None else {"Authorization": given}
        answer = running.ask("POST", "/control/health", None, headers)
        assert answer.status == 401
        assert "the admin key" in answer.json["error"]["message"]
    assert running.backend.asked == []
    assert running.ask("GET", "/v1/models", None, ROOT).status == 401
    assert running.ask("GET", "/control/health", None, ROOT).status == 405
    assert running.ask("POST", "/control/health", None, ROOT).status == 200


@pytest.mark.parametrize(
    "op", ["a" * 65, "Health", "a-b", "a/b", "a.b", "%61", "a%00", "%C3%A9", "a b", "a%0A"]
)
def test_an_operation_with_no_plain_name_is_a_400(serve: Serve, op: str) -> None:
    running = serve(options=Options(admin_key="r00t"))
    answer = running.ask("POST", "/control/" + op.replace(" ", "%20"), None, ROOT)
    assert answer.status == 400
    assert "1 to 64 of a-z, 0-9 and _" in answer.json["error"]["message"]
    assert running.backend.asked == []


def test_an_operation_that_is_refused_or_not_answered_says_so(serve: Serve) -> None:
    running = serve(options=Options(admin_key="r00t"))
    for refusal, status, words in (
        (Answered(409, "busy", "requests are running"), 409, "requests are running"),
        (Answered(7, "odd", "a status that is none"), 500, "a status that is none"),
        (Unavailable("no scheduler is attached"), 503, "no scheduler"),
        (None, 504, "has not answered flush_cache within 60 s"),
    ):
        running.backend.answer = refusal
        answer = running.ask("POST", "/control/flush_cache", None, ROOT)
        assert answer.status == status
        assert words in answer.json["error"]["message"]
    asked = len(running.backend.asked)
    answer = running.ask("POST", "/control/flush_cache", b"x" * ((1 << 20) + 1), ROOT)
    assert answer.status == 413
    assert "1048576" in answer.json["error"]["message"]
    assert len(running.backend.asked) == asked
