"""From a stream of events to the response a client reads.

`Response` adds events up and renders `/generate`'s JSON objects: cumulative (everything so far, in the end
the whole answer) and incremental (what is new). Packed numbers become Python floats here. What turns the
objects into bytes, and bytes into HTTP, is the gateway's, and so are OpenAI's shapes.
"""

from typing import Any, Final

from ..ring.finish import FinishReason
from .columns import Columns, Flat, Hidden, Ragged
from .events import ChunkEvent, Error, Merger

# The field's names in `meta_info`, by family.
NAMES: Final = (
    "output_token_logprobs",
    "input_token_logprobs",
    "output_top_logprobs",
    "input_top_logprobs",
    "output_token_ids_logprobs",
    "input_token_ids_logprobs",
    "hidden_states",
)


class Response:
    """One request's response, growing event by event.

    rid is the client-visible id. Add each Frame's and the Done's event, in order.
    """

    __slots__ = ("_last", "_sum", "rid")

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self._sum: Merger | None = None
        self._last: ChunkEvent | None = None

    def add(self, event: ChunkEvent) -> None:
        """Append an event."""
        if self._sum is None:
            self._sum = Merger(event)
        else:
            self._sum.add(event)
        self._last = event

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, a trimmed stop token included."""
        return 0 if self._sum is None else self._sum.first + self._sum.generated

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt; 0 before the first event."""
        return 0 if self._last is None else self._last.prompt_tokens

    @property
    def finish(self) -> FinishReason | None:
        """Why it ended, once it has."""
        return None if self._last is None else self._last.finish

    def whole(self) -> ChunkEvent:
        """Return all events as one: text, ids, counts, columns (hidden states are the last ones)."""
        return ChunkEvent(b"", b"", 0, 0, 0, 0) if self._sum is None else self._sum.event()

    def cumulative(self, e2e_latency: float | None = None) -> dict[str, Any]:
        """Render everything so far; after the last event this is the whole answer.

        e2e_latency: seconds from arrival to now, left out when None.
        """
        return self._render(self.whole(), e2e_latency)

    def incremental(self, e2e_latency: float | None = None) -> dict[str, Any]:
        """Render what the last event added: its text, ids and log probabilities; counts stay totals."""
        if self._last is None:
            raise ValueError("there is no event to render yet")
        return self._render(self._last, e2e_latency)

    def _render(self, event: ChunkEvent, e2e_latency: float | None) -> dict[str, Any]:
        finish = self.finish
        meta: dict[str, Any] = {
            "id": self.rid,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reason": None if finish is None else finish.to_json(),
        }
        if e2e_latency is not None:
            meta["e2e_latency"] = e2e_latency
        if event.columns is not None:
            meta.update(render_columns(event.columns))
        return {"text": event.text, "output_ids": event.ids.tolist(), "meta_info": meta}


def request_error(event: ChunkEvent) -> Error | None:
    """Return the error that a finish reason is: an abort with a status code; any other end is None."""
    finish = event.finish
    if finish is None or (status := finish.abort_status) is None:
        return None
    kind = finish.to_json().get("err_type")
    return Error(
        status, kind if isinstance(kind, str) else "abort", finish.message or "the request was aborted"
    )


def render_columns(columns: Columns) -> dict[str, Any]:
    """Render the families that are there under the field's names.

    A log probability is [logprob, id, text | null]; a position of a ragged family is a list of those, or
    null. NaN (a leading null) and infinities have no JSON form and are null.
    """
    rendered: dict[str, Any] = {}
    texts = columns.texts or {}
    for name, part in zip(NAMES, columns.parts(), strict=True):
        if isinstance(part, Flat):
            rendered[name] = _triples(part, texts)
        elif isinstance(part, Ragged):
            rendered[name] = _positions(part, texts)
        elif isinstance(part, Hidden):
            rendered[name] = part.values.tolist()
    return rendered


def _triples(part: Flat | Ragged, texts: dict[int, str]) -> list[list[Any]]:
    return [
        # x - x is 0 for a finite number and NaN for every other.
        [value if value - value == 0 else None, token, texts.get(token)]
        for value, token in zip(part.values.tolist(), part.ids.tolist(), strict=True)
    ]


def _positions(part: Ragged, texts: dict[int, str]) -> list[list[list[Any]] | None]:
    entries = _triples(part, texts)
    positions: list[list[list[Any]] | None] = []
    start = 0
    for length in part.lengths.tolist():
        positions.append(entries[start : start + length] if length else None)
        start += length
    return positions
