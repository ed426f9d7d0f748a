"""A Hugging Face tokenizer small enough to be trained in a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

SAMPLE = ["the quick brown fox jumps over the lazy dog, the end of the story"] * 5


def trained(end: str = "<|endoftext|>") -> Any:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    special = [end] if end else []
    trainer = BpeTrainer(vocab_size=280, special_tokens=special, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(SAMPLE, trainer)
    return tokenizer


def saved(folder: Path, tokenizer: Any, name: str = "tok.json", **changes: Any) -> Path:
    parts = json.loads(tokenizer.to_str()) | changes
    (folder / name).write_text(json.dumps(parts), encoding="utf8")
    return folder / name
