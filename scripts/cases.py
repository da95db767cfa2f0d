"""The requests that demo and chaos make, and the truth about each: worked out here, from the tokenizer alone.

A replay scheduler's tokens depend on the rid alone, so what a stream must say is known before it starts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from outfeed.sidecar import FinishReason
from outfeed.sidecar.replay import replay_start


@dataclass(slots=True)
class Case:
    """One request and what its stream must be.

    prompt: its input ids. corpus: tokens of the replayed text. ids: every id the scheduler may generate for
    it, up to its limit. text: the exact text. reason: the type of its finish reason. kind: what it tries.
    """

    rid: str
    prompt: list[int]
    kind: str
    params: dict[str, Any]
    corpus: int
    ids: list[int]
    text: str
    reason: str
    open_end: bool = False
    """The stop is kept: `text` ends with it, and what else its last step generated comes after it."""

    def difference(
        self, tokenizer: Any, text: str, ids: list[int], tokens: int, finish: FinishReason | None
    ) -> str:
        """Say how a stream that has ended differs from the truth; "" when it does not."""
        want = self.text
        if self.open_end and text.startswith(want):
            want = beyond(tokenizer, self.prompt, self.ids[:tokens])
        if text != want:
            at = next((k for k, (a, b) in enumerate(zip(text, want, strict=False)) if a != b), len(want))
            return f"text differs at character {at}: got {text[at : at + 20]!r}, want {want[at : at + 20]!r}"
        if ids != self.ids[: len(ids)]:
            return "the ids are not those that were generated"
        reason = "none" if finish is None else finish.type
        if reason != self.reason:
            return f"finish reason {reason!r}, want {self.reason!r}"
        if self.reason == "length" and tokens != len(self.ids):
            return f"{tokens} tokens counted, {len(self.ids)} generated"
        return ""


def make_cases(tokenizer: Any, corpus: NDArray[np.int32], count: int, seed: int) -> list[Case]:
    """Make `count` requests of different lengths: plain ones, and every tenth with a stop of some kind."""
    rng = random.Random(seed)
    return [make_case(tokenizer, corpus, f"demo-{seed}-{number}", number, rng) for number in range(count)]


def make_case(tokenizer: Any, corpus: NDArray[np.int32], rid: str, number: int, rng: random.Random) -> Case:
    """Make one request; `number` decides its kind, `rng` its length and its stop."""
    limit = rng.randint(16, 320)
    start = replay_start(rid, corpus.size)
    ids = [int(corpus[(start + k) % corpus.size]) for k in range(limit)]
    params: dict[str, Any] = {"max_new_tokens": limit}
    prompt = [int(corpus[(start - k) % corpus.size]) for k in range(rng.randint(1, 32), 0, -1)]
    plain = Case(rid, prompt, "plain", params, corpus.size, ids, beyond(tokenizer, prompt, ids), "length")
    match number % 10:
        case 3:
            return _stop_string(tokenizer, plain, rng)
        case 6:
            return _stop_token(tokenizer, plain, rng)
        case 9:
            # A stop that never comes must change nothing, however often it nearly does.
            plain.params["stop"] = [plain.text[:12] + "\x00", "of the\x00", " \x00", "。\x00"]
            plain.kind = "stop that never comes"
    return plain


def _stop_string(tokenizer: Any, case: Case, rng: random.Random) -> Case:
    middle = len(case.text) // 2
    stop = case.text[middle : middle + rng.randint(1, 8)]
    if not stop or "\ufffd" in stop:
        return case
    keep = rng.random() < 0.3
    cut = case.text.index(stop) + (len(stop) if keep else 0)
    params = case.params | {"stop": [stop], "no_stop_trim": keep}
    return Case(
        case.rid, case.prompt, "stop string", params, case.corpus, case.ids, case.text[:cut], "stop", keep
    )


def _stop_token(tokenizer: Any, case: Case, rng: random.Random) -> Case:
    stop = rng.choice(case.ids[len(case.ids) // 2 :])
    ids = case.ids[: case.ids.index(stop) + 1]
    params = case.params | {"stop_token_ids": [stop]}
    heard = ids[:-1] if stop else ids  # a matched token id 0 trims nothing
    return Case(
        case.rid,
        case.prompt,
        "stop token",
        params,
        case.corpus,
        ids,
        beyond(tokenizer, case.prompt, heard),
        "stop",
    )


def beyond(tokenizer: Any, prompt: list[int], ids: list[int], skip_special: bool = True) -> str:
    """Return the text that `ids` add to a prompt's: what a stream must say.

    A prompt may end inside a character. Its decode then ends in U+FFFD where the whole decode has the
    character, which, once it is whole, belongs to the stream; the characters before it do not, even where
    the tokenizer (byte fallback) had made U+FFFD of them, too, for want of the last one's end.
    """
    before: str = tokenizer.decode(prompt, skip_special_tokens=skip_special)
    whole: str = tokenizer.decode(prompt + ids, skip_special_tokens=skip_special)
    same = next((k for k, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
    if same < len(before) and not before.endswith("\ufffd"):
        # Broken bytes of the output made U+FFFD of the prompt's own: the output is what it says alone.
        return str(tokenizer.decode(ids, skip_special_tokens=skip_special))
    if same < len(before):
        shorter = [tokenizer.decode(prompt[:-k], skip_special_tokens=skip_special) for k in range(1, 4)]
        same = max(same, *(len(text) for text in shorter if whole.startswith(text)), 0)
    return whole[same:]
