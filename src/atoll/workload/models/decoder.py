"""The decoder-only transformer that Atoll trains by default, and the registry of models that a recipe can name.

The decoder has RMSNorm, rotary positions, a gated MLP, and norms on queries and keys, as Qwen3 has. q, k, v, o and gate, up,
down are separate matrices (eleven tensors per block with the four norms), so that every fragmentation has tensors to divide:
four blocks already have 44. With `experts` every block's MLP is a mixture of experts (`moe`). At small sizes the overhead of a
tensor operation exceeds its arithmetic, so the rotary tables are computed once and the forward pass is short.

No constructor here uses torch's global generator: the weights depend on the seed of `build_*` alone, so that learners built in
different processes, or in a different order, start from the same bits.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from atoll.config.models import DecoderShape, Number, Rule, check_numbers
from atoll.errors import ConfigError
from atoll.workload.data.seeds import generator
from atoll.workload.models.mlp import BatchNormMlp, Mlp, uninitialised_linear
from atoll.workload.models.moe import ExpertMlp

INIT_STD: Final = 0.02
ROPE_BASE: Final = 10_000.0
NORM_EPS: Final = 1e-6
Z_LOSS: Final = 1e-4
"""Weight of the squared log of the softmax's denominator: it keeps logits from drifting. The held-out loss is without it."""


class HeadNorm(nn.RMSNorm):
    """Of queries and keys, which are bf16 under autocast: the fused kernel wants the weight in the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q = uninitialised_linear(shape.width, shape.width)
        self.k = uninitialised_linear(shape.width, shape.width)
        self.v = uninitialised_linear(shape.width, shape.width)
        self.o = uninitialised_linear(shape.width, shape.width)
        self.q_norm = HeadNorm(shape.width // shape.heads, eps=NORM_EPS)
        self.k_norm = HeadNorm(shape.width // shape.heads, eps=NORM_EPS)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        samples, time, width = x.shape
        # One product for three matrices, one rotation for two: concatenating the weights costs less than the saved calls.
        qkv = F.linear(x, torch.cat((self.q.weight, self.k.weight, self.v.weight)))
        q, k, v = qkv.view(samples, time, 3 * self.heads, -1).chunk(3, dim=2)
        q, k = rotate(torch.cat((self.q_norm(q), self.k_norm(k)), dim=2), cos, sin).chunk(2, dim=2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return cast(Tensor, self.o(y.transpose(1, 2).reshape(samples, time, width)))


class GatedMlp(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate = uninitialised_linear(shape.width, shape.mlp)
        self.up = uninitialised_linear(shape.width, shape.mlp)
        self.down = uninitialised_linear(shape.mlp, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, torch.cat((self.gate.weight, self.up.weight))).chunk(2, dim=-1)
        return cast(Tensor, self.down(F.silu(gate) * up))


class Block(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(shape.width, eps=NORM_EPS)
        self.attention = Attention(shape)
        self.norm2 = nn.RMSNorm(shape.width, eps=NORM_EPS)
        self.mlp = _expert_mlp(shape) if shape.experts else GatedMlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.with_balance(x, cos, sin)[0]

    def with_balance(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual stream after this block, and the load-balancing loss of its experts."""
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.mlp(self.norm2(x))
        return (x + y[0], y[1]) if isinstance(y, tuple) else (x + y, None)


def _expert_mlp(shape: DecoderShape) -> ExpertMlp:
    shared = GatedMlp(replace(shape, mlp=shape.mlp * shape.shared)) if shape.shared else None
    return ExpertMlp(shape.width, shape.mlp, shape.experts, shape.top_k, shared)


def rotary_tables(shape: DecoderShape) -> tuple[Tensor, Tensor]:
    """cos and sin, [context, 1, head width]; sin includes the sign of the rotation, which saves a negation and a cat.

    Computed on the CPU also where a model is built without its numbers (the meta device): there arange imports torch's compiler,
    which takes longer than everything else at the start of a syncer."""
    half = shape.width // shape.heads // 2
    rates = ROPE_BASE ** (-torch.arange(half, dtype=torch.float64, device="cpu") / half)
    angles = torch.arange(shape.context, dtype=torch.float64, device="cpu")[:, None] * rates
    cos = torch.cat((angles.cos(), angles.cos()), dim=1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=1)
    there = torch.get_default_device()
    return cos[:, None, :].float().to(there), sin[:, None, :].float().to(there)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin), where a and b are the halves of a head; a roll swaps them."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class Decoder(nn.Module):
    """tokens [batch, time] -> logits [batch, time, vocab]. Build it with `build_decoder`."""

    cos: Tensor
    sin: Tensor
    checkpoint_activations = False
    """True: a block's activations are computed again in the backward pass instead of kept."""

    def __init__(self, shape: DecoderShape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.width, _weight=torch.empty(shape.vocab, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=NORM_EPS)
        self.head = uninitialised_linear(shape.width, shape.vocab)
        if shape.tied:
            self.head.weight = self.embedding.weight
        cos, sin = rotary_tables(shape)
        # Derived from the shape, so never stored or sent: non-persistent buffers are not merged.
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise(seed)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        if self.embedding.weight.is_meta:
            return  # it is asked for its shapes only
        rng = generator("decoder", seed)
        # A layer adds to the residual stream twice: without the factor the variance would grow with depth.
        residual_std = INIT_STD / math.sqrt(2 * self.shape.layers)
        for name, parameter in self.named_parameters():  # tied weights appear once
            if parameter.dim() >= 2:
                onto_residual = name.endswith(("attention.o.weight", "down.weight", "mlp.down"))
                parameter.normal_(0.0, residual_std if onto_residual else INIT_STD, generator=rng)

    def forward(self, tokens: Tensor, *, with_balance: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """`with_balance`, for a model with experts: the logits, and the mean load-balancing loss of the blocks."""
        time = tokens.shape[1]
        if time > self.shape.context:
            raise ConfigError(
                f"a sequence of {time} tokens is longer than model.numbers.context = {self.shape.context}: "
                f"set model.numbers.context to at least {time}"
            )
        cos, sin = self.cos[:time], self.sin[:time]
        x = self.embedding(tokens)
        balance_losses: list[Tensor] = []
        again = self.checkpoint_activations and self.training
        for block in self.blocks:
            run = cast(Block, block).with_balance
            x, balance_loss = checkpoint(run, x, cos, sin, use_reentrant=False) if again else run(x, cos, sin)
            balance_losses += [] if balance_loss is None else [balance_loss]
        logits = cast(Tensor, self.head(self.norm(x)))
        return (logits, torch.stack(balance_losses).mean()) if with_balance else logits


def build_decoder(shape: DecoderShape, seed: int) -> Decoder:
    return Decoder(shape, seed)


def language_model_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross entropy of each next token, the z-loss, and with experts the load-balancing loss of this batch; batch is
    [samples, time + 1]."""
    inside = _unwrapped(model)  # only the inner model has the shape, but the wrapper must be called
    if not (isinstance(inside, Decoder) and inside.shape.experts):
        return token_losses(logits_of(model, batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).mean()
    logits, balance = cast(tuple[Tensor, Tensor], model(batch[:, :-1], with_balance=True))
    return token_losses(logits.flatten(0, 1), batch[:, 1:].flatten()).mean() + inside.shape.balance * balance


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """[samples, time, entries]. Checked, because a user's own model may return its logits in a tuple or an object."""
    logits = model(tokens)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != tokens.shape:
        given = f"tensor of shape {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        shape = list(tokens.shape)
        right = f"it must return logits, [{shape[0]}, {shape[1]}, entries]"
        raise ConfigError(f"the model returns a {given} for tokens of shape {shape}: {right}")
    return logits


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel's `module` and torch.compile's `_orig_mod`, also nested."""
    for name in ("module", "_orig_mod"):
        inside = getattr(model, name, None)
        if isinstance(inside, nn.Module):
            return _unwrapped(inside)
    return model


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The training loss for each row of logits. One logsumexp serves both terms."""
    logits = logits.float()
    log_z = torch.logsumexp(logits, dim=-1)
    at_target = logits.gather(-1, targets[:, None]).squeeze(-1)
    return log_z - at_target + Z_LOSS * log_z.square()


def _decoder(
    seed: int, *, vocab: int, width: int, layers: int, heads: int, mlp: int, tied: bool = False, context: int = 1024,
    experts: int = 0, top_k: int = 2, shared: int = 0, balance: float = 0.01,
) -> Decoder:  # fmt: skip
    return build_decoder(DecoderShape(vocab, width, layers, heads, mlp, tied, context, experts, top_k, shared, balance), seed)


MODELS: Final[dict[str, Callable[..., nn.Module]]] = {"decoder": _decoder, "mlp": Mlp, "batchnorm_mlp": BatchNormMlp}
"""Builders by name, called with the seed and with numbers by keyword. The signature lists the allowed numbers."""


def build_model(
    name: str, numbers: Mapping[str, Number], seed: int, models: Mapping[str, Callable[..., nn.Module]] = MODELS
) -> nn.Module:
    """The model that a recipe names. Its numbers are checked here once, so that a builder can trust its types."""
    if name not in models:
        raise ConfigError(f"model.name = {name!r}: there is no such model; there are {', '.join(sorted(models))}")
    allowed = {key: p for key, p in inspect.signature(models[name]).parameters.items() if key != "seed"}
    check_numbers(name, numbers, {key: rule_of(parameter) for key, parameter in allowed.items()})
    missing = [key for key, p in allowed.items() if p.default is inspect.Parameter.empty and key not in numbers]
    if missing:
        raise ConfigError(f"model {name!r} also needs {', '.join(missing)}; it takes {', '.join(allowed)}")
    return models[name](seed, **numbers)


def rule_of(parameter: inspect.Parameter) -> Rule:
    """The type and lower bound of a number by a builder's signature. Annotations are strings where their evaluation is
    postponed."""
    named = getattr(parameter.annotation, "__name__", parameter.annotation)
    kind = {"bool": bool, "float": float}.get(named, int)
    return Rule(kind, 0 if parameter.default == 0 or kind is float else 1)
