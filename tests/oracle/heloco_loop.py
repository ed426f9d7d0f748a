"""DiLoCo whose outer gradients are corrected tensor by tensor against the outer momentum before they are averaged (HeLoCo)."""

import diloco_loop
import torch


def train(make_model, loss, batch, make_optimizer, rates, *, learners, interval, clip, rate, momentum):
    """(the global model, how often each of the three cases occurred)."""
    center = make_model()
    velocity = {name: None for name, _ in center.named_parameters()}
    models = [make_model() for _ in range(learners)]
    optimizers = [make_optimizer(list(model.parameters())) for model in models]
    cases = {"kept": 0, "turned": 0, "shrunk": 0}
    for position, inner_rate in enumerate(rates):
        for learner, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model.zero_grad()
            loss(model, batch(learner, position)).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            for group in optimizer.param_groups:
                group["lr"] = inner_rate
            optimizer.step()
        if (position + 1) % interval == 0:
            for name, before in center.named_parameters():
                deltas = [before.detach() - model.get_parameter(name).detach() for model in models]
                b = velocity[name]
                g = diloco_loop.mean([d if b is None else correct(d, b, cases) for d in deltas])
                velocity[name] = g.clone() if b is None else momentum * b + g
                before.data.sub_(rate * (g + momentum * velocity[name]))
            for model in models:
                model.load_state_dict(center.state_dict())
    return center, cases


def correct(d, m, cases):
    d, m = d.double(), m.double()
    u, v = d / d.norm(), m / m.norm()
    c = float((u * v).sum())
    conf = float(d.norm() / (d.norm() + m.norm()))
    if c >= 0.2:
        cases["kept"] += 1
        return d.float()
    if c < 0:
        cases["shrunk"] += 1
        return (d - min(-c * conf, 1.0) * c * d.norm() * v).float()
    cases["turned"] += 1
    share = (0.2 - c) * conf
    turned = (1 - share) * u + share * v
    return (d.norm() * turned / turned.norm()).float()
