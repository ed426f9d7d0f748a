"""A mixture of experts that replaces a block's MLP: each token goes through its `top_k` best experts only.

Routing is that of Qwen3-MoE: softmax over all experts, the best `top_k`, their probabilities divided by their sum. No token is
dropped and no expert has a capacity: tokens are sorted by expert, and a grouped matrix product computes all experts. Shapes do
not depend on values, so the host never waits for the device and torch.compile sees one graph (in bf16, the only dtype in which
torch traces that product).

All experts of a block are one tensor for each of gate, up and down, [experts, out, in]: `sub_tensor` fragmentation cuts it
between experts, and a Hugging Face state dict is made by indexing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.workload.models.mlp import uninitialised_linear


class ExpertMlp(nn.Module):
    """x [batch, time, width] -> the same shape, and the load-balancing loss of this batch (1: evenly spread)."""

    def __init__(self, width: int, mlp: int, experts: int, top_k: int, shared: nn.Module | None) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = uninitialised_linear(width, experts)
        self.gate = nn.Parameter(torch.empty(experts, mlp, width))
        self.up = nn.Parameter(torch.empty(experts, mlp, width))
        self.down = nn.Parameter(torch.empty(experts, width, mlp))
        self.shared = shared

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        probabilities, chosen, shares = route(flat, self.router.weight, self.top_k)
        y = run_experts(flat, chosen, shares, self.gate, self.up, self.down)
        if self.shared is not None:
            y = y + self.shared(flat)
        return y.view(x.shape), load_balancing_loss(probabilities, chosen)


def route(x: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [N, experts]; the chosen experts [N, top_k], best first; their weights, which sum to 1. Always in fp32: a
    probability rounded to bf16 sends tokens to another expert."""
    with torch.autocast(x.device.type, enabled=False):
        probabilities = F.linear(x.float(), router.float()).softmax(dim=-1)
    best, chosen = probabilities.topk(top_k, dim=-1)
    return probabilities, chosen, best / best.sum(dim=-1, keepdim=True)


def load_balancing_loss(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """experts * sum over experts of (share of choices x mean probability): the Switch Transformer's load-balancing loss, of
    this batch alone. It is 1 when both are even, and experts / top_k when the same few experts get all tokens; its gradient
    flows through the probabilities."""
    experts = probabilities.shape[-1]
    share = (chosen.unsqueeze(-1) == torch.arange(experts, device=chosen.device)).float().mean(dim=(0, 1))
    return experts * (share * probabilities.mean(dim=0)).sum()


def run_experts(x: Tensor, chosen: Tensor, shares: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """[N, width]: for each token the sum of its experts' outputs, weighted by their shares.

    Rows are repeated and then permuted, never gathered with repetition: the gradient of a permutation has no sums whose order
    the device could choose.
    """
    tokens, width = x.shape
    top_k = chosen.shape[1]
    of_row = chosen.flatten()
    order = of_row.argsort(stable=True)
    groups = torch.arange(gate.shape[0], device=x.device)
    ends = torch.searchsorted(of_row[order], groups, right=True, out_int32=True)
    rows = x.unsqueeze(1).expand(tokens, top_k, width).reshape(tokens * top_k, width).index_select(0, order)
    gated, upward = _grouped(rows, torch.cat((gate, up), dim=1), ends).chunk(2, dim=-1)
    out = _grouped(F.silu(gated) * upward, down, ends).index_select(0, order.argsort())
    return (out.view(tokens, top_k, width) * shares.unsqueeze(-1).to(out.dtype)).sum(dim=1)


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows up to ends[0] times weights[0], rows up to ends[1] times weights[1], and so on; weights are [groups, out, in]."""
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):  # autocast does not cover this product
        dtype = torch.get_autocast_dtype(kind)
        rows, weights = rows.to(dtype), weights.to(dtype)
    return F.grouped_mm(rows, weights.mT, offs=ends)
