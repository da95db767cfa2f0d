"""Every frame that is not a BATCH: tags, bodies, and one `encode`/`decode` for all of them.

A body is one msgpack array, a field per place, and a seal: core/check.h's check over the array, seeded with
the tag. A reader ignores places it does not know, so a field may be added at the end with a default. Bodies
come out of shared memory: `decode` checks the seal, types and ranges and raises BadFrame, which says what was
wrong. Whose frame it was it does not say: a damaged name is somebody else's.

BATCH frames are columns, see `batch`.
"""

from enum import IntEnum
from typing import Any

import msgspec
from numpy.typing import NDArray

from ._body import check
from ._fast import View
from .route import MAX_READERS, MAX_SHARDS, MAX_SLOTS, reader_of

# What a lane's `write` takes as a part: anything contiguous.
Buffer = bytes | bytearray | memoryview | View | NDArray[Any]

MAX_ROUTE = (1 << 64) - 1
MAX_TOKENS = (1 << 32) - 1
SEAL_BYTES = 8
PROMPT_TAIL = 64
"""How many of a prompt's last ids a shard gets: the context in which the first output id is decoded."""


class Tag(IntEnum):
    """What a frame is; the ring carries it beside the body."""

    RESULT = 1
    """scheduler → shard → reader: a control request's one answer."""
    BATCH = 2
    """scheduler → shard → reader: one decode step."""
    ERROR = 3
    """scheduler or shard → reader: a request's terminal failure."""
    TAKEOVER = 4
    """shard → reader: it is new, or lost a frame of yours; RESTORE what you have with it."""
    TALLY = 5
    """scheduler → shard → reader: how many tokens requests have had; who has fewer lost some."""
    GENERATE = 16
    """gateway → scheduler: run this."""
    CONTROL = 17
    """gateway → scheduler: answer this with one RESULT or ERROR."""
    ABORT = 18
    """gateway → scheduler: stop this."""
    LIVE = 19
    """gateway → scheduler: these are all that I have; who is missing lost a frame."""
    REGISTER = 32
    """gateway → its shard: a request is coming, decode it so."""
    RESTORE = 33
    """gateway → a new shard: a request is running, go on from here."""
    FORGET = 34
    """gateway → its shard: this request is over."""
    RESTORED = 35
    """gateway → a new shard: that was all of mine."""
    ATTACH = 36
    """gateway → shards and scheduler: a new process is this reader; what it had before is over."""


class BadFrame(ValueError):
    """A frame's body is not what its tag says, or was changed since it was written."""


class Standing(IntEnum):
    """What a TALLY says of a request."""

    CONTROL = 0
    """A control request, not answered yet."""
    RUNNING = 1
    ENDED = 2
    """Its last frame has been written, before this one."""
    RECEIVED = 3
    """Rank 0 of several has received it, and may have handed it on."""


class Result(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """RESULT: the answer to a control request; `body` reaches its handler unchanged."""

    route: int
    body: bytes


class ErrorFrame(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """ERROR: the request failed and this is its end.

    `status` is the HTTP status a client sees (400-599), `type` a short identifier, `message` for people.
    `running` says that the scheduler may still be working on it: whoever reads the frame must send an
    ABORT. A shard that fails a request (a decode failure, a gap, a bad step frame) sets it; a scheduler
    that failed the request itself does not.
    """

    route: int
    status: int
    type: str
    message: str
    running: bool = False


class LogprobOptions(msgspec.Struct, array_like=True, frozen=True):
    """What a request wants to know beside its tokens (the field's names and defaults)."""

    return_logprob: bool = False
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] = []
    logprob_start_len: int = -1
    return_text_in_logprobs: bool = False
    return_hidden_states: bool = False


class Generate(msgspec.Struct, array_like=True, frozen=True):
    """GENERATE: a request for the scheduler.

    `input_ids` is i32 little-endian; `sampling_params` is the normalized object, as JSON-able values.
    """

    route: int
    rid: str
    input_ids: bytes
    sampling_params: dict[str, Any]
    logprobs: LogprobOptions = LogprobOptions()
    stream: bool = True


class Control(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """CONTROL: an operation (`op`, e.g. "health") that is answered by one RESULT or ERROR."""

    route: int
    rid: str
    op: str
    body: bytes = b""


class Abort(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """ABORT: nobody waits for this request any more. `rid` may be empty: the route is the identity."""

    route: int
    rid: str = ""


class DecodeOptions(msgspec.Struct, array_like=True, frozen=True):
    """How a shard turns one request's ids into text."""

    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stop: list[str] = []
    stop_token_ids: list[int] = []
    stop_regex: list[str] = []
    detect_stops: bool = False
    return_text_in_logprobs: bool = False
    min_new_tokens: int = 0
    """With `detect_stops`: a stop found before this many tokens have come does not end the request."""


class Register(msgspec.Struct, array_like=True, frozen=True):
    """REGISTER: a request is about to be submitted.

    `prompt_tail` holds the prompt's last ids, at most PROMPT_TAIL, i32 little-endian: what its text follows.
    """

    route: int
    rid: str
    options: DecodeOptions
    prompt_tail: bytes
    prompt_tokens: int


class Restore(msgspec.Struct, array_like=True, frozen=True):
    """RESTORE: a request that a shard before this one was decoding.

    `ids` are all output ids delivered so far (i32 little-endian), `text_bytes` how many bytes of UTF-8
    text were delivered with them.
    """

    route: int
    rid: str
    options: DecodeOptions
    prompt_tail: bytes
    prompt_tokens: int
    ids: bytes
    text_bytes: int


class Forget(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """FORGET: the request is over for its gateway, whatever still arrives."""

    route: int


class Takeover(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """TAKEOVER: shard `shard` needs all that the reader has with it. Whatever it or its predecessor published
    comes before it in the lane, so a reader that sees this one knows how far each of its requests has come.
    `epoch` tells it from every other; RESTORED repeats it."""

    shard: int
    epoch: int


class Restored(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """RESTORED: reader `reader` has sent every RESTORE that shard `shard` asked for with `epoch`."""

    reader: int
    shard: int
    epoch: int


class Attach(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """ATTACH: the first frame of a new gateway process on its lanes. Requests of reader `reader` that came
    before it in the lane were its predecessor's and have nobody to answer to."""

    reader: int


class Live(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """LIVE: of the slots `first` to `end` (not included) of reader `reader`, `routes` are submitted and have
    not ended. Said when the scheduler rejected a frame."""

    reader: int
    first: int
    end: int
    routes: list[int]


class Tally(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """TALLY: (route, tokens pushed, Standing) of requests of rank `rank`, as of this place in the lane. Said
    when a shard or a reader rejected a frame, or a shard is new: whoever has fewer tokens, or thinks that it
    runs when it has ended, has lost something. Of several ranks each also says so what it has adopted."""

    rank: int
    rows: list[tuple[int, int, int]]


Handover = Takeover | Restored | Attach | Live | Tally
"""What processes say to each other when one of them is new or a frame was lost."""

Message = Result | ErrorFrame | Generate | Control | Abort | Register | Restore | Forget

TAG_OF: dict[type[Message | Handover], Tag] = {
    Result: Tag.RESULT,
    ErrorFrame: Tag.ERROR,
    Generate: Tag.GENERATE,
    Control: Tag.CONTROL,
    Abort: Tag.ABORT,
    Register: Tag.REGISTER,
    Restore: Tag.RESTORE,
    Forget: Tag.FORGET,
    Takeover: Tag.TAKEOVER,
    Restored: Tag.RESTORED,
    Attach: Tag.ATTACH,
    Live: Tag.LIVE,
    Tally: Tag.TALLY,
}

_STANDINGS = frozenset(Standing)
_encoder = msgspec.msgpack.Encoder()
_decoders = {tag: msgspec.msgpack.Decoder(struct) for struct, tag in TAG_OF.items()}


def encode(message: Message | Handover) -> bytes:
    """Return the body of a message's frame; its tag is `TAG_OF[type(message)]`."""
    return seal(TAG_OF[type(message)], _encoder.encode(message))


def seal(tag: int, array: bytes) -> bytes:
    """Return a body: a msgpack array and its check."""
    return array + check(array, tag).to_bytes(SEAL_BYTES, "little")


def decode(tag: int, body: Buffer) -> Message | Handover:
    """Return the message in a frame's body. Nothing in it points into the body.

    The body is copied first, once: a lane's bytes may change while they are looked at, and no decoder is
    made for that.

    Raises BadFrame when the tag is no message's (BATCH included), the body was changed since it was sealed,
    or it is not the tag's.
    """
    decoder = _decoders.get(tag)  # type: ignore[call-overload]
    if decoder is None:
        raise BadFrame(
            f"tag {tag} is no message frame; expected one of {[int(known) for known in _decoders]}"
        )
    raw = bytes(body)  # what is checked is what is used, whatever its writer does meanwhile
    array = raw[:-SEAL_BYTES]
    try:
        if check(array, tag) != int.from_bytes(raw[len(array) :], "little"):
            raise msgspec.MsgspecError("its seal is not that of its bytes: it was changed, torn or cut off")
        message: Message | Handover = decoder.decode(array)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"{Tag(tag).name} frame of {len(raw)} bytes: {error}") from error
    fault = _fault(message)
    if fault is not None:
        raise BadFrame(f"{Tag(tag).name} frame of {len(raw)} bytes: {fault}")
    return message


def tally_rows(max_frame: int) -> int:
    """Return how many rows of a TALLY surely fit a frame of that size."""
    return (max_frame - 64) // 16


def check_reader(message: Message | Handover, lane: int) -> None:
    """Check that a message names the reader on whose lane it came: a wrong one must not cost another reader.

    Raises BadFrame.
    """
    reader = message.reader if isinstance(message, Restored | Attach | Live) else None
    if not isinstance(message, Handover):
        reader = reader_of(message.route)
    if reader is not None and reader != lane:
        name = TAG_OF[type(message)].name
        raise BadFrame(f"a {name} frame on the lane of reader {lane} names reader {reader}")


def _fault(message: Message | Handover) -> str | None:
    """Say what no type can: the ranges. One function, so that they are read in one place."""
    if isinstance(message, Live) and not 0 <= message.first <= message.end <= MAX_SLOTS:
        return f"slots {message.first} to {message.end} are not in 0..{MAX_SLOTS}"
    if isinstance(message, Tally) and not all(
        0 < route <= MAX_ROUTE and 0 <= tokens <= MAX_TOKENS and standing in _STANDINGS
        for route, tokens, standing in message.rows
    ):
        return "a row is not a route, a number of tokens and a standing"
    if isinstance(message, Handover):
        shard, reader, epoch = (getattr(message, name, 0) for name in ("shard", "reader", "epoch"))
        if 0 <= shard < MAX_SHARDS and 0 <= reader < MAX_READERS and epoch >= 0:
            return None
        return f"{message} is not in the ranges of a shard, a reader and an epoch"
    if not 0 < message.route <= MAX_ROUTE:
        return f"route {message.route} is not in 1..2^64-1"
    if isinstance(message, ErrorFrame) and not 400 <= message.status <= 599:
        return f"status {message.status} is not in 400..599"
    for name in ("input_ids", "prompt_tail", "ids"):
        if (size := len(getattr(message, name, b""))) % 4:
            return f"{name} has {size} bytes, not a multiple of 4"
    for name in ("prompt_tokens", "text_bytes"):
        if (number := getattr(message, name, 0)) < 0:
            return f"{name} {number} is negative"
    if isinstance(message, Register | Restore) and len(message.prompt_tail) > 4 * PROMPT_TAIL:
        return f"prompt_tail has {len(message.prompt_tail) // 4} ids, more than the last {PROMPT_TAIL}"
    return None
