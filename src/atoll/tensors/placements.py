"""Which box of a DTensor this rank holds."""

from __future__ import annotations

from torch import Tensor

from atoll.errors import ConfigError
from atoll.tensors.local import is_dtensor, local_part
from atoll.tensors.pieces import Box


def box_of(name: str, tensor: Tensor) -> Box | None:
    """None: this rank holds the whole tensor."""
    if not is_dtensor(tensor):
        return None
    placements = tensor.placements  # type: ignore[attr-defined]
    for placement in placements:
        if placement.is_partial():
            raise ConfigError(
                f"{name} is a DTensor with placement {placement}: no rank has its values; redistribute it to Shard or Replicate"
            )
    if all(placement.is_replicate() for placement in placements):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # no public function says it

    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, placements)  # type: ignore[attr-defined]
    if tuple(shape) != tuple(local_part(tensor).shape):
        raise ConfigError(f"{name}: its placements {placements} say {tuple(shape)}, and the rank holds another shape")
    return None if tuple(shape) == tuple(tensor.shape) else Box(tuple(start), tuple(shape))
