"""Tokenizers of kinds that differ from byte-level BPE, made on the spot from this repository's text."""

import base64
import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaTokenizer

from harness.servers import REPOSITORY

VOCAB_SIZE = 1000
SPLITS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def sentencepiece(folder: Path) -> None:
    """SentencePiece with byte fallback: spaces are `▁`, unknown characters are bytes."""
    from sentencepiece import SentencePieceTrainer

    SentencePieceTrainer.train(
        input=str(REPOSITORY / "README.md"), model_prefix=str(folder / "tokenizer"),
        vocab_size=700, model_type="bpe", byte_fallback=True, unk_id=0, bos_id=1, eos_id=2,
        pad_id=-1, minloglevel=2,
    )  # fmt: skip
    tokenizer = LlamaTokenizer.from_pretrained(folder, add_bos_token=True)
    tokenizer.save_pretrained(folder)


def tekken(folder: Path) -> None:
    """Mistral's: ids of control tokens come before those of bytes; the file is `tekken.json`."""
    from mistral_common.tokens.tokenizers.base import SpecialTokens

    pieces = [bytes([one]) for one in range(256)]
    for word in sorted(set((REPOSITORY / "README.md").read_text().split())):
        text = word.encode()
        # A merge of two needs the shorter beginnings.
        pieces += [text[:end] for end in range(2, len(text) + 1)]
    pieces = list(dict.fromkeys(pieces))[: VOCAB_SIZE - 100]
    config = {
        "pattern": SPLITS, "num_vocab_tokens": len(pieces), "default_vocab_size": VOCAB_SIZE,
        "default_num_special_tokens": 100, "version": "v11",
    }  # fmt: skip
    special = [
        {"rank": rank, "token_str": one.value, "is_control": True}
        for rank, one in enumerate(SpecialTokens)
    ]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(one).decode(), "token_str": None}
        for rank, one in enumerate(pieces)
    ]
    content = {"config": config, "vocab": vocab, "special_tokens": special}
    (folder / "tekken.json").write_text(json.dumps(content))


KINDS = {one.__name__: one for one in (sentencepiece, tekken)}


def make_model(kind: str, folder: Path) -> str:
    """Writes a tiny Llama with a tokenizer of this kind to a new `folder`; returns its path."""
    folder.mkdir()
    KINDS[kind](folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=512, initializer_range=0.1,
        bos_token_id=1, eos_token_id=2, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)
