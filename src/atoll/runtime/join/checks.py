"""Checks of a user's model and optimiser in `atoll.join`: what cannot be a learner is refused there, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from atoll.config import CUSTOM, Config
from atoll.errors import ConfigError
from atoll.store.tensor_files import refuse_unserialisable


def unwrapped_model(model: nn.Module) -> nn.Module:
    """A compiled model shares its tensors with the plain one and only renames them. Learners with and without compilation must
    be able to train the same run."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}: atoll.join takes a torch.nn.Module")
    inner = getattr(model, "_orig_mod", model)
    assert isinstance(inner, nn.Module)
    return inner


def unwrapped_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Accelerate and Lightning wrap optimisers; steps happen in the one inside."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer is a {type(optimizer).__name__}: atoll.join takes a torch.optim.Optimizer")
    return optimizer


def refuse_many_ranks(model: nn.Module) -> None:
    """Each rank would be a learner that adopts at its own times, so the ranks would diverge. Wrappers are found by class name:
    this needs no import of torch.distributed's or DeepSpeed's classes."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    wrapped = kinds & {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}
    if wrapped:
        raise ConfigError(
            f"model is a {min(wrapped)}: a learner is one process with plain tensors, and several ranks to a learner are not "
            f"supported yet; join with the module inside, one learner to a process"
        )
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ConfigError(
            f"this process is one of {distributed.get_world_size()} ranks of torch.distributed: several ranks to a learner are "
            f"not supported yet; start one process without a process group for each learner"
        )


def device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"the model's tensors are on {found or 'no device'}: a learner's model must be on one device")
    (device,) = devices
    if device.type == "meta":
        raise ConfigError("the model is on the meta device: it has no weights to train; materialise it before atoll.join")
    return device


def refuse_mismatched_optimizer(model: nn.Module, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """The trained parameters must be the exchanged ones: a parameter in only one of the two would silently diverge."""
    held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    strange = {id(tensor) for tensor in held} - {id(tensor) for tensor in model.parameters()}
    if strange:
        raise ConfigError(f"the optimizer has {len(strange)} parameters that the model has not; join with the whole model")
    addresses = {tensor.data_ptr() for tensor in held}  # tied weights may be two objects on one memory
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad and tensor.data_ptr() not in addresses:
            raise ConfigError(
                f"parameter {name} requires grad and is not in the optimizer; add it, or freeze it with requires_grad_(False)"
            )
    refuse_untransferable(optimizer)


def refuse_untransferable(optimizer: torch.optim.Optimizer) -> None:
    """A recovering learner receives a peer's optimiser state as plain values and tensors, never as code."""
    use_plain_floats(optimizer)
    refuse_unserialisable(optimizer)


def refuse_unfit_run(config: Config) -> None:
    p = config.protocol
    if config.model.name != CUSTOM:
        raise ConfigError(
            f"key model.name = {config.model.name!r}: this run builds its own model; join it with `atoll learner`, or set "
            f"model.name = 'custom' in the syncer's recipe to train yours"
        )
    if p.contribution == "gradient":
        raise ConfigError(
            "key protocol.contribution = 'gradient': data-parallel training steps with the recipe's optimiser on the syncer, "
            "not with yours; choose a preset that averages weights"
        )
    if p.freeze_not_due:
        raise ConfigError("key protocol.freeze_not_due = true: your own loop chooses what it trains; set it to false")


def use_plain_floats(optimizer: torch.optim.Optimizer) -> None:
    """A scheduler that computes with numpy leaves numpy floats behind, which messages cannot carry."""
    for group in optimizer.param_groups:
        for key, value in group.items():
            if isinstance(value, float) and type(value) is not float:
                group[key] = float(value)
