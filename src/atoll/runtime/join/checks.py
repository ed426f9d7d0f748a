"""Checks of a user's model and optimiser in `atoll.join`: what cannot be a learner is refused there, in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from atoll.config import CUSTOM, Config
from atoll.errors import ConfigError
from atoll.runtime.ranks.rendezvous import world
from atoll.store.tensor_files import refuse_unserialisable, use_plain_floats
from atoll.tensors.local import is_dtensor

DDP: Final = "DistributedDataParallel"
UNFIT: Final = {
    "FullyShardedDataParallel": "shard it with torch.distributed.fsdp.fully_shard",
    "DeepSpeedEngine": "shard it with torch.distributed.fsdp.fully_shard",
    "PipelineStage": "every rank must hold a part of every tensor, so pipeline stages are not supported",
}


def unwrapped_model(model: nn.Module) -> nn.Module:
    """A compiled model and DistributedDataParallel share their tensors with the plain one and only rename them. Learners with and
    without them must be able to train the same run."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}: atoll.join takes a torch.nn.Module")
    while True:
        inner = getattr(model, "module" if _kinds(model) & {DDP} else "_orig_mod", model)
        assert isinstance(inner, nn.Module)
        if inner is model:
            return model
        model = inner


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if "FSDPModule" in _kinds(module)]


def reshard(modules: Iterable[nn.Module]) -> None:
    """A forward pass without a backward pass leaves whole parameters in a module of `fully_shard`: what is exchanged and what the
    optimizer holds are the sharded ones."""
    for module in modules:
        module.reshard()  # type: ignore[operator]


def unwrapped_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Accelerate and Lightning wrap optimisers; steps happen in the one inside."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer is a {type(optimizer).__name__}: atoll.join takes a torch.optim.Optimizer")
    return optimizer


def takes_several_ranks(model: nn.Module) -> bool:
    """Whether this process is one rank of a learner, or holds DTensors. Refuses ranks that would diverge. Wrappers are found by
    class name: this needs no import of torch.distributed's or DeepSpeed's classes."""
    kinds = {name for module in model.modules() for name in _kinds(module)}
    for name, instead in UNFIT.items():
        if name in kinds:
            raise ConfigError(f"model is a {name}, which hides its parameters: {instead}")
    sharded = any(is_dtensor(tensor) for tensor in model.parameters())
    ranks = world()[1]
    if ranks > 1 and not sharded and DDP not in kinds:
        raise ConfigError(
            f"this process is one of {ranks} ranks of torch.distributed and its model is neither sharded nor in "
            f"DistributedDataParallel: the ranks would diverge. Wrap it, or start each learner without a process group"
        )
    return ranks > 1 or sharded


def _kinds(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__}


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
    addresses = {_identity(tensor) for tensor in held}
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad and _identity(tensor) not in addresses:
            raise ConfigError(
                f"parameter {name} requires grad and is not in the optimizer; add it, or freeze it with requires_grad_(False)"
            )
    refuse_untransferable(optimizer)


def _identity(tensor: Tensor) -> int:
    """Tied weights may be two objects on one memory; a rank's part of a DTensor may be empty, and then it has no memory."""
    return id(tensor) if is_dtensor(tensor) else tensor.data_ptr()


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
