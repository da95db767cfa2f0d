"""What a gateway checks requests against."""

from outfeed.gateway.model import model_of
from outfeed.ring.board import InstanceConfig


class Tokens:
    def __init__(self, **ids: int) -> None:
        self.ids = ids

    def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
        assert with_added_tokens
        return self.ids


def test_a_vocabulary_ends_behind_its_largest_id_however_many_it_leaves_out() -> None:
    config = InstanceConfig(instance="any", tokenizer="any")
    assert model_of(config, Tokens(a=0, b=7, c=3)).vocab_size == 8
    assert model_of(config, Tokens()).vocab_size == 0
