"""A tokenizer made on the spot: pairs of bytes that are frequent in Python's own sources."""

from __future__ import annotations

from typing import Any

from zoo.data import lines

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


def make_tokenizer(vocabulary: int = 400) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(lines()[:1000], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
