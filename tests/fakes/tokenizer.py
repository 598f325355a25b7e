"""Tiny tokenizers, made in memory in milliseconds: one for each way of putting text together."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

__all__ = ["SPECIAL_TOKENS", "byte_fallback_tokenizer", "byte_level_tokenizer"]

SPECIAL_TOKENS = ("<|start|>", "<|end|>")
"""Ids 0 and 1 of both tokenizers."""

_CORPUS = (
    "the quick brown fox jumps over the lazy dog and the other dog jumps too",
    "Hello World, hello there, how are you? I am well, thank you.",
    "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4, \uc548\ub155\ud788 \uac00\uc138\uc694",
    "STOP END stop end ### Observation: User: ",
)


def byte_level_tokenizer(corpus: Sequence[str] = _CORPUS) -> Tokenizer:
    """Byte-level BPE: any character may lie across up to four tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Words with a leading mark, bytes for the rest; the decoder drops the first space."""
    pieces = [
        *SPECIAL_TOKENS,
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "\u2581the",
        "\u2581fox",
        *"abcdefghijklmnopqrstuvwxyz",
    ]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer
