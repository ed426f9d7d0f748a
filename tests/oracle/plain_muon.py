"""Muon as its authors print it, one matrix after another; vectors and what is excepted by AdamW."""

import torch


class PlainMuon:
    def __init__(self, params, matrices, *, momentum, betas, weight_decay, adam_rate=1.0):
        self.matrices = list(matrices)
        chosen = {id(p) for p in self.matrices}
        others = [p for p in params if id(p) not in chosen]
        self.adamw = torch.optim.AdamW(others, betas=betas, weight_decay=weight_decay, fused=True)
        self.param_groups = [*self.adamw.param_groups, {"lr": 0.0}]
        self.momentum, self.weight_decay, self.adam_rate = momentum, weight_decay, adam_rate
        self.buffers = [torch.zeros_like(p) for p in self.matrices]

    @torch.no_grad()
    def step(self):
        for group in self.adamw.param_groups:
            group["lr"] *= self.adam_rate  # the loop sets it before every step
        self.adamw.step()
        rate = self.param_groups[-1]["lr"]
        for p, buffer in zip(self.matrices, self.buffers, strict=True):
            buffer.copy_(self.momentum * buffer + (1 - self.momentum) * p.grad)
            ahead = (1 - self.momentum) * p.grad + self.momentum * buffer
            p.mul_(1 - rate * self.weight_decay)
            p.sub_(rate * 0.2 * max(p.shape) ** 0.5 * orthogonal(ahead))


def orthogonal(x):
    """Five rounds of the quintic, from a matrix of norm 1."""
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x
