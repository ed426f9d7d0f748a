"""A mixture of experts in the place of a block's MLP: each token goes through its `top_k` best experts and no others.

Routing is Qwen3-MoE's: softmax over all experts, the best `top_k`, their probabilities divided by their sum. No token is dropped
and no expert has a capacity: tokens are sorted by expert, and each expert's stretch is one product of a grouped one. Shapes
depend on no value, so the device is never asked and torch.compile sees one graph (in bf16, the only type in which torch traces
that product).

All experts of a block are one tensor for each of gate, up and down, [experts, out, in]: `sub_tensor` fragmentation cuts it
between experts, and a Hugging Face state dict is a matter of indexing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.workload.models.mlp import unset_linear


class ExpertMlp(nn.Module):
    """x [batch, time, width] -> the same shape, and how unevenly this batch was spread over the experts (1: evenly)."""

    def __init__(self, width: int, mlp: int, experts: int, top_k: int, shared: nn.Module | None) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = unset_linear(width, experts)
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
        return y.view(x.shape), unevenness(probabilities, chosen)


def route(x: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [N, experts]; the experts chosen [N, top_k], best first; what each of these weighs, 1 in sum. In fp32
    whatever the model's dtype: a probability rounded to bf16 sends tokens to another expert."""
    with torch.autocast(x.device.type, enabled=False):
        probabilities = F.linear(x.float(), router.float()).softmax(dim=-1)
    best, chosen = probabilities.topk(top_k, dim=-1)
    return probabilities, chosen, best / best.sum(dim=-1, keepdim=True)


def unevenness(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """experts * sum over experts of (share of choices x mean probability): the Switch Transformer's load-balancing loss, of
    this batch alone. It is 1 when both are even, experts / top_k when the same few get everything; its gradient goes by the
    probabilities."""
    experts = probabilities.shape[-1]
    share = (chosen.unsqueeze(-1) == torch.arange(experts, device=chosen.device)).float().mean(dim=(0, 1))
    return experts * (share * probabilities.mean(dim=0)).sum()


def run_experts(x: Tensor, chosen: Tensor, shares: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """[N, width]: for each token the sum of its experts' outputs by their shares.

    Rows are repeated, then permuted, and never gathered with repetition: a permutation's gradient adds nothing up in an order
    of the device's own.
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
    """Rows up to ends[0] by weights[0], on to ends[1] by weights[1], and so on; weights are [groups, out, in]."""
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):  # it does not know this product
        dtype = torch.get_autocast_dtype(kind)
        rows, weights = rows.to(dtype), weights.to(dtype)
    return F.grouped_mm(rows, weights.mT, offs=ends)
