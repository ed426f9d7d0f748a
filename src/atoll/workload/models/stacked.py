"""The reference decoder for several learners at once: every weight has a leading learner axis.

M small models side by side use a GPU badly; as batched products they run nearly as fast as one model with M times the batch.
This is the forward pass of `decoder.Decoder` for weights of shape [M, ...]; a test requires that both give equal results. The
experts of all learners are the groups of one grouped product: a token of learner m goes to its own learner's experts only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.config.models import DecoderShape
from atoll.workload.models.decoder import NORM_EPS, Z_LOSS, rotate
from atoll.workload.models.moe import run_experts

Weights = Mapping[str, Tensor]
"""By `Decoder`'s own names, each [M, *shape]."""


class Batch(NamedTuple):
    tokens: Tensor
    """[M, B, T]."""
    used: Tensor
    """[M, B]: 1 for samples of their learner, 0 for padding."""


def stacked_loss(shape: DecoderShape, weights: Weights, batch: Tensor, samples: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[M]: each learner's mean loss over its first `samples` [M] of batch [M, B, T + 1]; the others are padding."""
    m, b, time = batch.shape[0], batch.shape[1], batch.shape[2] - 1
    used = (torch.arange(b, device=batch.device) < samples[:, None]).float()
    logits, balance = stacked_logits(shape, weights, Batch(batch[:, :, :-1], used), cos[:time], sin[:time])
    losses = _token_losses(logits.flatten(0, 1), batch[:, :, 1:].reshape(-1)).view(m, b, time).mean(dim=2)
    mean = (losses * used).sum(dim=1) / samples.clamp(min=1)
    return mean if balance is None else mean + shape.balance * balance


def _token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """`decoder.token_losses` with the target selected by comparison. The gradient of a gather is a tensor of zeros as large as
    the logits, gigabytes here; a comparison is fused with the softmax in both passes."""
    logits = logits.float()
    log_z = torch.logsumexp(logits, dim=-1)
    target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    return log_z - torch.where(target, logits, 0.0).sum(dim=-1) + Z_LOSS * log_z.square()


def stacked_logits(
    shape: DecoderShape, weights: Weights, batch: Batch, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor | None]:
    """[M, B*T, vocab], and with experts the mean load-balancing loss of the blocks, [M]."""
    m, b, time = batch.tokens.shape
    table = weights["embedding.weight"]
    first = torch.arange(m, device=batch.tokens.device) * shape.vocab  # offsets into one table of M vocabularies
    x = F.embedding((batch.tokens + first[:, None, None]).flatten(1), table.flatten(0, 1))
    balance: list[Tensor] = []
    for layer in range(shape.layers):
        before = f"blocks.{layer}."
        own = {name.removeprefix(before): weight for name, weight in weights.items() if name.startswith(before)}
        x = x + _attention(shape, own, _norm(x, own["norm1.weight"]), (m, b, time), cos, sin)
        normed = _norm(x, own["norm2.weight"])
        if shape.experts:
            y, uneven = _experts(shape, own, normed, batch.used.repeat_interleave(time, dim=1))
            balance.append(uneven)
        else:
            y = _mlp(own, "mlp", normed)
        x = x + y
    head = table if shape.tied else weights["head.weight"]
    logits = _linear(_norm(x, weights["norm.weight"]), head)
    return logits, torch.stack(balance).mean(dim=0) if balance else None


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """[M, N, in] times [M, out, in]."""
    return torch.bmm(x, weight.mT)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    """Over the last axis; weight is [M, width]."""
    normed = F.rms_norm(x, (x.shape[-1],), None, NORM_EPS)
    return normed * weight.view(weight.shape[0], *[1] * (x.dim() - 2), weight.shape[1]).to(x.dtype)


def _attention(
    shape: DecoderShape, own: Weights, x: Tensor, sizes: tuple[int, int, int], cos: Tensor, sin: Tensor
) -> Tensor:
    m, b, time = sizes
    # One product for three matrices: x is read once, and its gradient is not a sum of three.
    qkv = _linear(x, torch.cat([own[f"attention.{name}.weight"] for name in "qkv"], dim=1))
    q, k, v = qkv.view(m, b * time, 3 * shape.heads, -1).chunk(3, dim=2)
    q, k = _norm(q, own["attention.q_norm.weight"]), _norm(k, own["attention.k_norm.weight"])
    q, k, v = (t.reshape(m * b, time, shape.heads, -1) for t in (q, k, v))
    q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
    y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
    return _linear(y.transpose(1, 2).reshape(m, b * time, shape.width), own["attention.o.weight"])


def _mlp(own: Weights, name: str, x: Tensor) -> Tensor:
    gate, up = _linear(x, torch.cat((own[f"{name}.gate.weight"], own[f"{name}.up.weight"]), dim=1)).chunk(2, dim=-1)
    return _linear(F.silu(gate) * up, own[f"{name}.down.weight"])


def _experts(shape: DecoderShape, own: Weights, x: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, N, width] -> the same shape, and the load-balancing loss of each learner over the tokens that it has: `used`, [M, N],
    is 0 for padding."""
    with torch.autocast(x.device.type, enabled=False):  # as in `moe.route`
        probabilities = _linear(x.float(), own["mlp.router.weight"].float()).softmax(dim=-1)
    best, chosen = probabilities.topk(shape.top_k, dim=-1)
    shares = best / best.sum(dim=-1, keepdim=True)
    first = torch.arange(x.shape[0], device=x.device) * shape.experts  # offsets into one list of all learners' experts
    gate, up, down = (own[f"mlp.{name}"].flatten(0, 1) for name in ("gate", "up", "down"))
    of_all = (chosen + first[:, None, None]).flatten(0, 1)
    y = run_experts(x.flatten(0, 1), of_all, shares.flatten(0, 1), gate, up, down).view(x.shape)
    if shape.shared:
        y = y + _mlp(own, "mlp.shared", x)
    return y, _balance_losses(probabilities, chosen, used)


def _balance_losses(probabilities: Tensor, chosen: Tensor, used: Tensor) -> Tensor:
    """`moe.load_balancing_loss` of each learner."""
    experts = probabilities.shape[-1]
    counts = (used / used.sum(dim=1, keepdim=True).clamp(min=1)).unsqueeze(-1)
    hits = (chosen.unsqueeze(-1) == torch.arange(experts, device=chosen.device)).float().mean(dim=2)
    return experts * ((hits * counts).sum(dim=1) * (probabilities * counts).sum(dim=1)).sum(dim=-1)
