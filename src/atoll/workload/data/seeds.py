"""Random generators named by their purpose, so that a new use of randomness never changes an old one."""

from __future__ import annotations

import hashlib

import torch


def generator(purpose: str, *numbers: int) -> torch.Generator:
    """A private generator for one purpose.

    The seed is hashed, because torch's CPU engine keeps only 32 bits of it, and because with sums such as seed + epoch
    (seed 1, epoch 0) would equal (seed 0, epoch 1). The global generator belongs to the user and is never used.
    """
    text = purpose + "".join(f"/{int(number)}" for number in numbers)
    word = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
    return torch.Generator().manual_seed(word)
