"""The token table: what every token id adds to a text, compiled once, shared read-only by all shards.

`TokenTable.compile` reads a tokenizer file, compiles its decoder and proves the result against the tokenizer
itself (see proof). A decoder that cannot be compiled, or whose table disagrees, still makes a table: an
empty one that says which file to decode with (`fallback`). Layout: core/table.h.

Attaching to a shared table loads no tokenizer. Knows tokenizer files; must not know requests.
"""

import hashlib
import logging
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ..ring.segment import Segment, attach, create
from . import pipeline
from ._kernel import lib
from .errors import TableError, TokenizerFileError, is_crash

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

MAGIC: Final = b"OUTFEEDT"
VERSION: Final[int] = lib.OFS_TABLE_VERSION
HEADER_BYTES: Final[int] = lib.OFS_TABLE_HEADER
ENTRY_BYTES: Final[int] = lib.OFS_TABLE_ENTRY
INLINE: Final[int] = lib.OFS_TABLE_INLINE
LONG: Final[int] = lib.OFS_TABLE_LONG
MAX_IDS: Final[int] = lib.OFS_TABLE_MAX_IDS
SPECIAL: Final[int] = lib.OFS_SPECIAL
BYTE: Final[int] = lib.OFS_BYTE
CLEAN: Final[int] = lib.OFS_CLEAN
KNOWN: Final[int] = lib.OFS_KNOWN
MAX_TOKEN: Final = 1 << 16

# magic, version, ids, firsts, meta_len, blob_len, strip_count, strip_char, strip_len
_HEADER: Final = struct.Struct("<8sIIIIQI4sI20x")
_LONG_ENTRY: Final = struct.Struct("<BBHIII")


class Meta(msgspec.Struct):
    """What a table says about itself, beside the bytes."""

    path: str
    """The tokenizer file, absolute: what a shard loads if it has to decode with the tokenizer."""
    sha256: str
    pipeline: str
    """The decoder's steps, e.g. "ByteLevel" or "Replace+ByteFallback+Fuse+Strip"."""
    reason: str = ""
    """Why there is no table, or "" when there is one."""
    vocab: int = 0


@dataclass(slots=True)
class TokenTable:
    """A compiled table: `buffer` is all of it, as the kernel reads it."""

    buffer: bytes | memoryview
    meta: Meta
    segment: Segment | None = None
    """The shared memory that `buffer` is, if it is shared."""

    @property
    def fallback(self) -> bool:
        """Whether text has to come from the tokenizer itself."""
        return bool(self.meta.reason)

    @classmethod
    def compile(cls, path: str | Path) -> "TokenTable":
        """Compile and prove the table of a tokenizer file.

        Raises TokenizerFileError when the file is missing, unreadable or no tokenizer. A decoder that has no
        table is no error: the table then says `fallback`, and the log says why.
        """
        tokenizer, raw = load_tokenizer(path)
        meta = Meta(str(Path(path).resolve()), hashlib.sha256(raw).hexdigest(), "unknown")
        try:
            table = _compile(tokenizer, meta)
            from .proof import disagreement

            if (fault := disagreement(table, tokenizer)) is None:
                return table
            meta.reason = f"the table disagrees with the tokenizer: {fault}"
        except pipeline.Unsupported as error:
            meta.reason = str(error)
        log.warning(
            "%s: decoding with the tokenizer itself, which is slower: no table for its decoder (%s): %s",
            path,
            meta.pipeline,
            meta.reason,
        )
        return cls(_pack(meta, [], [], b"", None), meta)

    def share(self, name: str) -> "TokenTable":
        """Put the table into the shared-memory segment `name`, for any process to attach.

        The segment stays when this process ends; its instance removes it. Raises NoRoom when /dev/shm is too
        small for it, FileExistsError when there is one of that name.
        """
        size = len(self.buffer)

        def fill(memory: mmap.mmap) -> None:
            memory[:size] = bytes(self.buffer)

        made = create(name, size, fill)
        return TokenTable(memoryview(made.memory).toreadonly(), self.meta, made)

    @classmethod
    def attach(cls, name: str) -> "TokenTable":
        """Map a shared table, read-only. Raises FileNotFoundError, TableError."""
        found = attach(name)
        try:
            table = cls.open(memoryview(found.memory).toreadonly())
        except TableError as error:
            found.close()
            raise TableError(f"segment {name!r}: {error}") from error
        table.segment = found
        return table

    @classmethod
    def read(cls, name: str) -> "TokenTable":
        """Copy a shared table and let go of it: for who looks up a token now and then.

        Raises FileNotFoundError, TableError.
        """
        found = attach(name)
        try:
            return cls.open(bytes(found.memory))
        finally:
            found.close()

    def bytes_of(self, token: int) -> bytes | None:
        """Return what a token adds to a text behind others, which may be a part of a character.

        None for an id that is no token, and when there is no table. Nothing that the table says is trusted.
        """
        _, _, ids, firsts, _, blob_len, *_ = _HEADER.unpack_from(self.buffer)
        if self.fallback or not 0 <= token < ids:
            return None
        at = HEADER_BYTES + ENTRY_BYTES * token
        size, flags, _, offset, long, _ = _LONG_ENTRY.unpack_from(self.buffer, at)
        if not flags & KNOWN:
            return None
        if size <= INLINE:
            return bytes(self.buffer[at + 2 : at + 2 + size])
        if size != LONG or offset + long > blob_len:
            return None
        blob = HEADER_BYTES + ENTRY_BYTES * (ids + firsts)
        return bytes(self.buffer[blob + offset : blob + offset + long])

    def is_special(self, token: int) -> bool:
        """Whether text that skips special tokens has none of this one; False when there is no table."""
        ids = _HEADER.unpack_from(self.buffer)[2]
        if self.fallback or not 0 <= token < ids:
            return False
        return bool(self.buffer[HEADER_BYTES + ENTRY_BYTES * token + 1] & SPECIAL)

    @classmethod
    def open(cls, buffer: bytes | memoryview) -> "TokenTable":
        """Read a table from memory that someone else filled; raise TableError if it is none."""
        if len(buffer) < HEADER_BYTES:
            raise TableError(f"{len(buffer)} bytes are no token table")
        magic, version, ids, firsts, meta_len, blob, *_ = _HEADER.unpack_from(buffer)
        if magic != MAGIC or version != VERSION:
            raise TableError(
                f"not a token table of version {VERSION}: found magic {magic!r}, version {version}"
            )
        at = HEADER_BYTES + ENTRY_BYTES * (ids + firsts) + blob
        if at + meta_len > len(buffer):
            raise TableError(f"a token table of {at + meta_len} bytes in {len(buffer)} bytes of memory")
        try:
            meta = msgspec.json.decode(bytes(buffer[at : at + meta_len]), type=Meta)
        except msgspec.MsgspecError as error:
            raise TableError(f"a token table's description is broken: {error}") from error
        return cls(buffer, meta)


def load_tokenizer(path: str | Path) -> "tuple[Tokenizer, bytes]":
    """Return the tokenizer in a file, and the file's bytes; raise TokenizerFileError."""
    from tokenizers import Tokenizer

    try:
        str(path).encode()
    except UnicodeEncodeError:  # a table says which file it is of, and so does an instance's configuration
        raise TokenizerFileError(
            f"tokenizer file {str(path)!r}: its path is not UTF-8; give one that is"
        ) from None
    try:
        if Path(path).is_dir():
            path = Path(path) / "tokenizer.json"
        raw = Path(path).read_bytes()
    except OSError as error:
        raise TokenizerFileError(
            f"cannot read tokenizer file {path}: {error.strerror}; expected a Hugging Face tokenizer.json"
        ) from error
    try:
        return Tokenizer.from_buffer(raw), raw
    except BaseException as error:  # the library raises plain Exception, whatever is wrong, or it crashes
        if not isinstance(error, Exception) and not is_crash(error):
            raise
        raise TokenizerFileError(
            f"{path} ({len(raw)} bytes) is not a usable Hugging Face tokenizer.json: {error}"
        ) from error


def decoder_of(tokenizer: "Tokenizer") -> dict[str, Any] | None:
    """Return the JSON of a tokenizer's decoder; None when it has none."""
    decoder = tokenizer.decoder
    if decoder is None:
        return None
    found: dict[str, Any] = msgspec.json.decode(decoder.__getstate__())
    return found


def _compile(tokenizer: "Tokenizer", meta: Meta) -> TokenTable:
    decoder = decoder_of(tokenizer)
    meta.pipeline = "+".join(pipeline.names(decoder))
    plan = pipeline.plan(decoder)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    meta.vocab = max(vocab.values(), default=-1) + 1
    if meta.vocab > MAX_IDS:
        raise pipeline.Unsupported(f"token ids up to {meta.vocab - 1}; a table holds {MAX_IDS}")
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    entries, firsts, blob = [], [], bytearray()
    seen: dict[bytes, int] = {}
    for token_id in range(meta.vocab):
        token = tokenizer.id_to_token(token_id)
        if token is None:
            entries.append(bytes(ENTRY_BYTES))
            firsts.append(bytes(ENTRY_BYTES))
            continue
        flags = KNOWN | (SPECIAL if token in special else 0)
        entry = _entry(*plan.bytes_of(token, False), flags, blob, seen)
        entries.append(entry)
        if plan.first_differs:
            firsts.append(_entry(*plan.bytes_of(token, True), flags, blob, seen))
    return TokenTable(_pack(meta, entries, firsts if plan.first_differs else [], bytes(blob), plan), meta)


def _entry(text: bytes, is_byte: bool, flags: int, blob: bytearray, seen: dict[bytes, int]) -> bytes:
    if is_byte:
        flags |= BYTE
    elif _is_utf8(text):
        flags |= CLEAN
    if len(text) <= INLINE:
        return bytes((len(text), flags)) + text.ljust(INLINE, b"\0")
    if len(text) > MAX_TOKEN:
        raise pipeline.Unsupported(f"a token of {len(text)} bytes; a table holds {MAX_TOKEN}")
    offset = seen.get(text)
    if offset is None:
        offset = seen[text] = len(blob)
        blob += text
    return _LONG_ENTRY.pack(LONG, flags, 0, offset, len(text), 0)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _pack(
    meta: Meta, entries: list[bytes], firsts: list[bytes], blob: bytes, plan: pipeline.Plan | None
) -> bytes:
    described = msgspec.json.encode(meta)
    strip = plan.strip_char.encode() if plan else b""
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        len(entries),
        len(firsts),
        len(described),
        len(blob),
        plan.strip_count if plan else 0,
        strip,
        len(strip),
    )
    return b"".join((header, *entries, *firsts, blob, described))
