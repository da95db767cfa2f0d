"""What is being answered in one gateway process: how many prompts, under which rids, and the end of it all.

Must not know HTTP, nor a request's shape beyond how many prompts it has and what its client calls it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..ingress.errors import BadRequest, Unavailable
from ..sink import Error
from .answer import Answer


class Running:
    """The answers that have begun and are not complete: at most `most` prompts, with those being taken."""

    def __init__(self, most: int) -> None:
        self.prompts = 0
        """Prompts being answered, or being taken."""
        self._most = most
        self._answers: dict[Answer, str | None] = {}  # and the one rid of its batch
        self._batches: dict[str, set[Answer]] = {}

    def __bool__(self) -> bool:
        return bool(self._answers)

    @contextlib.contextmanager
    def room(self, count: int) -> Iterator[None]:
        """Count a request's prompts from before the first wait until its answer counts them.

        Raises:
            BadRequest: it has more than may ever run.
            Unavailable: too many run now.
        """
        if count > self._most:
            raise BadRequest(
                "", f"has {count} prompts, and at most {self._most} are answered at once; send fewer"
            )
        if self.prompts + count > self._most:
            raise Unavailable(
                f"{self.prompts} prompts are being answered, at most {self._most} may; try again soon"
            )
        self.prompts += count
        try:
            yield
        finally:
            self.prompts -= count

    def start(self, answer: Answer, batch: str | None) -> None:
        """Begin an answer. `batch`: the one rid that its client gave to several prompts, if it did."""
        self.prompts += answer.prompts
        self._answers[answer] = batch
        if batch is not None:
            self._batches.setdefault(batch, set()).add(answer)
        answer.start()

    def ended(self, answer: Answer) -> None:
        """An answer is complete, or its client is gone. Fits `Answer`'s `on_end`."""
        self.prompts -= answer.prompts
        batch = self._answers.pop(answer)
        if batch is not None:
            same = self._batches[batch]
            same.discard(answer)
            if not same:
                del self._batches[batch]

    def rids_of(self, batch: str) -> list[str]:
        """Return the rids of the prompts that still run of every batch that has this one rid."""
        return [rid for answer in self._batches.get(batch, ()) for rid in answer.live_rids()]

    def fail(self, error: Error) -> None:
        """End everything with this."""
        for answer in list(self._answers):
            answer.fail(error)
