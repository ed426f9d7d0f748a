"""Data-parallel training as a plain loop: average the ranks' gradients in rank order, then one optimiser step."""

import torch


def train(make_model, loss, batch, make_optimizer, rates, *, learners, clip):
    """The model after len(rates) steps. `batch(learner, position)`; `rates[t]` is the learning rate of step t."""
    model = make_model()
    params = list(model.parameters())
    optimizer = make_optimizer(params)
    for position, rate in enumerate(rates):
        gradients = []
        for learner in range(learners):
            model.zero_grad()
            loss(model, batch(learner, position)).backward()
            gradients.append([p.grad.clone() for p in params])
        for index, p in enumerate(params):
            total = gradients[0][index].clone()
            for rank in range(1, learners):
                total = total + gradients[rank][index]
            p.grad = total / learners
        if clip:
            torch.nn.utils.clip_grad_norm_(params, clip)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return model
