"""What the gateways of a chaos run have said: which streams run, and how those that ended did."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Gateway:
    """One gateway process, and the streams that it has said it started and not said how they ended."""

    reader: int
    life: int
    process: subprocess.Popen[str]
    ready: bool = False
    running: set[str] = field(default_factory=set)
    hung: int | None = None
    unread: str = ""


class Tally:
    """How streams ended."""

    def __init__(self) -> None:
        self.started = 0
        self.ends: Counter[str] = Counter()
        self.faults: list[str] = []

    def hear(self, gateway: Gateway, line: str) -> None:
        """Take in one line of a gateway."""
        what: dict[str, Any] = json.loads(line)
        if "rid" in what and what.get("start"):
            self.started += 1
            gateway.running.add(what["rid"])
        elif "rid" in what:
            gateway.running.discard(what["rid"])
            self.ends[what["end"]] += 1
            if what["end"] in ("mismatched", "double_ended"):
                self.faults.append(f"{what['rid']}: {what['end']}: {what.get('why', '')}")
        elif what.get("ready"):
            gateway.ready = True
        elif "hung" in what:
            gateway.hung = what["hung"]
            for rid, (shard, tokens) in what["streams"].items():
                self.faults.append(f"{rid}: hung on shard {shard} after {tokens} tokens")

    def bury(self, gateway: Gateway) -> None:
        """Its gateway was killed: its streams ended with it."""
        self.ends["gateway_gone"] += len(gateway.running)
        gateway.running.clear()
