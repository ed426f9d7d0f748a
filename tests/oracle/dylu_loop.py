"""Asynchronous local SGD with delayed Nesterov, on a given course of events: who stepped, who was merged, who went on from what.

The course comes from a virtual run; everything that is computed on it is written out here. Each contribution adds 1/N of itself
to the step; after every N of them the momentum takes their mean and is applied.
"""

import torch


def train(make_model, loss, batch, make_optimizer, course, *, learners, clip, rate, momentum, delay):
    """`course`: ("step", learner, batch, inner rate), ("merge", outer step, [(learner, local step, its version)]) or
    ("adopt", learner, version). Returns (the global weights, the learners' models)."""
    models = [make_model() for _ in range(learners)]
    optimizers = [make_optimizer(list(model.parameters())) for model in models]
    steps, past = [0] * learners, [{} for _ in range(learners)]
    theta = weights(models[0])
    versions = {0: theta}
    velocity, gathered = [torch.zeros_like(p) for p in theta], [torch.zeros_like(p) for p in theta]
    count = 0
    for kind, *what in course:
        if kind == "step":
            m, position, inner_rate = what
            models[m].zero_grad()
            loss(models[m], batch(m, position)).backward()
            torch.nn.utils.clip_grad_norm_(models[m].parameters(), clip)
            for group in optimizers[m].param_groups:
                group["lr"] = inner_rate
            optimizers[m].step()
            steps[m] += 1
            past[m][steps[m]] = weights(models[m])
        elif kind == "merge":
            t, taken = what
            before = count // delay
            for m, local_step, began in taken:
                gradient = [a - b for a, b in zip(versions[began], past[m][local_step], strict=True)]
                gathered = [d + g for d, g in zip(gathered, gradient, strict=True)]
                theta = [p - rate * g / delay for p, g in zip(theta, gradient, strict=True)]
                count += 1
            if count // delay > before:
                velocity = [momentum * b + d / delay for b, d in zip(velocity, gathered, strict=True)]
                theta = [p - rate * momentum * b for p, b in zip(theta, velocity, strict=True)]
                gathered = [torch.zeros_like(p) for p in theta]
            versions[t] = theta
        else:
            m, version = what
            with torch.no_grad():
                for p, value in zip(models[m].parameters(), versions[version], strict=True):
                    p.copy_(value)
    return theta, models


def weights(model):
    return [p.detach().clone() for p in model.parameters()]
