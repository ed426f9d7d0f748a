"""The decoder-only transformer Atoll trains out of the box, and the registry of models a recipe can name.

The decoder keeps q, k, v, o and gate, up, down as separate matrices (nine tensors a block with the two norms), so that
every fragmentation has something to cut and four blocks already make 36 tensors. At these sizes each tensor operation
costs more in overhead than in arithmetic, so the rotary tables are computed once and the forward pass is kept short.

No constructor here draws from torch's global generator: the weights come from `build_*`'s own seed alone, so that two
learners built in different processes, or in a different order, start from the same bits.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.workload.mlp import BatchNormMlp, Mlp, unset_linear
from atoll.workload.seeds import generator

INIT_STD: Final = 0.02
ROPE_BASE: Final = 10_000.0
NORM_EPS: Final = 1e-6

Number: TypeAlias = int | float | bool


@dataclass(frozen=True)
class DecoderShape:
    vocab: int
    width: int
    layers: int
    heads: int
    mlp: int
    tied: bool = False
    context: int = 1024
    """The longest sequence the rotary tables cover. No weight depends on it."""

    def __post_init__(self) -> None:
        for name in ("vocab", "width", "layers", "heads", "mlp", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} = {getattr(self, name)}: must be at least 1")
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"model.width = {self.width} with model.heads = {self.heads}: "
                f"the width must be a multiple of 2 x heads = {2 * self.heads} (rotary positions turn pairs)"
            )


SIZES: Final[dict[str, dict[str, Number]]] = {
    "nano": {"width": 32, "layers": 4, "heads": 2, "mlp": 64},
    "tiny": {"width": 64, "layers": 4, "heads": 4, "mlp": 128},
    "small": {"width": 256, "layers": 8, "heads": 4, "mlp": 768},
}
"""Decoder sizes by name, all but the vocabulary, which is the tokenizer's to say. Each has 36 block tensors or more."""


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, NORM_EPS)


class Attention(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q = unset_linear(shape.width, shape.width)
        self.k = unset_linear(shape.width, shape.width)
        self.v = unset_linear(shape.width, shape.width)
        self.o = unset_linear(shape.width, shape.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        samples, time, width = x.shape
        # One product for three matrices, one rotation for two: gluing the weights costs less than the calls saved.
        qkv = F.linear(x, torch.cat((self.q.weight, self.k.weight, self.v.weight)))
        qk, v = torch.split(qkv.view(samples, time, 3 * self.heads, -1), [2 * self.heads, self.heads], dim=2)
        q, k = _rotate(qk, cos, sin).chunk(2, dim=2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return cast(Tensor, self.o(y.transpose(1, 2).reshape(samples, time, width)))


class GatedMlp(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate = unset_linear(shape.width, shape.mlp)
        self.up = unset_linear(shape.width, shape.mlp)
        self.down = unset_linear(shape.mlp, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, torch.cat((self.gate.weight, self.up.weight))).chunk(2, dim=-1)
        return cast(Tensor, self.down(F.silu(gate) * up))


class Block(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.norm1 = RmsNorm(shape.width)
        self.attention = Attention(shape)
        self.norm2 = RmsNorm(shape.width)
        self.mlp = GatedMlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return cast(Tensor, x + self.mlp(self.norm2(x)))


def _rotary_tables(shape: DecoderShape) -> tuple[Tensor, Tensor]:
    """cos and sin, [context, 1, head width]; sin carries the rotation's sign, which saves a negation and a cat."""
    half = shape.width // shape.heads // 2
    rates = ROPE_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(shape.context, dtype=torch.float64)[:, None] * rates
    cos = torch.cat((angles.cos(), angles.cos()), dim=1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=1)
    return cos[:, None, :].float(), sin[:, None, :].float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin), where a and b are the halves of a head: rolling swaps them."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class Decoder(nn.Module):
    """tokens [batch, time] -> logits [batch, time, vocab]. Build it with `build_decoder`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: DecoderShape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.width, _weight=torch.empty(shape.vocab, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.width)
        self.head = unset_linear(shape.width, shape.vocab)
        if shape.tied:
            self.head.weight = self.embedding.weight
        cos, sin = _rotary_tables(shape)
        # Derived from the shape, so neither state nor payload: non-persistent buffers are never merged.
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise(seed)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        chance = generator("decoder", seed)
        # Two writes to the residual stream a layer: without the factor its variance grows with depth.
        residual_std = INIT_STD / math.sqrt(2 * self.shape.layers)
        for name, parameter in self.named_parameters():  # tied weights appear once
            if parameter.dim() == 2:
                onto_residual = name.endswith(("attention.o.weight", "mlp.down.weight"))
                parameter.normal_(0.0, residual_std if onto_residual else INIT_STD, generator=chance)

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        if time > self.shape.context:
            raise ConfigError(
                f"a sequence of {time} tokens is longer than model.context = {self.shape.context}: "
                f"set model.context to at least {time}"
            )
        cos, sin = self.cos[:time], self.sin[:time]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return cast(Tensor, self.head(self.norm(x)))


def build_decoder(shape: DecoderShape, seed: int) -> Decoder:
    return Decoder(shape, seed)


def language_model_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross entropy of each next token; batch is [samples, time + 1]."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def _decoder(
    seed: int, *, vocab: int, width: int, layers: int, heads: int, mlp: int, tied: bool = False, context: int = 1024
) -> Decoder:
    return build_decoder(DecoderShape(vocab, width, layers, heads, mlp, tied, context), seed)


MODELS: Final[dict[str, Callable[..., nn.Module]]] = {"decoder": _decoder, "mlp": Mlp, "batchnorm_mlp": BatchNormMlp}
"""Builders by name: called with the seed and with numbers by keyword. The signature is the list of allowed numbers."""


def build_model(name: str, numbers: Mapping[str, Number], seed: int) -> nn.Module:
    """The model a recipe names. Its numbers are checked here, once, so that a builder can trust its types."""
    if name not in MODELS:
        raise ConfigError(f"model.name = {name!r}: there is no such model; there are {', '.join(sorted(MODELS))}")
    allowed = {key: p for key, p in inspect.signature(MODELS[name]).parameters.items() if key != "seed"}
    unknown = sorted(set(numbers) - set(allowed))
    if unknown:
        raise ConfigError(f"model {name!r} has no number {', '.join(unknown)}; it takes {', '.join(allowed)}")
    missing = [key for key, p in allowed.items() if p.default is inspect.Parameter.empty and key not in numbers]
    if missing:
        raise ConfigError(f"model {name!r} also needs {', '.join(missing)}; it takes {', '.join(allowed)}")
    for key, value in numbers.items():
        wanted = "bool" if allowed[key].annotation in (bool, "bool") else "int"
        if type(value).__name__ != wanted:
            right = "true or false" if wanted == "bool" else "a whole number"
            raise ConfigError(f"model.{key} = {value!r}: must be {right}")
        if wanted == "int" and value < 1:
            raise ConfigError(f"model.{key} = {value}: must be at least 1")
    return MODELS[name](seed, **numbers)
