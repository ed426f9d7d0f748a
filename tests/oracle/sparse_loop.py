"""SparseLoCo as printed, in a star: e <- beta*e + delta; the packet is Q(top-k(e)) chunk by chunk; e <- e - packet; the mean of
the packets is subtracted from Theta. What comes down is Theta's difference to what learners hold, in bf16.
"""

import torch


def train(make_model, loss, batch, make_optimizer, rates, *, learners, interval, clip, share, decay, chunk=4096):
    """(the global model, the learners' models)."""
    center = make_model()
    held = flat(center)
    theta = held.clone()
    models = [make_model() for _ in range(learners)]
    optimizers = [make_optimizer(list(model.parameters())) for model in models]
    errors = [torch.zeros_like(theta) for _ in models]
    for position, rate in enumerate(rates):
        for learner, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model.zero_grad()
            loss(model, batch(learner, position)).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        if (position + 1) % interval == 0:
            total = None
            for m, model in enumerate(models):
                errors[m] = errors[m] * decay + (held - flat(model))
                packet = torch.cat([selected(part, share) for part in errors[m].split(chunk)])
                errors[m] = errors[m] - packet
                total = packet if total is None else total + packet
            theta = theta - total / learners
            held = held + (theta - held).bfloat16().float()
            for model in models:
                load(model, held)
    load(center, theta)
    return center, models


def selected(part, share):
    """The largest magnitudes by two levels: the mean of the upper fifth and the mean of the rest."""
    kept = max(1, round(share * len(part)))
    order = part.abs().argsort(descending=True)[:kept].tolist()
    upper = -(-kept // 5)
    out = torch.zeros_like(part)
    for group in (order[:upper], order[upper:]):
        if group:
            level = sum(abs(float(part[i])) for i in group) / len(group)
            for i in group:
                out[i] = level if part[i] > 0 else -level
    return out


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@torch.no_grad()
def load(model, vector):
    at = 0
    for p in model.parameters():
        p.copy_(vector[at : at + p.numel()].view_as(p))
        at += p.numel()
