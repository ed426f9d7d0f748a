"""The decoder with eyes: a picture's patches, projected, are the first tokens of its sequence.

Blocks, norms and rotary positions are the decoder's own, and so is the causal mask: every byte sees the whole picture, a patch
those before it. A prefix that sees itself in full would need another mask in every block, for pictures of a few patches.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from atoll.config.models import BYTE_VOCAB, DecoderShape
from atoll.errors import ConfigError
from atoll.workload.data.questions import UNASKED, Asked, prompt
from atoll.workload.data.seeds import generator
from atoll.workload.data.tokenizer import END_OF_DOCUMENT
from atoll.workload.evaluation.evaluate import evaluating
from atoll.workload.models.decoder import INIT_STD, build_decoder, token_losses
from atoll.workload.models.mlp import unset_linear


class VisionLanguage(nn.Module):
    """(images [batch, channels, size, size], tokens [batch, time]) -> logits of the tokens, [batch, time, vocab]."""

    def __init__(self, shape: DecoderShape, seed: int, *, channels: int, size: int, patch: int) -> None:
        super().__init__()
        if size % patch:
            raise ConfigError(f"model.numbers.patch = {patch}: pictures are {size} x {size}, and patches must divide that")
        self.patch = patch
        self.patches = patches_of(size, patch)
        self.project = unset_linear(channels * patch * patch, shape.width)
        self.place = nn.Parameter(torch.empty(self.patches, shape.width))
        self.decoder = build_decoder(shape, seed)
        chance = generator("vision language", seed)
        with torch.no_grad():
            self.project.weight.normal_(0.0, INIT_STD, generator=chance)
            self.place.normal_(0.0, INIT_STD, generator=chance)

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        decoder = self.decoder
        seen = self.project(cut(images.to(self.place.dtype), self.patch)) + self.place
        x = torch.cat((seen, decoder.embedding(tokens)), dim=1)
        time = x.shape[1]
        if time > decoder.shape.context:
            needed = f"{self.patches} patches and {tokens.shape[1]} tokens"
            raise ConfigError(f"{needed} need model.numbers.context of at least {time}")
        for block in decoder.blocks:
            x = block(x, decoder.cos[:time], decoder.sin[:time])
        return cast(Tensor, decoder.head(decoder.norm(x[:, self.patches :])))


def patches_of(size: int, patch: int) -> int:
    return (size // patch) ** 2


def cut(images: Tensor, patch: int) -> Tensor:
    """[batch, patches, channels * patch * patch], row by row."""
    count, channels, size, _ = images.shape
    side = size // patch
    tiles = images.reshape(count, channels, side, patch, side, patch)
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(count, side * side, channels * patch * patch)


def vision_language(
    seed: int, *, channels: int, size: int, width: int, layers: int, heads: int, mlp: int, patch: int = 4,
    vocab: int = BYTE_VOCAB, tied: bool = False, context: int = 1024,
) -> VisionLanguage:  # fmt: skip
    shape = DecoderShape(vocab, width, layers, heads, mlp, tied, context)
    return VisionLanguage(shape, seed, channels=channels, size=size, patch=patch)


# ---------------------------------------------------------------- learning and measuring


def answer_loss(model: nn.Module, batch: Asked) -> Tensor:
    """Mean over the answers' bytes and ends. By weights and not by picking: a GPU would have to be waited for."""
    asked = batch.targets != UNASKED
    logits = model(batch.images, batch.tokens)
    losses = token_losses(logits.flatten(0, 1), batch.targets.clamp(min=0).flatten())
    return (losses * asked.flatten()).sum() / asked.sum()


@torch.no_grad()
def heldout_answers(model: nn.Module, batches: Iterable[Asked]) -> tuple[float, float]:
    """Mean cross entropy of the answers' tokens, and the share of answers that greedy decoding gets right to the last byte.

    One pass tells both. Greedy decoding gives the right answer just when each token of it is the likeliest one after the
    question and the right tokens before: by induction, the first wrong one is wrong in both.
    """
    total, tokens, right, samples = 0.0, 0, 0, 0
    with evaluating(model) as device:
        for batch in batches:
            images, given, targets = (part.to(device) for part in batch)
            asked = targets != UNASKED
            logits = model(images, given).float()
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=UNASKED, reduction="none")
            total += losses.double().sum().item()
            tokens += int(asked.sum())
            right += int(((logits.argmax(-1) == targets) | ~asked).all(dim=1).sum())
            samples += targets.shape[0]
    return total / tokens, right / samples


@torch.no_grad()
def answer(model: VisionLanguage, image: Tensor, question: str, longest: int = 32) -> str:
    """What the model says of one picture ([channels, size, size], scaled as in training), decoded greedily."""
    tokens = prompt(question)
    start = len(tokens)
    # What stands at the context's last place still says what comes next. A question too long for it is the model's to refuse.
    room = model.decoder.shape.context - model.patches - start + 1
    with evaluating(model) as device:
        for _ in range(min(longest, max(room, 1))):
            logits = model(image[None].to(device), torch.tensor([tokens], device=device))
            token = int(logits[0, -1].argmax())
            if token >= END_OF_DOCUMENT:
                break
            tokens.append(token)
    return bytes(tokens[start:]).decode(errors="replace")
