"""The reference decoder for several learners at once: every weight has a leading learner axis.

M small models side by side use a GPU badly; as batched products they run nearly as fast as one model with M times the batch.
This is the forward pass of `decoder.Decoder` for weights of shape [M, ...]; a test requires that both give equal results.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.config.models import DecoderShape
from atoll.workload.models.decoder import NORM_EPS, Z_LOSS, rotate

Weights = Mapping[str, Tensor]
"""By `Decoder`'s own names, each [M, *shape]."""


def stacked_loss(shape: DecoderShape, weights: Weights, batch: Tensor, samples: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[M]: each learner's mean loss over its first `samples` [M] of batch [M, B, T + 1]; the others are padding."""
    m, b, time = batch.shape[0], batch.shape[1], batch.shape[2] - 1
    logits = stacked_logits(shape, weights, batch[:, :, :-1], cos[:time], sin[:time])
    losses = _token_losses(logits.flatten(0, 1), batch[:, :, 1:].reshape(-1)).view(m, b, time).mean(dim=2)
    valid = torch.arange(b, device=batch.device) < samples[:, None]
    return (losses * valid).sum(dim=1) / samples.clamp(min=1)


def _token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """`decoder.token_losses` with the target selected by comparison. The gradient of a gather is a tensor of zeros as large as
    the logits, gigabytes here; a comparison is fused with the softmax in both passes."""
    logits = logits.float()
    log_z = torch.logsumexp(logits, dim=-1)
    target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    return log_z - torch.where(target, logits, 0.0).sum(dim=-1) + Z_LOSS * log_z.square()


def stacked_logits(shape: DecoderShape, weights: Weights, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[M, B*T, vocab] for tokens [M, B, T]."""
    m, b, time = tokens.shape
    table = weights["embedding.weight"]
    first = torch.arange(m, device=tokens.device) * shape.vocab  # offsets into one table of M vocabularies
    x = F.embedding((tokens + first[:, None, None]).flatten(1), table.flatten(0, 1))
    for layer in range(shape.layers):
        own = {name: weights[f"blocks.{layer}.{name}"] for name in _BLOCK}
        x = x + _attention(shape, own, _norm(x, own["norm1.weight"]), (m, b, time), cos, sin)
        x = x + _mlp(own, _norm(x, own["norm2.weight"]))
    head = table if shape.tied else weights["head.weight"]
    return _linear(_norm(x, weights["norm.weight"]), head)


_BLOCK = (
    "norm1.weight", "attention.q.weight", "attention.k.weight", "attention.v.weight", "attention.o.weight",
    "attention.q_norm.weight", "attention.k_norm.weight", "norm2.weight", "mlp.gate.weight", "mlp.up.weight", "mlp.down.weight",
)  # fmt: skip


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


def _mlp(own: Weights, x: Tensor) -> Tensor:
    gate, up = _linear(x, torch.cat((own["mlp.gate.weight"], own["mlp.up.weight"]), dim=1)).chunk(2, dim=-1)
    return _linear(F.silu(gate) * up, own["mlp.down.weight"])
