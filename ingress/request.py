"""A `/generate` body becomes checked prompts: who asks for what, in ids the scheduler can take.

`decode_body` reads JSON, `parse_generate` checks a body against the model, `ready` checks what only the ids
can tell; `tokenize` does between them what takes long, on threads. Nothing here writes to a ring.
"""

import codecs
import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..ring.frames import PROMPT_TAIL, DecodeOptions, LogprobOptions
from .entries import KEY_ENTRIES, count_entries
from .errors import BadRequest, show
from .fields import Check, boolean, integer, text
from .sampling import CHARACTERS_PER_TOKEN, WHERE, SamplingParams, parse_each

MAX_BODY_BYTES = 16 << 20
MAX_ENTRIES = 1 << 19
"""Entries of all lists and objects of a body (`count_entries`): reading them holds the GIL, 0.1 us each."""
MAX_BATCH = 1024
MAX_RID_CHARACTERS = 256
MAX_LOGPROB_IDS = 1024
"""Entries of token_ids_logprob: each is a log probability at every token, of output and prompt."""
MAX_TOP_LOGPROBS = 128
"""top_logprobs_num, unless the server says otherwise: OpenAI's clients can ask for 20."""
DRAWN_RIDS = 256
"""Request ids drawn at once: drawing gives the GIL up, and getting it back can take milliseconds."""
HALF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
"""How JSON spells a surrogate; two that are a pair are found as well."""
BYTE_ORDER_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_RIDS: list[str] = []
os.register_at_fork(after_in_child=_RIDS.clear)

GENERATE_FIELDS = (
    "text",
    "input_ids",
    "sampling_params",
    "stream",
    "rid",
    "return_logprob",
    "top_logprobs_num",
    "token_ids_logprob",
    "logprob_start_len",
    "return_text_in_logprobs",
    "return_hidden_states",
)

OTHER_SERVERS_FIELDS = frozenset(
    (
        "audio_data",
        "background",
        "custom_logit_processor",
        "image_data",
        "input_embeds",
        "lora_id",
        "lora_path",
        "modalities",
        "require_reasoning",
        "return_indexer_topk",
        "return_routed_experts",
        "session_params",
        "video_data",
    )
)
"""What clients of other servers send with every request, nearly always to say that they want none of it."""


class Tokenizer(Protocol):
    """What is needed of `tokenizers.Tokenizer`."""

    def encode(self, sequence: str, /, *, add_special_tokens: bool = True) -> Any:
        """Return an object whose `ids` are the text's token ids, and whose length is how many there are."""

    def encode_batch_fast(self, sequences: list[str], /, *, add_special_tokens: bool = True) -> Any:
        """Return what `encode` does for each text, with the GIL dropped; may be called from any thread."""

    def decode_batch(self, sequences: list[list[int]], /) -> list[str]:
        """Return each list's text, with the GIL dropped; may be called from any thread."""


@dataclass(frozen=True, slots=True)
class Model:
    """What requests are checked against.

    `context_length` counts prompt and output tokens; `characters_per_token` is how long a token's text is
    taken to be when a stop_regex is weighed; `defaults` are sampling parameters below the client's own;
    `max_top_logprobs` is the most that `top_logprobs_num` may ask for.
    """

    vocab_size: int
    context_length: int
    tokenizer: Tokenizer | None = None
    characters_per_token: float = CHARACTERS_PER_TOKEN
    defaults: Mapping[str, Any] = field(default_factory=dict)
    max_top_logprobs: int = MAX_TOP_LOGPROBS

    def __post_init__(self) -> None:
        if self.defaults:
            # A server that starts with bad defaults would refuse every request: better not to start.
            SamplingParams.parse(dict(self.defaults), vocab_size=self.vocab_size, where="server defaults")


@dataclass(slots=True)
class Prompt:
    """One prompt of a request, checked as far as it can be before it is tokenized."""

    rid: str
    text: str | None
    ids: NDArray[np.int32] | None
    params: SamplingParams
    logprobs: LogprobOptions


@dataclass(slots=True)
class GenerateRequest:
    """A whole `/generate` body: `batch` says that the answer is a list, whatever its length."""

    prompts: list[Prompt]
    batch: bool
    stream: bool


@dataclass(slots=True)
class Ready:
    """One prompt that may be submitted: everything REGISTER and GENERATE carry but the route."""

    rid: str
    input_ids: bytes
    prompt_tokens: int
    params: SamplingParams
    logprobs: LogprobOptions
    stream: bool

    @property
    def prompt_tail(self) -> bytes:
        """The last ids of the prompt, at most PROMPT_TAIL, i32 little-endian."""
        return self.input_ids[-4 * PROMPT_TAIL :]

    def decode_options(self, *, detect_stops: bool = False) -> DecodeOptions:
        """Return how the shard turns this prompt's output into text."""
        params = self.params
        return DecodeOptions(
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            no_stop_trim=params.no_stop_trim,
            stop=list(params.stop_strs or ()),
            stop_token_ids=list(params.stop_token_ids or ()),
            stop_regex=list(params.stop_regex_strs or ()),
            detect_stops=detect_stops,
            return_text_in_logprobs=self.logprobs.return_text_in_logprobs,
            min_new_tokens=params.min_new_tokens,
        )


def decode_body(
    body: bytes | bytearray | memoryview, *, max_bytes: int = MAX_BODY_BYTES, max_entries: int = MAX_ENTRIES
) -> Any:
    """Read a JSON body; BadRequest when it is too large, too deep or not JSON.

    Depth needs no limit of its own here: the decoder stops at the interpreter's recursion limit, long
    before memory or time matter, and no field of a request takes more than three levels.
    """
    if len(body) > max_bytes:
        raise BadRequest("", f"the body has {len(body)} bytes; at most {max_bytes} are taken")
    # An entry takes a byte at least, so a short body need not be counted.
    if len(body) > max_entries and (entries := count_entries(body)) > max_entries:
        raise BadRequest(
            "",
            f"the body's lists and objects have {entries} entries, a key counted as {KEY_ENTRIES} more; "
            f"at most {max_entries} are taken: send fewer prompts at once, or text in place of ids",
        )
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        problem = str(error)
    raw = bytes(body)
    if not raw.strip():
        raise BadRequest("", "the body is empty; send a JSON object, with its Content-Length")
    if raw.startswith(BYTE_ORDER_MARKS):
        problem = "it begins with a byte order mark; send UTF-8 without one"
    elif b"Infinity" in raw or b"NaN" in raw:
        # Python clients write these; a logit_bias of -Infinity is meant, and NaN deserves a field's name.
        try:
            value = json.loads(raw.decode())
        except RecursionError:
            raise _too_deep() from None
        except ValueError as error:
            problem = str(error)
        else:
            if HALF_A_PAIR.search(raw):
                _must_be_text(value)
            return value
    raise BadRequest("", f"the body is not JSON: {problem[:200]}")


def _too_deep() -> BadRequest:
    return BadRequest("", "the body is nested too deeply; no field takes more than three levels")


def _must_be_text(value: Any) -> None:
    """Refuse a decoded body that holds half a surrogate pair: Python reads it, and nothing can send it on."""
    left = [value]
    while left:
        one = left.pop()
        if type(one) is str and not one.isascii():
            text(one, "body")
        elif type(one) is list:
            left += one
        elif type(one) is dict:
            left += one
            left += one.values()


def parse_generate(body: Any, model: Model) -> GenerateRequest:
    """Check a decoded `/generate` body; BadRequest names the field and, in a list, the entry."""
    if type(body) is not dict:
        raise BadRequest("", f"the body must be a JSON object, got {show(body)}")
    for name, value in body.items():
        if name not in GENERATE_FIELDS and value is not None:
            _must_ask_nothing(name, value)
    texts, ids, batch = _prompts(body, model)
    count = len(texts)
    params = parse_each(
        body.get(WHERE),
        count,
        vocab_size=model.vocab_size,
        tokenizer_present=model.tokenizer is not None,
        defaults=model.defaults,
        max_output_tokens=model.context_length,
        characters_per_token=model.characters_per_token,
    )
    rids = _rids(body.get("rid"), count, batch)
    logprobs = _logprobs(body, count, batch, model)
    stream = body.get("stream")
    return GenerateRequest(
        [Prompt(*one) for one in zip(rids, texts, ids, params, logprobs, strict=True)],
        batch,
        False if stream is None else boolean(stream, "stream"),
    )


def _must_ask_nothing(name: str, value: Any) -> None:
    """Refuse a field that is not taken here, unless it says that what it is about is not wanted."""
    if name not in OTHER_SERVERS_FIELDS:
        known = ", ".join(GENERATE_FIELDS)
        raise BadRequest("", f"unknown field {show(name)}; the known ones are {known}")
    if not asks_nothing(value):
        raise BadRequest(name, f"is not supported here; leave it out, got {show(value)}")


def asks_nothing(value: Any) -> bool:
    """Whether a field with this value says that what it is about is not wanted."""
    return value is None or value is False or value in ("", [], {})


def ready(prompt: Prompt, ids: NDArray[np.int32] | Sequence[int], stream: bool, model: Model) -> Ready:
    """Check a prompt's ids against the context length and the logprob start; BadRequest names the field."""
    array = np.ascontiguousarray(ids, dtype="<i4")
    count, wanted = len(array), prompt.params.max_new_tokens
    field = "input_ids" if prompt.text is None else "text"
    if count == 0:
        raise BadRequest(field, "must hold at least one token")
    if count >= model.context_length:
        raise too_long(field, count, model)
    if wanted is not None and count + wanted > model.context_length:
        raise BadRequest(
            f"{WHERE}.max_new_tokens",
            f"must be at most {model.context_length - count} after a prompt of {count} tokens, got {wanted}: "
            f"{_context(model)}",
        )
    start = prompt.logprobs.logprob_start_len
    if start > count:
        raise BadRequest("logprob_start_len", f"must be in [-1, {count}], the prompt's length; got {start}")
    return Ready(prompt.rid, array.tobytes(), count, prompt.params, prompt.logprobs, stream)


def too_long(field: str, count: int, model: Model) -> BadRequest:
    """Make the complaint about a prompt of `count` tokens."""
    return BadRequest(field, f"has {count} tokens; {_context(model)}, output included: shorten it")


def _context(model: Model) -> str:
    # Clients know a prompt that is too long by these words, which are OpenAI's: litellm, for one.
    return f"this model's maximum context length is {model.context_length} tokens"


def make_rid() -> str:
    """Return a request id that no other request has."""
    try:
        return _RIDS.pop()
    except IndexError:
        drawn = os.urandom(16 * DRAWN_RIDS).hex()
        _RIDS.extend(drawn[at : at + 32] for at in range(32, len(drawn), 32))
        return drawn[:32]


def _prompts(
    body: Mapping[str, Any], model: Model
) -> tuple[list[str | None], list[NDArray[np.int32] | None], bool]:
    """Return texts and ids side by side, one of the two for each prompt, and whether it is a batch."""
    given, ids = body.get("text"), body.get("input_ids")
    if (given is None) == (ids is None):
        raise BadRequest("text", "give exactly one of text and input_ids")
    if given is not None:
        if type(given) is str:
            return [text(given, "text")], [None], False
        entries = _batch(given, "text", "a string or a list of strings")
        return [text(one, f"text[{i}]") for i, one in enumerate(entries)], [None] * len(entries), True
    if type(ids) is list and ids and type(ids[0]) is list:
        entries = _batch(ids, "input_ids", "a list of token ids or a list of such lists")
        arrays = [_token_array(one, f"input_ids[{i}]", model) for i, one in enumerate(entries)]
        return [None] * len(entries), [*arrays], True
    return [None], [_token_array(ids, "input_ids", model)], False


def _batch(value: Any, name: str, accepted: str) -> list[Any]:
    if type(value) is not list:
        raise BadRequest(name, f"must be {accepted}, got {show(value)}")
    if not 1 <= len(value) <= MAX_BATCH:
        raise BadRequest(name, f"a batch has 1 to {MAX_BATCH} prompts, got {len(value)}")
    return value


def _token_array(value: Any, name: str, model: Model) -> NDArray[np.int32]:
    """Check a list of ids as a whole, and look for the culprit only when there is one."""
    if type(value) is not list or not value:
        raise BadRequest(name, f"must be a non-empty list of token ids, got {show(value)}")
    if len(value) >= model.context_length:
        raise too_long(name, len(value), model)  # before anything is done with each of them
    if set(map(type, value)) == {int}:
        with contextlib.suppress(OverflowError):
            array = np.array(value, dtype=np.int64)
            if array.view(np.uint64).max() < model.vocab_size:  # a negative one is beyond it, too
                return array.astype("<i4")
    for index, one in enumerate(value):
        if type(one) is not int or not 0 <= one < model.vocab_size:
            raise BadRequest(
                f"{name}[{index}]", f"must be a token id in [0, {model.vocab_size}), got {show(one)}"
            )
    raise AssertionError("a list of ids failed as a whole and passed entry by entry")


def _rids(value: Any, count: int, batch: bool) -> list[str]:
    """Return one rid per prompt: the client's, or made ones. A batch's single rid gets a number appended."""
    if value is None:
        return [make_rid() for _ in range(count)]
    if type(value) is list and batch:
        if len(value) != count:
            raise BadRequest("rid", f"must be a string or a list of {count}, got {show(value)}")
        rids = [_rid(one, f"rid[{i}]") for i, one in enumerate(value)]
        if len(set(rids)) != count:
            raise BadRequest("rid", "must be different for each prompt of a batch")
        return rids
    rid = _rid(value, "rid")
    return [f"{rid}_{i}" for i in range(count)] if batch else [rid]


def _rid(value: Any, name: str) -> str:
    if type(value) is not str or not value or len(value) > MAX_RID_CHARACTERS:
        raise BadRequest(name, f"must be a string of 1 to {MAX_RID_CHARACTERS} characters, got {show(value)}")
    return text(value, name)


def _logprobs(body: Mapping[str, Any], count: int, batch: bool, model: Model) -> list[LogprobOptions]:
    """Return each prompt's options; in a batch, a list of an option has one entry per prompt.

    What all prompts share is checked once and is one object: a batch costs no more than its body is long.
    """
    if not any(name in body for name in _LOGPROB_FIELDS):
        return [LogprobOptions()] * count
    checks = _logprob_checks(model)

    def one(name: str, value: Any, field: str) -> Any:
        return _LOGPROB_FIELDS[name] if value is None else checks[name](value, field)

    def column(name: str) -> list[Any] | None:
        """Return a value for each prompt; None when they share one."""
        value: Any = body.get(name)
        per_prompt = type(value) is list and batch
        if name == "token_ids_logprob":
            per_prompt = per_prompt and any(type(entry) is list or entry is None for entry in value)
        if not per_prompt:
            shared[name] = one(name, value, name)
            return None
        if len(value) != count:
            raise BadRequest(name, f"a list of it needs one entry per prompt, {count}; got {len(value)}")
        return [one(name, entry, f"{name}[{i}]") for i, entry in enumerate(value)]

    shared: dict[str, Any] = {}
    columns = {name: found for name in _LOGPROB_FIELDS if (found := column(name)) is not None}
    if not columns:
        return [LogprobOptions(**shared)] * count
    rows = zip(*columns.values(), strict=True)
    return [LogprobOptions(**shared, **dict(zip(columns, row, strict=True))) for row in rows]


_LOGPROB_FIELDS: dict[str, Any] = msgspec.structs.asdict(LogprobOptions())
"""The fields of LogprobOptions and what each is by default."""


def _logprob_checks(model: Model) -> dict[str, Check]:
    most = min(model.max_top_logprobs, model.vocab_size)

    def top(value: Any, field: str) -> int:
        if not 0 <= integer(value, field) <= most:
            raise BadRequest(
                field,
                f"must be in [0, {most}], got {show(value)}: this server gives no more of them for a token",
            )
        return int(value)

    def ids(value: Any, field: str) -> list[int]:
        if type(value) is not list or len(value) > MAX_LOGPROB_IDS:
            raise BadRequest(
                field, f"must be a list of at most {MAX_LOGPROB_IDS} token ids, got {show(value)}"
            )
        for index, token in enumerate(value):
            if type(token) is not int or not 0 <= token < model.vocab_size:
                raise BadRequest(
                    f"{field}[{index}]", f"must be a token id in [0, {model.vocab_size}), got {show(token)}"
                )
        return list(value)

    def start(value: Any, field: str) -> int:
        if integer(value, field) < -1:
            raise BadRequest(field, f"must be at least -1, got {show(value)}")
        return int(value)

    return {
        "return_logprob": boolean,
        "top_logprobs_num": top,
        "token_ids_logprob": ids,
        "logprob_start_len": start,
        "return_text_in_logprobs": boolean,
        "return_hidden_states": boolean,
    }
