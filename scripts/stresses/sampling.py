"""Throws random JSON at admission: whatever it is, it is taken, or refused as the client's fault, at once.

Objects are built from the fields' own names and from values that are near the edge of what each may be, far
beyond it, or of another type altogether; some go in as whole `/generate` bodies, some as broken bytes. Any
exception but BadRequest, and any single admission over a second, is a fault.
"""

import argparse
import json
import math
import random
import time
from typing import Any, cast

from options import between
from outfeed.ingress.errors import BadRequest
from outfeed.ingress.fields import CHECKS
from outfeed.ingress.request import GENERATE_FIELDS, Model, decode_body, parse_generate, ready
from outfeed.ingress.sampling import INTERNAL, SamplingParams

VOCAB = 1000
SLOW_S = 1.0
DEFAULT_COUNT = 1_000_000
MAX_COUNT = 1_000_000_000
FIELDS = [*CHECKS, *INTERNAL, "temprature", "", "max_tokens"]
PIECES = [
    *("a", "b", ".", r"\d", r"\w", r"\s", "[a-c]", "[^a]", "(a)", "(?:ab|b)", "(", ")", "[", "{", "}"),
    *("*", "+", "?", "{2}", "{1,3}", "{4294967295}", "{0,9999}", "|", "^", "$", r"\b", r"\1", "(?=a)"),
    *("(?<!b)", "(?>a+)", "(?i)", "(?(1)a|b)", "é", "🙂", "\ud800", r"\Z", r"\p{L}", r"\x41", r"\u00e9"),
    *(r"\N{DASH}", "(?P<n>a)", "(?P=n)", "-", "\0"),
]
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.0, -0.0, 1.0, 0.5, 1e-7, 1e308, 5e-324, 128, 1000, 999, -2, 1 << 30),
    *(2**31, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30, 10**400, math.nan, math.inf, -math.inf),
    *("", "a", "1", "NaN", "\ud800", "é", "x" * 300, [], {}, [None], [[]], [1], ["a"], {"a": 1}),
    *({"1": 1.0}, {"1": math.nan}, {"a": {"b": {"c": 1}}}),
]


def value(rng: random.Random, depth: int = 0) -> Any:
    """Draw any JSON value."""
    kind = rng.random()
    if kind < 0.6 or depth > 3:
        return rng.choice(ODD)
    if kind < 0.7:
        return rng.randint(-(10 ** rng.randint(0, 25)), 10 ** rng.randint(0, 25))
    if kind < 0.8:
        return rng.uniform(-3, 3)
    if kind < 0.9:
        return [value(rng, depth + 1) for _ in range(rng.randint(0, 5))]
    return {str(value(rng, 9))[:20]: value(rng, depth + 1) for _ in range(rng.randint(0, 4))}


def pattern(rng: random.Random) -> str:
    """Draw something like a stop pattern, of up to about 300 bytes."""
    return "".join(rng.choice(PIECES) for _ in range(rng.choice((1, 2, 3, 5, 8, 13, 60))))


def params(rng: random.Random) -> Any:
    """Draw a `sampling_params`."""
    if rng.random() < 0.03:
        return value(rng)
    obj: dict[str, Any] = {}
    for name in rng.sample(FIELDS, rng.choice((0, 1, 1, 2, 2, 3, 6))):
        if name == "stop_regex" and rng.random() < 0.8:
            obj[name] = [pattern(rng) for _ in range(rng.choice((1, 1, 2)))]
        elif name == "logit_bias" and rng.random() < 0.5:
            obj[name] = {str(rng.randint(-2, VOCAB + 2)): value(rng)}
        else:
            obj[name] = value(rng)
    return obj


def body(rng: random.Random) -> Any:
    """Draw a `/generate` body."""
    obj: dict[str, Any] = (
        {"input_ids": [1, 2, 3]} if rng.random() < 0.6 else {"text": rng.choice(["a", ["a", "b"]])}
    )
    obj["sampling_params"] = [params(rng), params(rng)] if rng.random() < 0.1 else params(rng)
    for name in rng.sample(GENERATE_FIELDS, rng.choice((0, 1, 2))):
        obj[name] = value(rng)
    return obj


def admit(rng: random.Random, model: Model) -> None:
    """Put one random thing through admission, by one of its doors."""
    door = rng.random()
    if door < 0.7:
        SamplingParams.parse(params(rng), vocab_size=VOCAB)
        return
    whole = body(rng)
    if door > 0.9:
        raw = json.dumps(whole).encode("utf-8", "surrogatepass")
        if rng.random() < 0.3:
            cut = rng.randrange(len(raw) + 1)
            raw = raw[:cut] + rng.randbytes(rng.randint(0, 3)) + raw[cut + rng.randint(0, 2) :]
        whole = decode_body(raw)
    request = parse_generate(whole, model)
    for prompt in request.prompts:
        ready(prompt, [1, 2, 3] if prompt.ids is None else prompt.ids, request.stream, model)


def hunt(count: int, seed: int, seconds: float = math.inf) -> dict[str, Any]:
    """Admit `count` random objects, or as many as fit in `seconds`, and return what was found."""
    rng = random.Random(seed)
    model = Model(vocab_size=VOCAB, context_length=4096, tokenizer=cast(Any, _Tokenizer()))
    found: dict[str, Any] = {
        "ok": True,
        "objects": 0,
        "admitted": 0,
        "refused": 0,
        "slowest_ms": 0.0,
        "faults": [],
    }
    until = time.monotonic() + seconds
    while found["objects"] < count and time.monotonic() < until:
        state = rng.getstate()
        start = time.perf_counter()
        try:
            admit(rng, model)
            found["admitted"] += 1
        except BadRequest as error:
            found["refused"] += 1
            error.message.encode()
            if error.status != 400 or len(error.message) > 2000:
                _fault(found, state, f"status {error.status}, message of {len(error.message)} characters")
        except Exception as error:
            _fault(found, state, f"{type(error).__name__}: {str(error)[:200]}")
        took = time.perf_counter() - start
        if took > SLOW_S:
            _fault(found, state, f"took {took:.2f} s")
        found["slowest_ms"] = max(found["slowest_ms"], took * 1000)
        found["objects"] += 1
    return found


def _fault(found: dict[str, Any], state: Any, what: str) -> None:
    """Remember a fault and the object it was found with, drawn again from the same state."""
    rng = random.Random()
    rng.setstate(state)
    door = rng.random()
    thing = params(rng) if door < 0.7 else body(rng)
    found["ok"] = False
    if len(found["faults"]) < 20:
        found["faults"].append(f"{what} for {ascii(thing)[:300]}")


class _Tokenizer:
    def encode(self, sequence: str, /) -> Any:
        """Texts are never tokenized here."""
        raise AssertionError(sequence)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what this stress takes beside --seconds and --seed."""
    parser.add_argument(
        "--objects", type=between(1, MAX_COUNT), default=DEFAULT_COUNT, help="how many (default 1,000,000)"
    )
    parser.set_defaults(seconds=7200.0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Hunt until enough objects went in or the time is over."""
    return hunt(args.objects, args.seed, args.seconds)
