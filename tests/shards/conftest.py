"""Tokenizers and their tables, made once for all tests of this room."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from outfeed.ring import segment
from outfeed.shards.table import TokenTable
from tokenizers import Tokenizer

from tests.instances import unique

from . import tokenizers_here as here
from .rig import Rig

NAMES = (
    "deepseek",
    "bytelevel_added",
    "metaspace_bpe",
    "metaspace_unigram",
    "no_decoder",
    "wordpiece",
    "ctc",
)
WITH_TABLE = NAMES[:5]


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("tokenizers")

    @cache
    def path(name: str) -> Path:
        if name == "deepseek":
            return here.deepseek()
        own = folder / name  # some are made of others
        own.mkdir()
        return Path(getattr(here, name)(own))

    return path


@pytest.fixture(scope="session")
def tokenizer_of(tokenizer_path: Callable[[str], Path]) -> Callable[[str], Tokenizer]:
    return cache(lambda name: Tokenizer.from_file(str(tokenizer_path(name))))


@pytest.fixture(scope="session")
def table_of(tokenizer_path: Callable[[str], Path]) -> Callable[[str], TokenTable]:
    return cache(lambda name: TokenTable.compile(tokenizer_path(name)))


@pytest.fixture
def make_rig(table_of: Callable[[str], TokenTable]) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []
    prefix = f"outfeed-{unique('loop')}"

    def make(capacity: int = 1 << 16, tokenizer: str = "bytelevel_added") -> Rig:
        made.append(Rig(f"{prefix}-{len(made)}", table_of(tokenizer), capacity))
        return made[-1]

    yield make
    for rig in made:
        rig.close()
    assert segment.listed(prefix) == []
