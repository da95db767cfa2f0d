"""`scripts/check-tokenizer`: says of a tokenizer file whether streamed text is right."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from tests.eventually import LIMIT_S

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_tokenizer.py"


def check(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def test_one_object_per_file(tokenizer_path: Callable[[str], Path]) -> None:
    names = ["bytelevel_added", "metaspace_bpe", "metaspace_unigram", "wordpiece"]
    paths = [tokenizer_path(name) for name in names]
    done = check(*paths, "--json", "--random", 12, "--length", 16)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["file"] for each in found] == [str(path) for path in paths]
    assert [each["table"] for each in found] == [True, True, True, False]
    assert all(each["mismatches"] == 0 and each["cases"] > 500 for each in found)
    assert found[1]["pipeline"] == "Replace+ByteFallback+Fuse+Strip"


@pytest.mark.parametrize("text", [b"", b"  \n", b"\xff\xfe"])
def test_a_text_without_text_is_refused(
    text: bytes, tmp_path: Path, tokenizer_path: Callable[[str], Path]
) -> None:
    file = tmp_path / "text"
    file.write_bytes(text)
    done = check(tokenizer_path("no_decoder"), "--text", file)
    assert done.returncode == 2
    assert str(file) in done.stderr


def test_a_file_that_is_no_tokenizer_does_not_hide_the_others(
    tmp_path: Path, tokenizer_path: Callable[[str], Path]
) -> None:
    done = check(tmp_path / "none.json", tokenizer_path("no_decoder"), "--json", "--random", 4)
    assert done.returncode == 2
    assert "none.json" in done.stderr
    assert json.loads(done.stdout)["mismatches"] == 0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (b"a\xffb", "is not UTF-8; give one that is"),
        (b"a\xffb/tokenizer.json", "is not UTF-8; give one that is"),
        (b"x" * 5000, "File name too long; expected a Hugging Face tokenizer.json"),
        (b"folder", "tokenizer.json: No such file or directory; expected"),
        (b"fifo/x", "Not a directory; expected"),
    ],
    ids=["folder not UTF-8", "file not UTF-8", "too long", "an empty folder", "below a file"],
)
def test_a_path_that_cannot_be_used_is_said_in_one_line(
    tmp_path: Path, tokenizer_path: Callable[[str], Path], name: bytes, why: str
) -> None:
    odd = tmp_path / os.fsdecode(b"a\xffb")
    odd.mkdir()
    shutil.copy(tokenizer_path("no_decoder"), odd / "tokenizer.json")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    done = check(tmp_path / os.fsdecode(name), tokenizer_path("no_decoder"), "--json", "--random", 4)
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()
    assert said.startswith("check-tokenizer: ")
    assert why in said
    assert json.loads(done.stdout)["mismatches"] == 0, "it does not hide the other"


@pytest.mark.parametrize("option", ["--random=-1", f"--random={10**26}", "--length=1", f"--length={10**26}"])
def test_a_number_that_would_never_end_is_refused(tokenizer_path: Callable[[str], Path], option: str) -> None:
    done = check(tokenizer_path("no_decoder"), option)
    assert done.returncode == 2
    name, _, value = option.partition("=")
    assert f"check-tokenizer: error: {name} {value}: give " in done.stderr


def test_a_tokenizer_that_crashes_does_not_hide_the_others(
    tmp_path: Path, tokenizer_path: Callable[[str], Path]
) -> None:
    """Strip takes more from a token's end than it has; the second step leaves it without a table."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence([decoders.Strip("a", 0, 2), decoders.CTC()])
    tokenizer.save(str(tmp_path / "crashes.json"))
    done = check(tmp_path / "crashes.json", tokenizer_path("no_decoder"), "--json", "--random", 4)
    assert done.returncode == 2
    assert "crashes.json: the tokenizer crashes in its own decode" in done.stderr
    assert json.loads(done.stdout)["mismatches"] == 0
