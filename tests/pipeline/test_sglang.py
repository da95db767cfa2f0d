"""SGLang's real scheduler behind an instance answers what SGLang's own engine answers.

Left out where SGLang is not installed: it takes gigabytes.
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from outfeed.gateway.front import Front
from outfeed.sink import Done, Error, Frame
from tokenizers import Tokenizer

from tests.eventually import LIMIT_S, until
from tests.instances import unique

from .commands import has_scheduler, launched
from .conftest import TEXT
from .sglang_engine import CONFIG, OPTIONS, ROTARY

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

START_S = 600.0
"""It imports half a gigabyte before it does anything."""


@pytest.fixture(scope="module")
def model(small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama for the small tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    vocabulary = Tokenizer.from_file(str(small_tokenizer)).get_vocab_size()
    shutil.copy(small_tokenizer, folder / "tokenizer.json")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": vocabulary}), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which SGLang runs on a CPU without vLLM."""
    found = dict(os.environ)
    if importlib.util.find_spec("vllm") is None:
        package = tmp_path_factory.mktemp("stand-in") / "vllm"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "_custom_ops.py").write_text(ROTARY, encoding="utf-8")
        found["PYTHONPATH"] = os.pathsep.join([str(package.parent), *filter(None, [found.get("PYTHONPATH")])])
    return found


def requests(model: Path) -> list[dict[str, Any]]:
    """Draw requests: greedy, some of which want log probabilities. No prompt ends inside a character."""
    rng = random.Random(5)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    found: list[dict[str, Any]] = []
    for number in range(24):
        start = rng.randrange(60)
        prompt = tokenizer.encode(TEXT[start : start + rng.randrange(1, 60)]).ids
        params = {"max_new_tokens": rng.randrange(1, 60), "temperature": 0, "ignore_eos": True}
        more: dict[str, Any] = {}
        if number % 3 == 0:
            more = {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0}
        found.append({"input_ids": prompt, "sampling_params": params, **more})
    return found


@pytest.fixture(scope="module")
def truth(model: Path, environment: dict[str, str]) -> list[dict[str, Any]]:
    """What SGLang's own engine answers, one request after the other."""
    file = model / "requests.json"
    file.write_text(json.dumps(requests(model)), encoding="utf-8")
    script = Path(__file__).with_name("sglang_engine.py")
    command = [sys.executable, str(script), str(model), str(file)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=START_S, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    assert lines, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(lines[-1])
    return found


@pytest.fixture
def front(model: Path, environment: dict[str, str], tmp_path: Path) -> Iterator[Front]:
    """An instance that SGLang's scheduler serves."""
    instance = unique("sglang")
    options = []
    for name, value in OPTIONS.items():
        options += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *options]
    named = {"SGLANG_RUST_SERVER": "1", "OUTFEED_INSTANCE": instance}
    with (
        launched(instance, "--tokenizer", str(model / "tokenizer.json"), "--context-length", "2048"),
        (tmp_path / "said").open("w+", encoding="utf-8") as said,
    ):
        engine = subprocess.Popen(
            command, env=environment | named, stdout=said, stderr=said, start_new_session=True
        )
        try:
            until("SGLang to attach", lambda: engine.poll() is not None or has_scheduler(instance), START_S)
            assert engine.poll() is None, (tmp_path / "said").read_text("utf-8")[-4000:]
            with Front.attach(instance) as front:
                yield front
        finally:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(engine.pid, signal.SIGTERM)
                engine.wait(LIMIT_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(engine.pid, signal.SIGKILL)
            engine.wait()


async def ask(front: Front, body: dict[str, Any]) -> dict[str, Any]:
    (stream,) = await front.submit(body)
    answer: dict[str, Any] = {"text": "", "ids": [], "reason": None, "logprobs": [], "top": [], "prompt": []}
    async for item in stream:
        match item:
            case Frame(event) | Done(event):
                answer["text"] += event.text
                answer["ids"] += event.ids.tolist()
                answer["reason"] = event.finish.to_json() if event.finish else None
                if event.columns is not None and event.columns.output_logprobs is not None:
                    answer["logprobs"] += event.columns.output_logprobs.values.tolist()
                if event.columns is not None and event.columns.output_top_logprobs is not None:
                    answer["top"] += event.columns.output_top_logprobs.ids.tolist()
                if event.columns is not None and event.columns.input_logprobs is not None:
                    answer["prompt"] += event.columns.input_logprobs.ids.tolist()
            case Error():
                raise AssertionError(item)
    return answer


def test_it_answers_what_sglangs_own_engine_answers(
    truth: list[dict[str, Any]], front: Front, model: Path
) -> None:
    tokenizer, asked = Tokenizer.from_file(str(model / "tokenizer.json")), requests(model)

    async def all_at_once() -> list[dict[str, Any]]:
        return list(await asyncio.gather(*(ask(front, body) for body in asked)))

    for body, answer, want in zip(asked, asyncio.run(all_at_once()), truth, strict=True):
        meta = want["meta_info"]
        assert (answer["ids"], answer["reason"]) == (want["output_ids"], meta["finish_reason"])
        prompt = tokenizer.decode(body["input_ids"])
        assert answer["text"] == tokenizer.decode(body["input_ids"] + answer["ids"])[len(prompt) :]
        if "return_logprob" in body:
            assert answer["logprobs"] == pytest.approx(
                [value for value, _, _ in meta["output_token_logprobs"]], abs=1e-3
            )
            assert answer["top"] == [token for best in meta["output_top_logprobs"] for _, token, _ in best]
            assert answer["prompt"] == [token for _, token, _ in meta["input_token_logprobs"]]
