"""FedAvg as a plain loop: H local steps each, then the average of the models weighted by the samples they saw.

`form="models"` averages the models themselves, as the paper prints it. `form="updates"` averages what each learner
changed and takes that off the global model: the same number, rounded elsewhere.
"""

import torch


def train(make_model, loss, batch, make_optimizer, rates, *, learners, interval, clip, form):
    """(the global model, the learners' models) after len(rates) local steps."""
    center = make_model()
    models = [make_model() for _ in range(learners)]
    optimizers = [make_optimizer(list(model.parameters())) for model in models]
    samples = [0] * learners
    for position, rate in enumerate(rates):
        for learner, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            drawn = batch(learner, position)
            samples[learner] += len(drawn[0])
            model.zero_grad()
            loss(model, drawn).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        if (position + 1) % interval == 0:
            average(center, models, samples, form)
            samples = [0] * learners
            for model in models:
                model.load_state_dict(center.state_dict())
    return center, models


@torch.no_grad()
def average(center, models, samples, form):
    for name, value in center.named_parameters():
        locals_ = [dict(model.named_parameters())[name] for model in models]
        if form == "updates":
            locals_ = [value - local for local in locals_]
        total = locals_[0] * samples[0]
        for local, count in zip(locals_[1:], samples[1:], strict=True):
            total = total + local * count
        mean = total / sum(samples)
        value.copy_(value - mean if form == "updates" else mean)
