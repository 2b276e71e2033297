"""Tokenizers of embedded models, for `base.Task.tokenizer`: with the tokens <pad> and <eos>."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<pad>", "<eos>")


def character_tokenizer(characters: str) -> Tokenizer:
    """A tokenizer with one token for each of these characters; any other character becomes <pad>."""
    words = [*SPECIAL, *characters]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # without it, decoding puts spaces between characters
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def byte_pair_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer trained on these texts; it can encode any text.

    Args:
        texts: the training texts.
        vocab_size: maximum number of tokens, `SPECIAL` ones included; those of the 256 bytes are always there.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
