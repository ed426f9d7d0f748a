"""Random generators named by what they are for, so that a new source of chance never reshuffles an old one."""

from __future__ import annotations

import hashlib

import torch


def generator(purpose: str, *numbers: int) -> torch.Generator:
    """A private generator for one purpose.

    The seed is hashed, because torch's CPU engine keeps only 32 bits of it: sums such as seed + epoch would make
    (seed 1, epoch 0) the twin of (seed 0, epoch 1). The global generator is never touched: it belongs to the user.
    """
    text = purpose + "".join(f"/{int(number)}" for number in numbers)
    word = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
    return torch.Generator().manual_seed(word)
