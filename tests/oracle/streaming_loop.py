"""Streaming DiLoCo, Algorithm 2 as printed, with t - t_p where the paper's text has t + t_p (its example fits minus).

Fragment p is sent when (t - t_p) mod H = 0, t_p = floor(p*H/P); tau inner steps later every learner takes
alpha * its own + (1 - alpha) * the outer result, which was stepped from the last outer copy, never from mixed weights.
"""

import torch


def train(make_model, loss, batch, make_optimizer, make_outer, rates, *, learners, interval, clip,
          fragments, taus, alpha, codec=None, keep=False):  # fmt: skip
    """(the global model, the learners' models). `fragments`: lists of parameter names; `taus`: one a learner;
    `codec`: a lossy flat -> flat. `keep`: a learner adds to a result what it trained while it waited for it."""
    center = make_model()
    outers = [make_outer([center.get_parameter(name) for name in names]) for names in fragments]
    models = [make_model() for _ in range(learners)]
    optimizers = [make_optimizer(list(model.parameters())) for model in models]
    offsets = [p * interval // len(fragments) for p in range(len(fragments))]
    in_flight = {}
    for t, rate in enumerate(rates, 1):
        for learner, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model.zero_grad()
            loss(model, batch(learner, t - 1)).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        for p, names in enumerate(fragments):
            if (t - offsets[p]) % interval == 0:
                outer_step(center, models, names, outers[p], codec)
                result = {name: center.get_parameter(name).detach().clone() for name in names}
                for learner, tau in enumerate(taus):
                    sent = {name: models[learner].get_parameter(name).detach().clone() for name in names}
                    in_flight[p, learner, t + tau] = result, sent
            for learner, model in enumerate(models):
                result, sent = in_flight.pop((p, learner, t), ({}, {}))
                for name, value in result.items():
                    own = model.get_parameter(name).data
                    mixed = alpha * own + (1 - alpha) * value if alpha else value
                    own.copy_(own - sent[name] + value if keep else mixed)
    return center, models


def outer_step(center, models, names, outer, codec):
    before = [center.get_parameter(name) for name in names]
    total = None
    for model in models:
        after = [model.get_parameter(name).detach() for name in names]
        delta = torch.cat([(b.detach() - a).flatten() for b, a in zip(before, after, strict=True)])
        delta = codec(delta) if codec else delta
        total = delta if total is None else total + delta
    for b, g in zip(before, (total / len(models)).split([b.numel() for b in before]), strict=True):
        b.grad = g.view_as(b).clone()
    outer.step()
