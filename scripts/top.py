"""Top: a running instance, live: who is busy, where frames pile up, what died and what was lost.

Reads shared memory and /proc and disturbs nobody. Ctrl-C ends it; so does the end of the instance.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

from outfeed.ring.errors import RingError
from outfeed.ring.process import fail, settle
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from top_sample import LaneSample, NoInstance, ProcessSample, Sample, Watch, choose

BAR = 6
LATE_S = 2.0
"""A heartbeat older than this is shown in red."""
MAX_LANES = 32
"""Lanes shown at a time, the fullest and busiest of them."""
PROCESS_COLUMNS = (
    "process", "pid", "state", "cpu", "%", "mem", "beat", "restarts", "live", "tokens/s", "rows/s", "aborts",
    "stopped", "stale_rows", "errors", "share",
)  # fmt: skip
WIDE = {"pid": 108, "mem": 108, "rows/s": 108, "aborts": 108, "stopped": 127, "stale_rows": 127}
"""From how wide a screen on a column is shown; the others always are."""
LEFT = frozenset(("process", "pid", "state", "cpu", "share"))
_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(part: float, width: int = BAR) -> Text:
    """Draw 0 to 1 as a bar; what is above half is yellow, above nine tenths red."""
    eighths = round(max(0.0, min(1.0, part)) * width * 8)
    if part > 0:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    text = "█" * full + (_EIGHTHS[rest] if rest else "")
    style = "red" if part > 0.9 else "yellow" if part > 0.5 else "green"
    return Text(text.ljust(width), style=style)


def amount(value: float, unit: str = "") -> str:
    """Write a number in three or four characters: 12, 3.4k, 56M."""
    for power, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= power:
            number = value / power
            return f"{number:.1f}{prefix}{unit}" if number < 10 else f"{number:.0f}{prefix}{unit}"
    return f"{value:.0f}{unit}"


def header(sample: Sample) -> Text:
    """Say in one line how the instance is."""
    line = Text.assemble(
        ("outfeed ", "dim"),
        (sample.instance, "bold"),
        f"  {sample.phase}  ",
        (amount(sample.tokens_per_s), "bold"),
        " tokens/s  ",
        (str(sample.live_requests), "bold"),
        " live  ",
        f"{amount(sample.lag_bytes, 'B')} lag  ",
        f"{sample.restarts} restarts",
    )
    for lane in sample.quarantined:
        line.append(f"  {lane.ring} lane {lane.lane} CORRUPT at {lane.quarantined_at}", "bold red")
    return line


def processes_table(sample: Sample, width: int) -> Table:
    """Draw a row per process; a narrow screen shows the most telling columns."""
    table = _table()
    columns = [name for name in PROCESS_COLUMNS if width >= WIDE.get(name, 0)]
    for name in columns:
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=True)
    for process in sample.processes:
        cells = _process_cells(process, sample)
        table.add_row(*(cells[name] for name in columns), style=None if process.alive else "dim")
    return table


def _process_cells(process: ProcessSample, sample: Sample) -> dict[str, str | Text]:
    cpu, age = process.cpu_percent or 0.0, process.heartbeat_age_s
    cells: dict[str, str | Text] = {
        "process": process.name,
        "pid": str(process.pid or "-"),
        "state": Text(process.state, style="red" if process.state in ("dead", "unknown") else ""),
        "cpu": bar(cpu / 100),
        "%": f"{cpu:.0f}",
        "mem": amount(process.rss_bytes or 0, "B"),
        "beat": "-" if age is None else Text(f"{age:.1f}s", style="red" if age > LATE_S else ""),
        "restarts": Text(str(process.restarts), style="yellow" if process.restarts else ""),
        "live": amount(process.live),
        "tokens/s": amount(process.rates["tokens"]),
        "rows/s": amount(process.rates["rows"]),
        "aborts": amount(process.counters.get("aborts", 0)),
        "stopped": amount(process.counters.get("stopped", 0)),
        "stale_rows": amount(process.counters.get("stale_rows", 0)),
        "errors": amount(process.counters.get("errors", 0)),
        "share": "",
    }
    if process.role == "shard":
        part = sample.shard_share[process.index]
        cells["share"] = f"{bar(part).plain} {part:.0%}"
    return cells


def _table() -> Table:
    return Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")


def lanes_table(sample: Sample) -> Table:
    """Draw a row per lane in use, the fullest first when there are too many."""
    table = _table()
    table.add_column("lane", no_wrap=True)
    table.add_column("depth", no_wrap=True)
    for name in ("used", "most", "frames/s", "bytes/s", "full", "lag"):
        table.add_column(name, justify="right", no_wrap=True)
    used = [
        lane for lane in sample.lanes if lane.pid is not None or lane.high_water_bytes or lane.frames_per_s
    ]
    shown = sorted(used, key=lambda lane: (-lane.depth, -lane.bytes_per_s))[:MAX_LANES]
    kept = {id(lane) for lane in shown}
    lag = {
        ring: max(seen.lag_bytes for seen in sample.consumers if seen.ring == ring)
        for ring in {seen.ring for seen in sample.consumers}
    }
    for lane in used:
        if id(lane) in kept:
            table.add_row(*_lane_row(lane, lag[lane.ring]))
    if len(used) > len(shown):
        table.add_row(f"… and {len(used) - len(shown)} more, emptier")
    return table


def _lane_row(lane: LaneSample, lag: int) -> list[str | Text]:
    name = f"{lane.ring}:{lane.lane}"
    return [
        Text(name, style="bold red" if lane.quarantined_at is not None else ""),
        bar(lane.depth),
        amount(lane.used_bytes, "B"),
        amount(lane.high_water_bytes, "B"),
        amount(lane.frames_per_s),
        amount(lane.bytes_per_s, "B"),
        Text(amount(lane.full_events), style="yellow" if lane.full_events else ""),
        amount(lag, "B"),
    ]


def screen(sample: Sample, width: int) -> Group:
    """Draw the whole for a screen of `width` columns."""
    return Group(header(sample), Text(), processes_table(sample, width), Text(), lanes_table(sample))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="top", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instance", metavar="NAME", help="default: the only one that runs")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between looks (default 1)")
    parser.add_argument("--once", action="store_true", help="look once, over one interval, and end")
    parser.add_argument("--json", action="store_true", help="print JSON, one object per look")
    args = parser.parse_args(argv)
    if not 0.05 <= args.interval <= 3600:
        parser.error(f"--interval {args.interval}: give 0.05 to 3600 seconds")
    return args


def watch(args: argparse.Namespace, console: Console) -> int:
    """Look until told to stop, or the instance has ended; return the exit status."""
    seen = Watch(choose(args.instance))
    plain = args.json or args.once or not console.is_terminal or console.is_dumb_terminal
    live = None if plain else Live(console=console, screen=True, auto_refresh=False)
    try:
        sample = seen.sample()
        if live:
            live.start()
        while True:
            time.sleep(args.interval)
            if not seen.alive:
                break
            sample = seen.sample()
            if args.json:
                print(json.dumps(sample.to_json()), flush=True)
            elif live:
                live.update(screen(sample, console.width), refresh=True)
            else:
                console.print(screen(sample, console.width))
            if args.once:
                return 0
    finally:
        if live:
            live.stop()
        seen.close()
    print(f"top: instance {sample.instance!r} has ended", file=sys.stderr)
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run top from the command line."""
    settle()
    args = parse(argv)
    try:
        return watch(args, Console())
    except (NoInstance, RingError) as error:
        print(f"top: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read has seen enough (head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return fail("top", error)
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
