"""Eager updates as published: every learner has an outer optimiser of its own, and steps it with a mixture.

After round r learner m has its fresh outer gradient d_m(r) and the mean D(r-1) of the round before. It takes the outer step with
d_m(r)/M + D(r-1) - d_m(r-1)/M from where its round began. `center` takes the means alone: what a syncer stores.
"""

import torch
from async_loop import weights


def train(make_model, loss, batch, make_optimizer, make_outer, rates, *, learners, interval, clip):
    """(the global model, the learners' models)."""
    center = make_model()
    outer = make_outer(list(center.parameters()))
    models = [make_model() for _ in range(learners)]
    optimizers = [make_optimizer(list(model.parameters())) for model in models]
    starts = [[p.detach().clone() for p in model.parameters()] for model in models]
    outers = [make_outer(start) for start in starts]
    before = [[torch.zeros_like(p) for p in start] for start in starts]
    mean_before = [torch.zeros_like(p) for p in starts[0]]
    for position, rate in enumerate(rates):
        for learner, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model.zero_grad()
            loss(model, batch(learner, position)).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        if (position + 1) % interval:
            continue
        fresh = [[s - e for s, e in zip(start, weights(model), strict=True)] for start, model in zip(starts, models, strict=True)]
        for own, own_before, start, own_outer, model in zip(fresh, before, starts, outers, models, strict=True):
            for p, new, old, mean in zip(start, own, own_before, mean_before, strict=True):
                p.grad = new / learners + (mean - old / learners)
            own_outer.step()
            with torch.no_grad():
                for p, value in zip(model.parameters(), start, strict=True):
                    p.copy_(value)
        before, mean_before = fresh, [sum(column) / learners for column in zip(*fresh, strict=True)]
        for p, mean in zip(center.parameters(), mean_before, strict=True):
            p.grad = mean
        outer.step()
    return center, models
