"""Check a tokenizer: does text that is streamed, cut anywhere, equal the tokenizer's own decode?

For each file: real text, random ids (special, odd and unknown ones among them), every byte value, and output
that continues a prompt. Each case is streamed whole, cut at every single place, and one id at a time, with
special tokens skipped and kept. All ways of cutting a case run side by side as requests of one decoder.
"""

import argparse
import json
import logging
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cases import beyond
from outfeed.ring.batch import Batch
from outfeed.ring.finish import FinishReason
from outfeed.ring.frames import PROMPT_TAIL, DecodeOptions, Register
from outfeed.ring.process import settle
from outfeed.ring.route import make_route
from outfeed.shards.decoder import Decoder
from outfeed.shards.errors import TokenizerFileError, is_crash
from outfeed.shards.fallback import TokenizerText
from outfeed.shards.pipeline import BYTE_TOKEN, byte_level
from outfeed.shards.table import TokenTable, load_tokenizer
from texts import MULTILINGUAL
from tokenizers import Tokenizer

SHOWN = 5
MAX_LENGTH, MAX_RANDOM = 4096, 1_000_000
"""Ids of a case, which is cut at each of them, and cases, at most: more would never end."""


class Case(NamedTuple):
    """Ids to stream after a prompt, and whether special tokens are skipped."""

    kind: str
    ids: list[int]
    skip: bool
    prompt: Sequence[int] = ()


def check(path: str, text: str, *, random_cases: int, length: int, seed: int) -> dict[str, Any]:
    """Check one tokenizer file; raises TokenizerFileError when it cannot be read, or crashes in decode."""
    try:
        return _check(path, text, random_cases, length, seed)
    except BaseException as error:
        if not is_crash(error):
            raise
        raise TokenizerFileError(
            f"{path}: the tokenizer crashes in its own decode: {error}; mend its decoder"
        ) from None


def _check(path: str, text: str, random_cases: int, length: int, seed: int) -> dict[str, Any]:
    table = TokenTable.compile(path)
    tokenizer, _ = load_tokenizer(path)
    decoder = Decoder(table, TokenizerText(tokenizer) if table.fallback else None)
    cases, mismatches = 0, []
    for case in _cases(tokenizer, text, random_cases, length, random.Random(seed)):
        whole = tokenizer.decode([*case.prompt, *case.ids], skip_special_tokens=case.skip)
        before = tokenizer.decode([*case.prompt], skip_special_tokens=case.skip)
        if not whole.startswith(before.rstrip("\ufffd")):
            continue  # the output changed the prompt's own text: there is no text beyond it
        want = beyond(tokenizer, list(case.prompt), case.ids, case.skip)
        for cuts, got in _streamed(decoder, case):
            cases += 1
            if got != want:
                mismatches.append(
                    {
                        "kind": case.kind,
                        "ids": case.ids,
                        "cuts": cuts,
                        "skip": case.skip,
                        "want": want,
                        "got": got,
                    }
                )
    found = {
        "file": str(path),
        "pipeline": table.meta.pipeline,
        "table": not table.fallback,
        "cases": cases,
        "mismatches": len(mismatches),
    }
    if table.fallback:
        found["reason"] = table.meta.reason
    if mismatches:
        found["examples"] = mismatches[:SHOWN]
    return found


def _cases(tokenizer: Tokenizer, text: str, count: int, length: int, rng: random.Random) -> Iterator[Case]:
    lines = [line for line in text.splitlines() if line.strip()]
    for encoded in tokenizer.encode_batch(lines, add_special_tokens=False):
        for at in range(0, len(encoded.ids), length):
            part = encoded.ids[at : at + length]
            yield Case("text", part, True)
            split = rng.randrange(len(part))
            if split:
                yield Case("prompt", part[split:], True, part[:split])
    vocab = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1
    odd = [
        *range(vocab - 8, vocab + 4),
        *tokenizer.get_added_tokens_decoder(),
        *_byte_tokens(tokenizer).values(),
    ]
    for place in range(count):
        share = (0.1, 0.5, 0.9)[place % 3]
        ids = [rng.choice(odd) if rng.random() < share else rng.randrange(vocab) for _ in range(length)]
        yield Case("random", [max(0, token) for token in ids], bool(place % 2))
    yield from _bytes(tokenizer, lines, length, rng)


def _bytes(tokenizer: Tokenizer, lines: list[str], length: int, rng: random.Random) -> Iterator[Case]:
    """All byte values, as byte tokens where there are such, else as text."""
    of_byte = _byte_tokens(tokenizer)
    if len(of_byte) < 256:
        ids = tokenizer.encode("".join(map(chr, range(256))), add_special_tokens=False).ids
        for at in range(0, len(ids), length):
            yield Case("bytes", ids[at : at + length], True)
        return
    every = [of_byte[byte] for byte in range(256)]
    for ids in (every, every[::-1], rng.sample(every, 256)):
        for at in range(0, 256, length):
            yield Case("bytes", ids[at : at + length], True)
    for line in lines:
        raw = line.encode()[: 3 * length]
        for at in range(0, len(raw), length):
            yield Case("bytes of text", [of_byte[byte] for byte in raw[at : at + length]], True)


def _byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """Byte to a token that is this byte alone; empty for a tokenizer that has none."""
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    fallback = {
        int(match[1], 16): token
        for content, token in vocab.items()
        if (match := BYTE_TOKEN.fullmatch(content))
    }
    if len(fallback) == 256:
        return fallback
    added = tokenizer.get_added_tokens_decoder()
    letters = {
        piece[0]: token
        for content, token in vocab.items()
        if len(content) == 1 and token not in added and len(piece := byte_level(content)) == 1
    }
    return letters if len(letters) == 256 else {}


def _streamed(decoder: Decoder, case: Case) -> Iterable[tuple[list[int], str]]:
    """Yield (cuts, text) for every way to cut the case."""
    whole = len(case.ids)
    ways = [[], *([at] for at in range(1, whole)), list(range(1, whole))]
    routes = [make_route(0, 0, place, 1) for place in range(len(ways))]
    options = DecodeOptions(skip_special_tokens=case.skip)
    tail = np.array(case.prompt[-PROMPT_TAIL:], dtype="<i4").tobytes()
    for route in routes:
        decoder.register(Register(route, "", options, tail, len(case.prompt)))
    texts = [bytearray() for _ in ways]
    edges = [[0, *cuts, whole] for cuts in ways]
    for step in range(max(map(len, edges)) - 1):
        rows = [place for place in range(len(ways)) if step + 1 < len(edges[place])]
        _step(decoder, case, routes, texts, [(place, edges[place], step) for place in rows])
    for route in routes:
        decoder.forget(route)
    return [(cuts, text.decode()) for cuts, text in zip(ways, texts, strict=True)]


def _step(
    decoder: Decoder,
    case: Case,
    routes: list[int],
    texts: list[bytearray],
    rows: Sequence[tuple[int, list[int], int]],
) -> None:
    spans = [(edges[step], edges[step + 1]) for _, edges, step in rows]
    batch = Batch(
        0,
        np.array([routes[place] for place, _, _ in rows], dtype=np.uint64),
        np.array([begin for begin, _ in spans], dtype=np.uint32),
        np.array([end - begin for begin, end in spans], dtype=np.uint32),
        np.zeros(len(rows), dtype=np.uint32),
        np.array([token for begin, end in spans for token in case.ids[begin:end]], dtype=np.int32),
        [(row, FinishReason.length(end)) for row, (_, end) in enumerate(spans) if end == len(case.ids)],
    )
    # Every row is known and comes out, in order.
    decoded = decoder.decode(batch, 0, 0).rows.batch()
    assert decoded.text is not None
    assert decoded.text_lens is not None
    at = 0
    for (place, _, _), size in zip(rows, decoded.text_lens.tolist(), strict=True):
        texts[place] += decoded.text[at : at + size]
        at += size


def main() -> int:
    """Check the files on the command line: 0 when all text is right, 1 when some is not, 2 for a bad file."""
    parser = argparse.ArgumentParser(
        prog="check-tokenizer", description="Check that streamed text equals the tokenizer's own decode."
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a tokenizer.json, or a folder with one")
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text to stream (default: one in many scripts)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per file")
    parser.add_argument(
        "--random", type=int, default=120, metavar="N", help="cases of random ids (default 120)"
    )
    parser.add_argument("--length", type=int, default=32, metavar="N", help="ids of a case (default 32)")
    parser.add_argument("--seed", type=int, default=1, help="of the random ids (default 1)")
    settle()
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    if not 2 <= args.length <= MAX_LENGTH:
        parser.error(f"--length {args.length}: give 2 to {MAX_LENGTH}")
    if not 0 <= args.random <= MAX_RANDOM:
        parser.error(f"--random {args.random}: give 0 to {MAX_RANDOM}")
    try:
        text = _read(args.text)
    except ValueError as error:
        print(f"check-tokenizer: {error}", file=sys.stderr)
        return 2
    try:
        return _check_all(args, text)
    except KeyboardInterrupt:
        return 130


def _check_all(args: argparse.Namespace, text: str) -> int:
    status = 0
    for path in args.paths:
        try:
            found = check(path, text, random_cases=args.random, length=args.length, seed=args.seed)
        except TokenizerFileError as error:
            print(f"check-tokenizer: {error}", file=sys.stderr)
            status = 2
            continue
        status = status or int(found["mismatches"] > 0)
        if args.json:
            print(json.dumps(found, ensure_ascii=False), flush=True)
        else:
            kind = "table" if found["table"] else f"no table ({found['reason']})"
            differ = f"{found['mismatches']} of {found['cases']} cases differ"
            print(f"{path}: {found['pipeline']}, {kind}: {differ}", flush=True)
            for example in found.get("examples", ()):
                print(f"  {example}")
    return status


def _read(path: str | None) -> str:
    where = Path(path) if path else MULTILINGUAL
    try:
        text = where.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read text {where}: {error.strerror}; give a UTF-8 text file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: {error}; give a UTF-8 file") from error
    if not text.strip():
        raise ValueError(f"{where} has no text in it; give a file with some")
    return text


if __name__ == "__main__":
    sys.exit(main())
