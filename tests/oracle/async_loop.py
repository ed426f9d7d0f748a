"""Async DiLoCo, the one-round delay: the result of round r is applied at the end of round r + 1.

delta_r is the learner's weights at the start of round r minus those at its end. After round 1 nothing is applied and
everybody goes on from its own weights.
"""

import torch


def train(make_model, loss, batch, make_optimizer, make_outer, rates, *, learners, interval, clip):
    """(the global model, the learners' models); the last round's result is in the former and not yet in the latter."""
    center = make_model()
    outer = make_outer(list(center.parameters()))
    models = [make_model() for _ in range(learners)]
    optimizers = [make_optimizer(list(model.parameters())) for model in models]
    starts = [weights(model) for model in models]
    pending = None
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
            ends = [weights(model) for model in models]
            deltas = [[s - e for s, e in zip(*pair, strict=True)] for pair in zip(starts, ends, strict=True)]
            if pending is not None:
                for model in models:
                    model.load_state_dict(pending)
            starts = [weights(model) for model in models]
            for index, p in enumerate(center.parameters()):
                total = deltas[0][index]
                for delta in deltas[1:]:
                    total = total + delta[index]
                p.grad = total / learners
            outer.step()
            pending = {name: value.clone() for name, value in center.state_dict().items()}
    return center, models


def weights(model):
    return [p.detach().clone() for p in model.parameters()]
