"""A vision-language model: the projected patches of an image are the first tokens of the decoder's sequence.

Blocks, norms and rotary positions are the decoder's own, and so is the causal mask: every byte sees the whole image, a patch
those before it. Attention among all patches would need another mask in every block, for images of a few patches.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.config.models import BYTE_VOCAB, DecoderShape
from atoll.errors import ConfigError
from atoll.workload.data.questions import IGNORED_TARGET, QuestionBatch, prompt
from atoll.workload.data.seeds import generator
from atoll.workload.data.tokenizer import END_OF_DOCUMENT
from atoll.workload.evaluation.evaluate import evaluating
from atoll.workload.models.decoder import INIT_STD, build_decoder, token_losses
from atoll.workload.models.mlp import uninitialised_linear


class VisionLanguage(nn.Module):
    """(images [batch, channels, size, size], tokens [batch, time]) -> logits of the tokens, [batch, time, vocab]."""

    def __init__(self, shape: DecoderShape, seed: int, *, channels: int, size: int, patch: int) -> None:
        super().__init__()
        if size % patch:
            raise ConfigError(f"model.numbers.patch = {patch}: images are {size} x {size}, and patches must divide that")
        self.patch = patch
        self.patches = patches_of(size, patch)
        self.project = uninitialised_linear(channels * patch * patch, shape.width)
        self.place = nn.Parameter(torch.empty(self.patches, shape.width))
        self.decoder = build_decoder(shape, seed)
        rng = generator("vision language", seed)
        with torch.no_grad():
            self.project.weight.normal_(0.0, INIT_STD, generator=rng)
            self.place.normal_(0.0, INIT_STD, generator=rng)

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        decoder = self.decoder
        prefix = self.project(patchify(images.to(self.place.dtype), self.patch)) + self.place
        x = torch.cat((prefix, decoder.embedding(tokens)), dim=1)
        time = x.shape[1]
        if time > decoder.shape.context:
            needed = f"{self.patches} patches and {tokens.shape[1]} tokens"
            raise ConfigError(f"{needed} need model.numbers.context of at least {time}")
        for block in decoder.blocks:
            x = block(x, decoder.cos[:time], decoder.sin[:time])
        return cast(Tensor, decoder.head(decoder.norm(x[:, self.patches :])))


def patches_of(size: int, patch: int) -> int:
    return (size // patch) ** 2


def patchify(images: Tensor, patch: int) -> Tensor:
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


# ---------------------------------------------------------------- loss and evaluation


def answer_loss(model: nn.Module, batch: QuestionBatch) -> Tensor:
    """Mean over the answers' bytes and ends. A weighted sum and not a selection, which would make the host wait for the GPU."""
    in_answer = batch.targets != IGNORED_TARGET
    logits = model(batch.images, batch.tokens)
    losses = token_losses(logits.flatten(0, 1), batch.targets.clamp(min=0).flatten())
    return (losses * in_answer.flatten()).sum() / in_answer.sum()


@torch.no_grad()
def heldout_answers(model: nn.Module, batches: Iterable[QuestionBatch]) -> tuple[float, float]:
    """Mean cross entropy of the answers' tokens, and the share of answers that greedy decoding gets right to the last byte.

    One pass gives both. Greedy decoding gives the right answer exactly if each of its tokens is the most likely one after the
    question and the right tokens before it: by induction, the first wrong token is wrong in both.
    """
    total, tokens, right, samples = 0.0, 0, 0, 0
    with evaluating(model) as device:
        for batch in batches:
            images, given, targets = (part.to(device) for part in batch)
            in_answer = targets != IGNORED_TARGET
            logits = model(images, given).float()
            losses = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED_TARGET, reduction="none")
            total += losses.double().sum().item()
            tokens += int(in_answer.sum())
            right += int(((logits.argmax(-1) == targets) | ~in_answer).all(dim=1).sum())
            samples += targets.shape[0]
    return total / tokens, right / samples


@torch.no_grad()
def answer(model: VisionLanguage, image: Tensor, question: str, longest: int = 32) -> str:
    """The model's answer about one image ([channels, size, size], scaled as in training), decoded greedily."""
    tokens = prompt(question)
    start = len(tokens)
    # The token at the last position of the context still predicts one more. The model refuses a question that is too long.
    room = model.decoder.shape.context - model.patches - start + 1
    with evaluating(model) as device:
        for _ in range(min(longest, max(room, 1))):
            logits = model(image[None].to(device), torch.tensor([tokens], device=device))
            token = int(logits[0, -1].argmax())
            if token >= END_OF_DOCUMENT:
                break
            tokens.append(token)
    return bytes(tokens[start:]).decode(errors="replace")
