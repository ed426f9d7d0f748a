"""A model's weights and its optimiser's state, moved to the same model sharded over a smaller group."""

from __future__ import annotations

import torch
from torch import nn

from atoll.executor.ranks.state import like_parameters
from atoll.tensors.local import local_part, local_value


def move_into(model: nn.Module, new: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A rank keeps its column of the mesh, so its part of every tensor stays what it is. The optimiser stays the same object:
    hooks hang on it. Nothing here waits for another rank."""
    before = dict(model.named_parameters(remove_duplicate=False))
    after = dict(new.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter in after.items():
            parameter.requires_grad_(before[name].requires_grad)
            local_part(parameter).copy_(local_part(before[name]))
        for name, buffer in new.named_buffers():
            buffer.copy_(model.get_buffer(name))
    follows = {id(old): after[name] for name, old in before.items()}
    state = local_value(optimizer.state_dict()["state"])
    for group in optimizer.param_groups:
        group["params"] = [follows[id(old)] for old in group["params"]]
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    placed = like_parameters(state, dict(enumerate(held)))
    optimizer.state.clear()
    for number, entries in placed.items():
        optimizer.state[held[number]] = entries
