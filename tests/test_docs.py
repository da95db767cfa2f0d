"""The pages against the code: what they say of limits, defaults, files, options and commands."""

import functools
import re
from pathlib import Path

import pytest
from outfeed.gateway import naming
from outfeed.gateway.app import MAX_ABORT_BYTES
from outfeed.gateway.front import SINK_BYTES
from outfeed.gateway.limits import Limits
from outfeed.gateway.openai import COMPLETION_MAX_TOKENS
from outfeed.gateway.probe import PROBE_S
from outfeed.ingress import (
    fields,
    regex_cells,
    regex_places,
    regex_worst,
    request,
    sampling,
    stop_regex,
    tokenize,
)
from outfeed.ingress._worst import lib as worst
from outfeed.ingress.errors import BadRequest
from outfeed.ring._body import ROW_BYTES
from outfeed.ring._core import lib
from outfeed.ring.board import InstanceConfig
from outfeed.ring.checked import MAX_ROWS
from outfeed.ring.finish import MAX_DEPTH
from outfeed.ring.frames import Tag
from outfeed.ring.instance import _plan
from outfeed.sidecar import requests, steps
from outfeed.sink import reader

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CHANGELOG.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
MIB = 1 << 20
# Options of other programs, and options that are no more.
NOT_OURS = {"--no-deps", "--shm-size", "--replay"} | {
    "--model-path",
    "--dp-size",
    "--enable-return-hidden-states",
}


def text(page: str) -> str:
    """A page with its line breaks taken for spaces."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def instance_mib(**more: int) -> int:
    """What an instance takes of /dev/shm, with the demo tokenizer's table (2.1 MB), in whole MiB."""
    config = InstanceConfig(instance="docs", tokenizer="", **more)  # type: ignore[arg-type]
    rings: int = sum(lib.ring_bytes(lanes, readers, size) for _, lanes, readers, size in _plan(config))
    return round((rings + 2_100_000) / MIB)


HTTP, CONFIG = Limits(), InstanceConfig(instance="docs", tokenizer="")
SAID = [
    ("docs/http.md", f"| body (`--max-body-bytes`) | {HTTP.body_bytes // MIB} MiB |"),
    (
        "docs/http.md",
        f"around the chunks of a body | {HTTP.head_bytes >> 10} KiB, {HTTP.headers} headers |",
    ),
    ("docs/http.md", f"| prompts at once (`--max-requests`) | {HTTP.requests:,} per gateway |"),
    ("docs/http.md", f"| connections (`--max-connections`) | {HTTP.connections:,} per gateway |"),
    ("docs/http.md", f"| a head's time, a body's time | {HTTP.head_s:g} s, {HTTP.body_s:g} s |"),
    ("docs/http.md", f"| an idle connection (`--idle-seconds`) | {HTTP.idle_s:g} s |"),
    ("docs/http.md", f"| a client that takes nothing of what is sent | {HTTP.stall_s:g} s |"),
    ("docs/http.md", f"| bytes waiting in a connection | {HTTP.write_bytes >> 10} KiB |"),
    ("docs/http.md", f"| bytes waiting in a sink | {SINK_BYTES // MIB} MiB |"),
    ("docs/http.md", f"| pipelined requests | {HTTP.pipelined} |"),
    ("docs/http.md", f"when a token came back from the scheduler within {PROBE_S:g} s"),
    ("docs/http.md", f"`max_tokens` defaults to {COMPLETION_MAX_TOKENS} for completions;"),
    ("docs/operations.md", f"| request | {CONFIG.request_bytes // MIB} MiB |"),
    ("docs/operations.md", f"| control | {CONFIG.control_bytes // MIB} MiB |"),
    ("docs/operations.md", f"| step | {CONFIG.step_bytes // MIB} MiB |"),
    ("docs/operations.md", f"| egress | {CONFIG.egress_bytes // MIB} MiB |"),
    ("docs/operations.md", f"one rank and two shards take {instance_mib()} MiB by default"),
    ("docs/operations.md", f"four gateways and four shards {instance_mib(readers=4, shards=4)} MiB"),
    ("docs/operations.md", f"{ROW_BYTES} bytes per row and 4 per token"),
    ("docs/operations.md", f"(`--heartbeat-limit`, {CONFIG.heartbeat_limit_s:g} s)"),
    ("docs/operations.md", f"Slow clients** cost at most {SINK_BYTES // MIB} MiB"),
    ("docs/scheduler.md", f"The step ring holds {CONFIG.step_bytes // MIB} MiB of steps by default"),
    ("docs/scheduler.md", f"| `routes` | u64[rows], 1 to {steps.MAX_ROWS:,} |"),
    ("docs/scheduler.md", f"one request among the last {requests.REMEMBER:,}"),
    ("docs/frames.md", f"`rows` within 0..2^{MAX_ROWS.bit_length() - 1},"),
    ("docs/frames.md", "`stamp_ns` is within 0..2^64-1"),
    ("docs/frames.md", f"each a JSON object at most {MAX_DEPTH} deep"),
    ("docs/frames.md", f"The last {reader.REMEMBERED:,} ended routes"),
    ("docs/ring.md", f"| lanes, consumers | 1-{lib.RING_MAX_LANES} each |"),
    (
        "docs/ring.md",
        f"| capacity of a lane | a power of two, {lib.RING_MIN_CAPACITY >> 10} KiB to "
        f"{lib.RING_MAX_CAPACITY >> 30} GiB |",
    ),
    ("docs/ring.md", f"| parts of one write | {lib.RING_MAX_PARTS} |"),
    ("docs/ring.md", f"| frames of one read | {lib.RING_MAX_BATCH} |"),
    ("docs/ring.md", f"| doorbell name | {lib.RING_NAME_BYTES - 2} characters |"),
    (
        "docs/ingress.md",
        f"a stop string {fields.MAX_STOP_BYTES:,} bytes, a grammar {fields.MAX_GRAMMAR_BYTES // MIB} MiB, "
        f"{fields.MAX_STOP_TOKEN_IDS:,} stop token ids, `custom_params` {fields.MAX_CUSTOM_ENTRIES} keys and "
        f"{fields.MAX_CUSTOM_VALUES:,} values (a key {fields.MAX_CUSTOM_KEY_CHARACTERS} characters, a string "
        f"{fields.MAX_CUSTOM_CHARACTERS:,}), a body {request.MAX_BODY_BYTES // MIB} MiB, a batch "
        f"{request.MAX_BATCH:,} prompts, a rid {request.MAX_RID_CHARACTERS} characters",
    ),
    ("docs/ingress.md", f"at most {tokenize.MAX_WAITING_TEXTS:,} waiting"),
    ("docs/ingress.md", f"more than {tokenize.SHORT_CHARACTERS} characters together are tokenized"),
    ("docs/ingress.md", f"A body above {tokenize.SHORT_BODY >> 10} KiB is read on a thread"),
    ("docs/ingress.md", f"at most {request.MAX_ENTRIES:,} entries of lists and objects"),
    (
        "docs/ingress.md",
        f"{request.MAX_LOGPROB_IDS:,} `token_ids_logprob`, {request.MAX_TOP_LOGPROBS} `top_logprobs_num`",
    ),
    (
        "docs/http.md",
        f"`top_logprobs_num` is at most {request.MAX_TOP_LOGPROBS} (`--max-top-logprobs`), "
        f"`token_ids_logprob` has at most {request.MAX_LOGPROB_IDS:,} ids",
    ),
    ("docs/http.md", f"| entries of all lists and objects of a body | {request.MAX_ENTRIES:,}, or"),
    ("docs/http.md", f"| the body of an abort | {MAX_ABORT_BYTES >> 10} KiB |"),
    (
        "docs/http.md",
        "| an answer that is not streamed; one event of a stream (`--max-answer-bytes`) | "
        f"{HTTP.answer_bytes // MIB} MiB |",
    ),
    ("docs/ingress.md", f"That is {sampling.CHARACTERS_PER_TOKEN} unless the server says otherwise"),
    ("docs/ingress.md", f"must be at most {stop_regex.LIMIT_MS} ms"),
    (
        "docs/ingress.md",
        f"weighed for at least {stop_regex.SHORTEST_TEXT} characters, and a linear one for at most "
        f"{stop_regex.LONGEST_LINEAR_TEXT:,}",
    ),
    ("docs/ingress.md", f"At most {regex_places.MAX_NODES} nodes, {regex_places.MAX_WORK:,} steps to build"),
    (
        "docs/ingress.md",
        f"{regex_cells.MAX_CELLS} cells, {regex_cells.MAX_KINDS} kinds, {worst.OFW_MAX_STATES:,} states and "
        f"{regex_worst.MAX_WORK:,} steps",
    ),
    ("docs/ingress.md", f"share {stop_regex.MAX_EFFORT // 1000} ms"),
    ("docs/ingress.md", f"{stop_regex.CACHED} patterns, by text"),
]


@pytest.mark.parametrize(("page", "words"), SAID, ids=[f"{page}: {words[:40]}" for page, words in SAID])
def test_a_page_says_the_limit_that_the_code_has(page: str, words: str) -> None:
    assert words in text(page)


def test_the_http_pages_error_is_the_one_that_comes() -> None:
    with pytest.raises(BadRequest) as refused:
        sampling.SamplingParams.parse({"top_p": 5}, vocab_size=100)
    assert f'{{"error": {{"message": "{refused.value}", "code": 400}}}}' in text("docs/http.md")


def test_the_http_page_names_every_sampling_parameter() -> None:
    said = re.search(r"`sampling_params` takes (.*?)\. Which of them", text("docs/http.md"))
    assert said is not None
    assert sorted(re.findall(r"`(\w+)`", said[1])) == sorted(fields.CHECKS)


def test_the_http_page_names_the_parameters_that_openai_has_not() -> None:
    theirs = {
        "temperature",
        "top_p",
        "n",
        "stop",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "seed",
    }
    said = re.search(r"The OpenAI endpoints take (.*?); other fields", text("docs/http.md"))
    assert said is not None
    assert set(re.findall(r"`(\w+)`", said[1])) == (naming.SAMPLING.keys() - theirs) | {"rid"}


def test_the_table_of_messages_has_every_tag() -> None:
    rows = re.findall(r"\| (\d+) \| ([A-Z]+) \|", text("docs/frames.md"))
    assert rows == [(str(tag.value), tag.name) for tag in Tag]


def test_two_pages_with_figures_of_one_bench_agree() -> None:
    loop, peer, times = re.findall(
        r"256 rows \| ([\d.]+) us/token \| `DecodeStream` alone ([\d.]+): (\d+) ×", text("README.md")
    )[0]
    row = re.findall(r"\| 256 \| ([\d.]+) \| [\d.]+ \| [\d.]+ \| ([\d.]+) \|", text("docs/detokenizing.md"))[
        0
    ]
    assert row == (loop, peer)
    assert round(float(peer) / float(loop)) == int(times)


@functools.cache
def source_files() -> tuple[str, ...]:
    """Every file of the checkout but what is made in it."""
    made = {"build", "__pycache__"}
    folders = [
        path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "." and path.name not in made
    ]
    paths = [path for path in ROOT.iterdir() if path.is_file()]
    paths += [
        path
        for folder in folders
        for path in folder.rglob("*.*")
        if not made & set(path.relative_to(ROOT).parts)
    ]
    return tuple(str(path.relative_to(ROOT)) for path in paths)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page: str) -> None:
    files = source_files()
    code = "".join((ROOT / file).read_text(encoding="utf-8") for file in files if file.endswith(".py"))
    found = text(page)
    for command in re.findall(r"\./scripts/([\w-]+)", found):
        assert (ROOT / "scripts" / command).is_file(), f"{page} names ./scripts/{command}, which is not there"
    for name in re.findall(r"`((?:[\w-]+/)+[\w-]+\.\w+)", found):
        here = any(file == name or file.endswith(f"/{name}") for file in files) or (ROOT / name).exists()
        assert here, f"{page} names {name}, which is not there"
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]\b", found)) - NOT_OURS:
        size = re.fullmatch(r"--(request|control|step|egress)-bytes", option)
        assert size or f'"{option}"' in code, f"{page} names {option}, which no command takes"
