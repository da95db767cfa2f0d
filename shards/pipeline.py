"""From a tokenizer's decoder, as its file states it, to a rule that gives each token its bytes.

What can be compiled is a decoder whose text is a sum over tokens: each token adds bytes that depend on it
alone, but for the first token, runs of byte tokens, and characters stripped from the whole text's beginning.
That covers byte-level BPE (GPT-2, Llama 3, Qwen, DeepSeek ...) and the SentencePiece families (Llama 2,
Mistral, Gemma, T5 ...). Everything else is `Unsupported`, with the reason, and is decoded by the tokenizer
itself (see fallback). Knows the decoder's JSON; must not know tables, requests or shards.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# As the field's ByteFallback reads them: two hex digits, or what its number parser takes for them.
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


class Unsupported(Exception):
    """This decoder is not a sum over tokens, or not one we know."""


@dataclass(slots=True)
class Plan:
    """How a token's string becomes its bytes."""

    name: str
    """For people: the decoder's steps."""
    steps: list[Callable[[str, bool], str]] = field(default_factory=list)
    """Applied in order to (string, whether it is the text's first token)."""
    first_differs: bool = False
    byte_level: bool = False
    byte_fallback: bool = False
    fused: bool = False
    strip_char: str = ""
    strip_count: int = 0

    def bytes_of(self, token: str, first: bool) -> tuple[bytes, bool]:
        """Return what a token adds to the text, and whether it is a byte token."""
        for step in self.steps:
            token = step(token, first)
        if self.byte_level:
            return byte_level(token), False
        if self.byte_fallback and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)]), True
        return token.encode("utf-8", "surrogatepass"), False


def plan(decoder: dict[str, Any] | None) -> Plan:
    """Return the plan for a decoder's JSON (null: tokens joined by spaces); raise Unsupported."""
    if decoder is None:
        return Plan("none", [lambda token, first: token if first else f" {token}"], first_differs=True)
    made = Plan("+".join(names(decoder)))
    for step in _flat(decoder):
        _add(made, step)
    return made


def names(decoder: dict[str, Any] | None) -> list[str]:
    """Return the types of a decoder's steps, in order."""
    return ["none"] if decoder is None else [str(step.get("type")) for step in _flat(decoder)]


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flat(inner)]


def _add(made: Plan, step: dict[str, Any]) -> None:
    kind = step.get("type")
    # Once bytes of several tokens are one text, what works token by token has no meaning that we can compile.
    if kind in ("Replace", "Metaspace", "ByteLevel", "ByteFallback") and (
        made.byte_level or made.byte_fallback or made.fused
    ):
        raise Unsupported(f"{kind} after the tokens were joined ({made.name})")
    match kind:
        case "Replace":
            made.steps.append(_replace(step))
        case "Metaspace":
            replacement = step["replacement"]
            strips = step.get("prepend_scheme", "always") != "never"
            made.first_differs |= strips
            made.steps.append(
                lambda token, first: token.replace(replacement, "" if first and strips else " ")
            )
        case "ByteLevel":
            made.byte_level = True
        case "ByteFallback":
            made.byte_fallback = True
        case "Fuse":
            made.fused = True
        case "Strip":
            _strip(made, step)
        case _:
            raise Unsupported(f"no rule for a decoder of type {kind}")


def _replace(step: dict[str, Any]) -> Callable[[str, bool], str]:
    pattern, content = step["pattern"], step["content"]
    if "String" in pattern:
        old = pattern["String"]
        if not old:
            raise Unsupported("Replace of an empty string")
        return lambda token, first: token.replace(old, content)
    try:
        compiled = re.compile(pattern["Regex"])
    except (re.error, OverflowError) as error:
        raise Unsupported(f"Replace of pattern {pattern['Regex']!r}: {error}") from error
    return lambda token, first: compiled.sub(lambda _: content, token)


def _strip(made: Plan, step: dict[str, Any]) -> None:
    content, start, stop = step["content"], step["start"], step["stop"]
    if not start and not stop:
        return
    if not made.fused:
        if made.byte_fallback or made.byte_level:
            raise Unsupported(f"Strip before Fuse ({made.name})")
        made.steps.append(lambda token, first: _strip_token(token, content, start, stop))
        return
    if stop or made.strip_count:
        raise Unsupported(f"Strip at the text's end, or twice ({made.name})")
    if start > 255:
        raise Unsupported(f"Strip of {start} characters")
    made.strip_char, made.strip_count = content, start


def _strip_token(token: str, content: str, start: int, stop: int) -> str:
    begin = 0
    while begin < min(start, len(token)) and token[begin] == content:
        begin += 1
    end = len(token)
    while len(token) - end < stop and end > begin and token[end - 1] == content:
        end -= 1
    return token[begin:end]


def _alphabet() -> dict[str, int]:
    """Return byte-level BPE's letters: printable bytes stand for themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(rest)}


_LETTERS = _alphabet()
_TO_BYTES = {ord(letter): byte for letter, byte in _LETTERS.items()}
_ONLY_LETTERS = re.compile("[" + "".join(map(re.escape, _LETTERS)) + "]*")


def byte_level(token: str) -> bytes:
    """Return a byte-level token's bytes; a token with any other letter (an added one) is its own UTF-8."""
    if _ONLY_LETTERS.fullmatch(token):
        return token.translate(_TO_BYTES).encode("latin-1")
    return token.encode("utf-8", "surrogatepass")
