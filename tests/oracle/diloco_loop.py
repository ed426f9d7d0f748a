"""DiLoCo, Algorithm 1 as printed: H inner steps each, outer gradient = before minus after, mean, outer optimiser."""

import torch


def train(make_model, loss, batch, make_optimizer, make_outer, rates, *, learners, interval, clip):
    """(the global model, the learners' models). `make_outer(params)` is a torch optimiser, such as Nesterov SGD."""
    center = make_model()
    outer = make_outer(list(center.parameters()))
    models = [make_model() for _ in range(learners)]
    optimizers = [make_optimizer(list(model.parameters())) for model in models]
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
            for name, before in center.named_parameters():
                deltas = [before.detach() - model.get_parameter(name).detach() for model in models]
                before.grad = mean(deltas)
            outer.step()
            for model in models:
                model.load_state_dict(center.state_dict())
    return center, models


def mean(tensors):
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total / len(tensors)
