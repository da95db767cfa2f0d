"""Sampling parameters: the field's names, defaults, ranges and order, with nothing a client can skip.

`SamplingParams.parse` takes one client object through type checks (`fields`) → post-init → normalize →
verify. The three steps are public and idempotent: running them again changes nothing. A client object can
only name the fields in `fields.CHECKS`; the internal ones (`stop_strs`, `stop_regex_strs`, the two lengths,
`is_normalized`) are made here and refused from outside.

Must not know where a request came from or where it goes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from .errors import BadRequest, show
from .fields import CHECKS, MAX_F32, MAX_I64, MAX_STOP_REGEXES, MAX_STOP_STRINGS
from .stop_regex import CACHE, Admission, Effort, admit

TOP_K_ALL = 1 << 30
"""top_k that means the whole vocabulary."""
GREEDY_BELOW = 1e-6
"""A temperature below this is greedy: temperature 1.0 with top_k 1."""
DEFAULT_MAX_NEW_TOKENS = 128
CHARACTERS_PER_TOKEN = 8
"""How many characters a token of output is taken to be when a stop_regex is weighed: twice what text of any
language has on average. A server whose model can be led to emit run after run of its longest tokens (of
spaces, of dashes) passes that length."""
LONGEST_OUTPUT_TOKENS = 1 << 20
"""Taken for the longest output when neither the request nor the server limits it."""

LEAST_F32 = 2.0**-126
"""The least positive number that every engine's 32-bit floats hold: what is below may be flushed to 0."""

INTERNAL = frozenset(
    ("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized")
)
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
WHERE = "sampling_params"


class SamplingParams(msgspec.Struct, kw_only=True):
    """One request's sampling parameters. Build it with `parse`; the fields below are the reference table's.

    `stop` and `stop_regex` are what a client wrote and are None after `post_init`; `stop_strs` and
    `stop_regex_strs` are lists after `normalize`. `stop_str_max_len` is in UTF-8 bytes (a safe bound on
    tokens), `stop_regex_max_len` in characters.
    """

    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_ALL
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    beam_width: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    custom_params: dict[str, Any] | None = None
    stop_strs: str | list[str] | None = None
    stop_regex_strs: str | list[str] | None = None
    stop_str_max_len: int = 0
    stop_regex_max_len: int = 0
    is_normalized: bool = False

    @classmethod
    def parse(
        cls,
        obj: Mapping[str, Any] | None,
        *,
        vocab_size: int,
        tokenizer_present: bool = True,
        defaults: Mapping[str, Any] | None = None,
        max_output_tokens: int | None = None,
        characters_per_token: float = CHARACTERS_PER_TOKEN,
        effort: Effort | None = None,
        where: str = WHERE,
    ) -> "SamplingParams":
        """Check one client object and return it normalized and verified; BadRequest names the field.

        `defaults` are the server's own (preferred) values, below the client's: a field the client leaves
        out, or sets to null, takes them; `max_new_tokens` null is a value and stays.
        `max_output_tokens` is what the context length leaves for the output; with `max_new_tokens` and
        `characters_per_token` it says how long a text each stop_regex will be searched in. `effort` is what
        may be spent on analysing the patterns, shared by the objects of one request.
        """
        if obj is None:
            obj = {}
        elif not isinstance(obj, dict):
            raise BadRequest(where, f"must be an object, got {show(obj)}")
        if defaults:
            obj = _merged(defaults, obj)
        params = cls(**_checked(obj, where))
        params.post_init()
        places = _places(obj.get("stop_regex"))
        params.normalize(tokenizer_present=tokenizer_present, effort=effort, where=where, places=places)
        params.verify(
            vocab_size,
            max_output_tokens=max_output_tokens,
            characters_per_token=characters_per_token,
            where=where,
            places=places,
        )
        return params

    def post_init(self) -> None:
        """Move the aliases to their fields and replace special values by what they mean."""
        if self.stop is not None:
            self.stop_strs, self.stop = self.stop, None
        if self.stop_regex is not None:
            self.stop_regex_strs, self.stop_regex = self.stop_regex, None
        if self.stop_token_ids is not None:
            # Sorted, so that equal sets look equal; empty is the same as none.
            self.stop_token_ids = sorted(self.stop_token_ids) or None
        if 0.0 <= self.temperature < GREEDY_BELOW:
            self.temperature, self.top_k = 1.0, 1
        elif self.top_k == -1:
            self.top_k = TOP_K_ALL
        if self.json_schema == "":
            self.json_schema = None
        if self.regex == "":
            self.regex = None
        if self.ebnf == "":
            self.ebnf = None
        if self.structural_tag == "":
            self.structural_tag = None

    def normalize(
        self,
        *,
        tokenizer_present: bool = True,
        effort: Effort | None = None,
        where: str = WHERE,
        places: Sequence[int] | None = None,
    ) -> None:
        """Make scalars lists, measure them, and refuse what needs a tokenizer when there is none.

        `places` says where in the client's list each pattern stands, for messages: empty ones are dropped.
        """
        if self.is_normalized:
            return
        strs = self.stop_strs = _listed(self.stop_strs, MAX_STOP_STRINGS, where, "stop")
        regexes = self.stop_regex_strs = _listed(self.stop_regex_strs, MAX_STOP_REGEXES, where, "stop_regex")
        if not tokenizer_present:
            for name, used in (
                ("stop", strs),
                ("stop_regex", regexes),
                ("min_new_tokens", self.min_new_tokens),
            ):
                if used:
                    raise BadRequest(
                        f"{where}.{name}", "needs a tokenizer, and this server runs without one; leave it out"
                    )
        longest = 0
        for text in strs:
            size = len(text) if text.isascii() else len(text.encode())
            if size > longest:
                longest = size
        self.stop_str_max_len = longest
        if regexes:
            self.stop_regex_max_len = max(found.window for found in _admitted(regexes, where, places, effort))
        self.is_normalized = True

    def verify(
        self,
        vocab_size: int,
        *,
        max_output_tokens: int | None = None,
        characters_per_token: float = CHARACTERS_PER_TOKEN,
        where: str = WHERE,
        places: Sequence[int] | None = None,
    ) -> None:
        """Hold every value against its range; BadRequest says which field, the range and the value."""
        # Each written so that NaN, for which every comparison is false, fails.
        # Engines compute in f32: a number that is 0 or infinite there is out of range, whatever it is here.
        if not 0.0 <= self.temperature <= MAX_F32:
            accepted = f"at least 0 and, as a 32-bit float, finite (at most {MAX_F32:.3g})"
            raise _outside(where, "temperature", accepted, self.temperature)
        if not LEAST_F32 <= self.top_p <= 1.0:
            raise _outside(where, "top_p", f"in (0, 1]{_as_f32(self.top_p)}", self.top_p)
        if not 1 <= self.top_k <= MAX_I64:
            raise _outside(where, "top_k", "-1 for the whole vocabulary, or at least 1", self.top_k)
        if not 0.0 <= self.min_p <= 1.0:
            raise _outside(where, "min_p", "in [0, 1]", self.min_p)
        if not -2.0 <= self.frequency_penalty <= 2.0:
            raise _outside(where, "frequency_penalty", "in [-2, 2]", self.frequency_penalty)
        if not -2.0 <= self.presence_penalty <= 2.0:
            raise _outside(where, "presence_penalty", "in [-2, 2]", self.presence_penalty)
        if not LEAST_F32 <= self.repetition_penalty <= 2.0:
            accepted = f"in (0, 2]{_as_f32(self.repetition_penalty)}"
            raise _outside(where, "repetition_penalty", accepted, self.repetition_penalty)
        if self.stream_interval is not None and not 1 <= self.stream_interval <= MAX_I64:
            raise _outside(where, "stream_interval", "at least 1, or null", self.stream_interval)
        if self.top_k >= vocab_size:
            # Any number of candidates beyond the vocabulary is all of it; kernels index by it.
            self.top_k = TOP_K_ALL
        self._verify_lengths(where)
        self._verify_tokens(vocab_size, where)
        if self.stop_regex_strs:
            self._verify_stop_regex(max_output_tokens, characters_per_token, where, places)

    def _verify_lengths(self, where: str) -> None:
        least, most = self.min_new_tokens, self.max_new_tokens
        if most is not None and not 0 <= most <= MAX_I64:
            raise _outside(where, "max_new_tokens", "at least 0, or null for no limit", most)
        if not 0 <= least <= (MAX_I64 if most is None else most):
            limit = "" if most is None else f", that is [0, {most}]"
            raise _outside(where, "min_new_tokens", f"in [0, max_new_tokens]{limit}", least)
        if self.n != 1:
            more = "; for more, send it as often" if self.n > 1 else ""
            raise BadRequest(f"{where}.n", f"must be 1, got {show(self.n)}: a request has one response{more}")
        if self.beam_width is not None and self.beam_width != 1:
            raise BadRequest(
                f"{where}.beam_width", f"must be 1 or absent, got {self.beam_width}: no beam search"
            )
        grammars = (self.json_schema, self.regex, self.ebnf, self.structural_tag)
        if grammars.count(None) < len(grammars) - 1:
            given = [name for name, text in zip(GRAMMARS, grammars, strict=True) if text is not None]
            raise BadRequest(f"{where}.{given[1]}", f"at most one of {', '.join(GRAMMARS)}; got {given}")

    def _verify_tokens(self, vocab_size: int, where: str) -> None:
        ids = self.stop_token_ids
        if ids and not (ids[0] >= 0 and ids[-1] < vocab_size):  # they are sorted
            wrong = ids[0] if ids[0] < 0 else ids[-1]
            raise BadRequest(
                f"{where}.stop_token_ids", f"must be token ids in [0, {vocab_size}), got {wrong}"
            )
        if self.logit_bias and not max(map(int, self.logit_bias)) < vocab_size:
            wrong_key = max(map(int, self.logit_bias))
            raise BadRequest(
                f"{where}.logit_bias", f"keys must be token ids in [0, {vocab_size}), got {wrong_key}"
            )

    def _verify_stop_regex(
        self, max_output_tokens: int | None, per_token: float, where: str, places: Sequence[int] | None
    ) -> None:
        limits = [limit for limit in (self.max_new_tokens, max_output_tokens) if limit is not None]
        tokens = max(0, min([*limits, LONGEST_OUTPUT_TOKENS]))
        characters = int(tokens * per_token)
        for index, found in enumerate(_admitted(self.stop_regex_strs or (), where, places)):
            if characters > found.longest:
                field = _regex_field(where, index, places)
                raise BadRequest(field, found.refusal(characters) or "is refused")

    def to_scheduler(self) -> dict[str, Any]:
        """Return the normalized object a scheduler takes: every field but the aliases, JSON-able values."""
        fields: dict[str, Any] = msgspec.structs.asdict(self)
        del fields["stop"], fields["stop_regex"]
        return fields


def parse_each(
    obj: Mapping[str, Any] | list[Any] | None, count: int, *, where: str = WHERE, **options: Any
) -> list[SamplingParams]:
    """Parse the parameters of `count` prompts: one object for all of them, or a list with one for each.

    `options` are those of `SamplingParams.parse`. Entries of a list are numbered in messages.
    """
    if not isinstance(obj, list):
        return [SamplingParams.parse(obj, where=where, **options)] * count
    if len(obj) != count:
        raise BadRequest(
            where, f"must be one object or a list of {count}, one for each prompt; got {len(obj)}"
        )
    options.setdefault("effort", Effort())
    return [SamplingParams.parse(entry, where=f"{where}[{i}]", **options) for i, entry in enumerate(obj)]


def brings_new_patterns(obj: Any) -> bool:
    """Say whether client objects have stop patterns that are still to be analysed, which takes a while."""
    known = CACHE.get
    for entry in obj if type(obj) is list else (obj,):
        patterns = entry.get("stop_regex") if type(entry) is dict else None
        for pattern in patterns if type(patterns) is list else (patterns,):
            if type(pattern) is str and pattern and known(pattern) is None:
                return True
    return False


def _as_f32(value: float) -> str:
    """Say why a positive number is refused all the same: as a 32-bit float it may be 0."""
    return f" as a 32-bit float (at least {LEAST_F32:.3g})" if 0.0 < value < LEAST_F32 else ""


def _outside(where: str, name: str, accepted: str, value: Any) -> BadRequest:
    return BadRequest(f"{where}.{name}", f"must be {accepted}; got {show(value)}")


def _checked(obj: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check the type of every field that is there. A null is absent, but for max_new_tokens (no limit)."""
    checked = {}
    try:
        for name, value in obj.items():
            check = CHECKS.get(name)
            if check is None:
                raise _unknown(name)
            if value is not None:
                checked[name] = check(value, name)
            elif name == "max_new_tokens":
                checked[name] = None
    except BadRequest as error:
        raise error.under(where) from None
    return checked


def _unknown(name: Any) -> BadRequest:
    if type(name) is str and name in INTERNAL:
        return BadRequest(name, "is made by the server and cannot be set; leave it out")
    return BadRequest("", f"unknown field {show(name)}; the known ones are {', '.join(CHECKS)}")


def _merged(defaults: Mapping[str, Any], obj: Mapping[str, Any]) -> dict[str, Any]:
    """Put the client's values over the server's; a null gives way, except where it means something."""
    merged = dict(defaults)
    for name, value in obj.items():
        if value is not None or name == "max_new_tokens" or name not in merged:
            merged[name] = value
    return merged


def _listed(value: str | list[str] | None, limit: int, where: str, name: str) -> list[str]:
    if value is None:
        return []
    entries = [value] if isinstance(value, str) else value
    if len(entries) > limit:
        raise BadRequest(f"{where}.{name}", f"takes at most {limit} strings, got {len(entries)}")
    # An empty string or pattern would match before the first character; it asks for nothing.
    return [entry for entry in entries if entry]


def _places(stop_regex: Any) -> list[int] | None:
    """Return where in a client's list the patterns stand that are not dropped; None when all stay."""
    if type(stop_regex) is not list or all(stop_regex):
        return None
    return [place for place, pattern in enumerate(stop_regex) if pattern]


def _regex_field(where: str, index: int, places: Sequence[int] | None) -> str:
    return f"{where}.stop_regex[{index if places is None else places[index]}]"


def _admitted(
    patterns: Iterable[str], where: str, places: Sequence[int] | None, effort: Effort | None = None
) -> list[Admission]:
    known = CACHE.get
    found = []
    for index, pattern in enumerate(patterns):
        admission = known(pattern)
        if admission is None:
            effort = effort or Effort()
            admission = admit(pattern, _regex_field(where, index, places), effort)
        found.append(admission)
    return found
