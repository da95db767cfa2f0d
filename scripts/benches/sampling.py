"""What checking one request's sampling parameters costs, beside the same model and checks in pydantic v2.

Each case is the whole way from a decoded JSON object to normalized, verified parameters; `stops` has stop
strings and token ids, `cold` and `cached` have 32 stop patterns that were never seen or were just seen.
pydantic's model has the same fields, types, ranges and cross checks (see `model`), in its own idiom; it has
no admission of patterns, so it is compared where there are none. Best of several rounds, microseconds.
"""

import gc
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from outfeed.ingress.sampling import TOP_K_ALL, SamplingParams
from outfeed.ingress.stop_regex import CACHE

VOCAB = 129_280
PLAIN: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "max_new_tokens": 256}
STOPS: dict[str, Any] = {
    **PLAIN,
    "stop": ["\n\n", "</s>", "User:"],
    "stop_token_ids": [1, 2, 3],
    "frequency_penalty": 0.2,
    "ignore_eos": False,
    "logit_bias": {"17": -100.0, "42": 1.5},
}


def patterns(turn: int) -> list[str]:
    """Make 32 ordinary patterns that no turn before had."""
    return [rf"(?:end|stop){turn}{index}\s*[.!?]|Q\d{{1,3}}:" for index in range(32)]


def model() -> Callable[[dict[str, Any]], Any]:
    """Return the validator of the same parameters written with pydantic v2."""
    from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

    finite = Field(allow_inf_nan=False)

    def biases(value: dict[str, float]) -> dict[str, float]:
        for key, bias in value.items():
            if (
                not key.isascii()
                or not key.isdecimal()
                or (key[0] == "0" and key != "0")
                or int(key) >= VOCAB
            ):
                raise ValueError("keys must be token ids")
            if bias != -math.inf and not -3.4028234663852886e38 <= bias <= 3.4028234663852886e38:
                raise ValueError("must fit f32")
        return value

    Id = Annotated[int, Field(ge=0, lt=VOCAB)]
    Stop = Annotated[str, Field(max_length=4096)]
    Scalar = str | int | Annotated[float, finite] | bool | None

    class Params(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True)
        max_new_tokens: Annotated[int, Field(ge=0)] | None = 128
        stop: Stop | Annotated[list[Stop], Field(max_length=32)] | None = None
        stop_token_ids: list[Id | None] | None = None
        temperature: Annotated[float, finite, Field(ge=0)] = 1.0
        top_p: Annotated[float, finite, Field(gt=0, le=1)] = 1.0
        top_k: int = TOP_K_ALL
        min_p: Annotated[float, finite, Field(ge=0, le=1)] = 0.0
        frequency_penalty: Annotated[float, finite, Field(ge=-2, le=2)] = 0.0
        presence_penalty: Annotated[float, finite, Field(ge=-2, le=2)] = 0.0
        repetition_penalty: Annotated[float, finite, Field(gt=0, le=2)] = 1.0
        min_new_tokens: Annotated[int, Field(ge=0)] = 0
        n: Annotated[int, Field(ge=1, le=1)] = 1
        beam_width: Annotated[int, Field(ge=1, le=1)] | None = None
        json_schema: str | None = None
        regex: str | None = None
        ebnf: str | None = None
        structural_tag: str | None = None
        ignore_eos: bool = False
        no_stop_trim: bool = False
        skip_special_tokens: bool = True
        spaces_between_special_tokens: bool = True
        stream_interval: Annotated[int, Field(ge=1)] | None = None
        logit_bias: Annotated[dict[str, float], AfterValidator(biases)] | None = None
        sampling_seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
        custom_params: dict[str, Scalar | list[Scalar] | dict[str, Scalar]] | None = None
        stop_strs: list[str] = []
        stop_str_max_len: int = 0

        @model_validator(mode="after")
        def settle(self) -> "Params":
            """Post-init, normalize and verify: what no field can tell alone."""
            if 0.0 <= self.temperature < 1e-6:
                self.temperature, self.top_k = 1.0, 1
            elif self.top_k == -1 or self.top_k >= VOCAB:
                self.top_k = TOP_K_ALL
            if self.top_k < 1:
                raise ValueError("top_k")
            if self.stop is not None:
                self.stop_strs = (
                    [self.stop] if isinstance(self.stop, str) else [one for one in self.stop if one]
                )
                self.stop = None
                sizes = [len(one.encode()) for one in self.stop_strs]
                self.stop_str_max_len = max(sizes, default=0)
                if self.stop_str_max_len > 4096:
                    raise ValueError("stop")
            if self.stop_token_ids is not None:
                self.stop_token_ids = [*sorted({one for one in self.stop_token_ids if one is not None})]
            if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
                raise ValueError("min_new_tokens")
            grammars = (self.json_schema, self.regex, self.ebnf, self.structural_tag)
            if sum(bool(one) for one in grammars) > 1:
                raise ValueError("one grammar")
            return self

    return Params.model_validate


def best(seconds: float, *calls: Callable[[], object]) -> list[float]:
    """Return the least time of one call in microseconds, for each of `calls`, their rounds taken in turn."""
    rounds = []
    for call in calls:
        count = 1
        while _took(call, count) < 1_000_000:
            count *= 2
        rounds.append(count)
    least = [math.inf] * len(calls)
    until = time.perf_counter() + seconds
    gc.disable()
    try:
        while time.perf_counter() < until:
            for index, call in enumerate(calls):
                least[index] = min(least[index], _took(call, rounds[index]) / rounds[index])
    finally:
        gc.enable()
    return [one / 1000 for one in least]


def _took(call: Callable[[], object], rounds: int) -> int:
    start = time.perf_counter_ns()
    for _ in range(rounds):
        call()
    return time.perf_counter_ns() - start


def run(quick: bool) -> dict[str, Any]:
    """Measure each case, both implementations in the same run."""
    seconds = 0.3 if quick else 2.0
    peer = model()
    found: dict[tuple[str, str], float] = {}
    for case, params in (("empty", {}), ("plain", PLAIN), ("stops", STOPS)):
        found[case, "outfeed"], found[case, "pydantic"] = best(
            seconds, partial(SamplingParams.parse, params, vocab_size=VOCAB), partial(peer, params)
        )
    cached = {**PLAIN, "stop_regex": patterns(0)}
    (found["32 patterns, cached", "outfeed"],) = best(
        seconds, partial(SamplingParams.parse, cached, vocab_size=VOCAB)
    )
    cold = math.inf
    for turn in range(1, 10 if quick else 60):
        CACHE.clear()
        obj = {**PLAIN, "stop_regex": patterns(turn)}
        start = time.perf_counter_ns()
        SamplingParams.parse(obj, vocab_size=VOCAB)
        cold = min(cold, (time.perf_counter_ns() - start) / 1000)
    found["32 patterns, cold", "outfeed"] = cold
    ratios = {
        f"vs_pydantic_{case}": found[case, "pydantic"] / found[case, "outfeed"]
        for case in ("empty", "plain", "stops")
    }
    ratios["vs_pydantic"] = min(ratios.values())
    ratios["cached_vs_cold"] = cold / found["32 patterns, cached", "outfeed"]
    return {
        "bench": "sampling",
        "results": [
            {"case": case, "impl": impl, "value": value, "unit": "us/request"}
            for (case, impl), value in found.items()
        ],
        "ratios": ratios,
    }
