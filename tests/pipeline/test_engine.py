"""The example engine: a real model, continuous batching, through a real instance."""

import asyncio
import importlib.util
import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from outfeed.gateway.front import Front
from outfeed.ingress.sampling import SamplingParams
from outfeed.ring.frames import Generate, LogprobOptions
from outfeed.sink import Done, Error, Frame
from tokenizers import Tokenizer

from tests.instances import unique

from .commands import SCRIPTS, served

torch = pytest.importorskip("torch", reason="the example engine needs PyTorch (extra `engine`)")
pytest.importorskip("transformers", reason="the example engine needs transformers (extra `engine`)")


@pytest.fixture(scope="module")
def engine() -> ModuleType:
    spec = importlib.util.spec_from_file_location("engine_transformers", SCRIPTS / "engine_transformers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def front(small_tokenizer: Path) -> Iterator[Front]:
    """An instance that the engine serves with its random weights."""
    instance = unique("engine")
    command = (sys.executable, str(SCRIPTS / "engine_transformers.py"), "--threads", "1", "--instance")
    with served(instance, small_tokenizer, *command), Front.attach(instance) as front:
        yield front


class Answer:
    """One stream's whole content."""

    def __init__(self) -> None:
        self.text, self.reason, self.error = "", "", ""
        self.ids: list[int] = []
        self.events: list[Any] = []


async def ask(front: Front, prompt: str | list[int], **params: Any) -> Answer:
    body: dict[str, Any] = {"text" if isinstance(prompt, str) else "input_ids": prompt}
    for name in ("return_logprob", "top_logprobs_num", "token_ids_logprob"):
        if name in params:
            body[name] = params.pop(name)
    (stream,) = await front.submit(body | {"sampling_params": params})
    answer = Answer()
    async for item in stream:
        match item:
            case Frame(event) | Done(event):
                answer.events.append(event)
                answer.text += event.text
                answer.ids += event.ids.tolist()
                answer.reason = event.finish.type if event.finish else answer.reason
            case Error():
                answer.error = f"{item.status} {item.message}"
    return answer


def greedy(engine: ModuleType, tokenizer: Any, prompt: list[int], tokens: int) -> list[int]:
    """Decode without a cache, alone in the batch: the truth to compare with."""
    model = engine.load_model(None, tokenizer.get_vocab_size(), 0).eval()
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(tokens):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


PROMPTS = [
    "The river",
    "川は流れる。 The river flows; naïvely",
    "강물",
    "Der Fluß. Der Fluß. Der Fluß. نهر watch it,",
]


def test_requests_that_share_a_batch_get_what_each_would_get_alone(
    front: Front, engine: ModuleType, small_tokenizer: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(small_tokenizer))

    async def all_of_them() -> list[Answer]:
        lengths = itertools.cycle((24, 9, 30, 15))
        asked = [
            ask(front, prompt, temperature=0, max_new_tokens=length)
            for prompt, length in zip(PROMPTS * 2, lengths, strict=False)
        ]
        return list(await asyncio.gather(*asked))

    answers = asyncio.run(all_of_them())
    for prompt, length, answer in zip(PROMPTS * 2, (24, 9, 30, 15) * 2, answers, strict=True):
        want = greedy(engine, tokenizer, tokenizer.encode(prompt).ids, length)
        assert (answer.ids, answer.reason, answer.error) == (want, "length", "")
        assert answer.text == tokenizer.decode(want)


@pytest.mark.parametrize(
    ("stop", "text", "want"),
    [
        ({"stop_regex": r"\bword\b"}, "swords and swords", None),
        ({"stop_regex": r"^foo"}, "a foo and foo", None),
        ({"stop_regex": r"(?<!x)foo"}, "xfoo and xfoo", None),
        ({"stop_regex": r"(?<!x)foo"}, "xfoo and foo", r"(?<!x)foo"),
        ({"stop": "foo"}, "barfoo", "foo"),
    ],
)
def test_a_stop_is_found_where_it_is_in_the_text(
    engine: ModuleType, stop: dict[str, str], text: str, want: str | None
) -> None:
    """And nowhere else: what the engine looks at begins in the middle of it."""
    params = SamplingParams.parse(stop | {"max_new_tokens": 1000}, vocab_size=1 << 21).to_scheduler()
    letters = SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(map(chr, ids)))
    request = Generate(1, "rid", b"", params, LogprobOptions())
    words = text.split(" ")
    said = f"{words[0]} {'lorem ipsum ' * 20}{' '.join(words[1:])}"
    running = engine.Running.of(request, 1000, frozenset())
    reasons = (running.take(ord(letter), letters) for letter in said)
    assert next((reason.matched for reason in reasons if reason), None) == want


def test_stops_are_found_and_trimmed(front: Front, small_tokenizer: Path) -> None:
    tokenizer = Tokenizer.from_file(str(small_tokenizer))

    async def run() -> None:
        whole = await ask(front, PROMPTS[0], temperature=0, max_new_tokens=40)
        at = next(k for k in range(5, 40) if whole.ids[k] not in whole.ids[:k])
        by_token = await ask(
            front, PROMPTS[0], temperature=0, max_new_tokens=40, stop_token_ids=[whole.ids[at]]
        )
        assert (by_token.ids, by_token.reason) == (whole.ids[:at], "stop")
        held = await ask(
            front,
            PROMPTS[0],
            temperature=0,
            max_new_tokens=40,
            stop_token_ids=[whole.ids[at]],
            min_new_tokens=40,
        )
        assert (len(held.ids), held.reason) == (40, "length")
        assert whole.ids[at] not in held.ids
        plain = tokenizer.decode(whole.ids)
        stop = plain[6:9]
        by_text = await ask(front, PROMPTS[0], temperature=0, max_new_tokens=40, stop=stop)
        assert (by_text.text, by_text.reason) == (plain[: plain.index(stop)], "stop")

    asyncio.run(run())


def test_sampling_is_repeatable_by_seed_and_bounded_by_top_k(front: Front) -> None:
    async def run() -> None:
        one, again, other, narrow, greedy = await asyncio.gather(
            *(
                ask(front, PROMPTS[1], max_new_tokens=24, temperature=2.0, sampling_seed=seed, **more)
                for seed, more in ((1, {}), (1, {}), (2, {}), (3, {"top_p": 1e-6}), (4, {"top_k": 1}))
            )
        )
        assert one.ids == again.ids != other.ids
        assert narrow.ids == greedy.ids

    asyncio.run(run())


def test_log_probabilities_are_the_models(front: Front) -> None:
    async def run() -> None:
        answer = await ask(
            front, PROMPTS[2], temperature=0, max_new_tokens=6,
            return_logprob=True, top_logprobs_num=3, token_ids_logprob=[1, 2],
        )  # fmt: skip
        assert len(answer.ids) == 6
        values = [float(value) for event in answer.events for value in event.columns.output_logprobs.values]
        best = [float(value) for event in answer.events for value in event.columns.output_top_logprobs.values]
        assert values == best[::3]  # greedy: the chosen one is the best
        assert all(value <= 0 and math.isfinite(value) for value in best)
        assert all(np.exp(best[at : at + 3]).sum() <= 1 + 1e-5 for at in range(0, 18, 3))

    asyncio.run(run())


def test_what_it_cannot_do_is_refused_and_what_was_left_is_aborted(front: Front) -> None:
    async def run() -> None:
        refused = await ask(front, "x", frequency_penalty=0.5)
        assert refused.error == "400 this engine has no frequency_penalty"
        long = await ask(front, [1] * 4096, max_new_tokens=1)
        assert "a prompt of 4096 tokens" in long.error
        assert (await ask(front, "x", max_new_tokens=0)).reason == "length"
        (endless,) = await front.submit({"text": "x", "sampling_params": {"max_new_tokens": None}})
        async with endless:
            await anext(endless.source)
        assert await front.control("health") == b'{"healthy":true}'

    asyncio.run(run())


def test_a_models_directory_is_loaded(engine: ModuleType, tmp_path: Path) -> None:
    made = engine.load_model(None, 320, 7)
    made.save_pretrained(tmp_path)
    loaded = engine.load_model(str(tmp_path), 999, 0)
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        assert torch.equal(made.eval()(input_ids=ids).logits, loaded.eval()(input_ids=ids).logits)
    with pytest.raises(OSError, match="nowhere"):
        engine.load_model(str(tmp_path / "nowhere"), 320, 0)
