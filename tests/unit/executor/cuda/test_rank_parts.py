"""A rank's part of a packet, staged on a GPU, is the one that the host encodes. The arithmetic is tested everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from atoll.codecs import UncheckedCodec, codec
from atoll.config.codecs import CODECS, codec_spec
from atoll.errors import NotFinite
from atoll.executor.cuda.encoder import encoded_with
from atoll.executor.cuda.staging import CudaStager, StagedPacket
from atoll.executor.ranks.stitch import EncodedPart, block_of, encode_part
from atoll.tensors.access import named_tensors, read_params
from atoll.tensors.layout import Fragment, build_layout
from atoll.tensors.pieces import BlockSplit, Run, joined_runs, split_of, take_runs

DEVICE_NAMES = sorted(spec.name for spec in CODECS.values() if spec.on_device)
OWNED = {
    "one rank, slot by slot": (Run(0, 700, 0), Run(700, 300, 700), Run(1000, 37, 1000)),
    "rows of several tensors": (Run(100, 500, 0), Run(900, 500, 500), Run(3001, 37, 1000)),
    "runs in another order than they are held": (Run(0, 512, 525), Run(2048, 525, 0)),
    "less than a block": (Run(5, 20, 3), Run(700, 9, 30)),
    "nothing": (),
}
NUMEL = 1037


class Done:
    """A CUDA event that has passed."""

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class HostEncoder:
    def __init__(self, vector: Tensor) -> None:
        self._memory = vector

    def input(self, numel: int) -> Tensor:
        return self._memory[:numel]

    def encode(self, by: UncheckedCodec, numel: int, feedback: bool) -> Any:
        return encoded_with(by, self.input(numel), feedback)


def part_of(name: str, vector: Tensor, split: BlockSplit, *, feedback: bool) -> StagedPacket:
    """As the stager computes it, without its streams."""

    def to_host(parts: Sequence[Tensor]) -> tuple[None, list[Tensor], Done]:
        return None, [part.clone() for part in parts], Done()

    scratch = vector.clone()
    stager = SimpleNamespace(
        device=torch.device("cpu"), _encoder=HostEncoder(scratch), _to_host=to_host, pool=SimpleNamespace(give=lambda *_: None)
    )
    by, fragment = codec(name), build_layout(nn.Linear(60, 17), "whole").fragments[0]
    return CudaStager._part_on_device(cast(Any, stager), fragment, by, scratch, torch.ones(2), feedback, split)


def split_for(name: str, owned: Sequence[Run]) -> BlockSplit:
    return split_of(owned, block_of(codec(name), rounds_randomly=False))


def assert_same(found: EncodedPart, expected: EncodedPart) -> None:
    for here, there in zip(found, expected, strict=True):
        if there is None or here is None:
            assert here is there
            continue
        assert here.dtype == there.dtype and torch.equal(here.view(-1).view(torch.uint8), there.view(-1).view(torch.uint8))


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("owned", OWNED.values(), ids=OWNED)
@pytest.mark.parametrize("name", DEVICE_NAMES)
def test_part_staged_on_a_device_is_the_one_that_the_host_encodes(name: str, owned: Sequence[Run], feedback: bool) -> None:
    vector, split = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)), split_for(name, owned)
    expected, residual = encode_part(codec(name), vector, split, feedback=feedback)
    staged = part_of(name, vector, split, feedback=feedback)
    part, buffers = staged.part()
    assert_same(part, expected)
    assert buffers.tolist() == [1.0, 1.0]
    left = staged.residual_once_known()
    assert (left is None) == (residual is None) and (left is None or residual is None or torch.equal(left, residual))


@pytest.mark.parametrize("at", [3, 699], ids=["in a block", "in a seam"])
def test_nan_in_a_part_is_found_when_it_is_waited_for(at: int) -> None:
    vector, split = torch.randn(NUMEL), split_for("int4", (Run(0, 700, 0),))
    assert split.block_numel < 700 and codec_spec("int4").block
    vector[at] = float("nan")
    staged = part_of("int4", vector, split, feedback=False)
    assert staged.poison() == "fragment 0"
    with pytest.raises(NotFinite, match="fragment 0"):
        staged.part()


@pytest.mark.parametrize("owned", OWNED.values(), ids=OWNED)
def test_joined_runs_copy_the_same_elements_in_the_same_order(owned: Sequence[Run]) -> None:
    vector = torch.arange(float(NUMEL))
    assert torch.equal(take_runs(vector, joined_runs(owned)), take_runs(vector, owned))
    assert len(joined_runs(OWNED["one rank, slot by slot"])) == 1


if torch.cuda.is_available():
    CUDA = torch.device("cuda", 0)

    def model_and_fragment() -> tuple[dict[str, Tensor], Fragment]:
        model = nn.Linear(60, 17).to(CUDA)
        return named_tensors(model), build_layout(model, "whole").fragments[0]

    @pytest.mark.parametrize("feedback", [False, True])
    @pytest.mark.parametrize("owned", OWNED.values(), ids=OWNED)
    @pytest.mark.parametrize("name", [*DEVICE_NAMES, "top_k:0.1"])
    def test_part_staged_on_cuda_is_that_of_the_host_each_time(name: str, owned: Sequence[Run], feedback: bool) -> None:
        """At once, while its graph is captured, and from the graph; `top_k` is encoded on the host."""
        tensors, fragment = model_and_fragment()
        assert fragment.numel == NUMEL
        stager, split = CudaStager(CUDA, NUMEL), split_for(name, owned)
        for _ in range(4):
            before = torch.randn(NUMEL)
            staged = stager.stage(fragment, tensors, stager.pin(before), codec(name), feedback=feedback, split=split)
            expected, residual = encode_part(codec(name), before - read_params(tensors, fragment).cpu(), split, feedback=feedback)
            assert_same(staged.part()[0], expected)
            left = staged.residual_once_known()
            assert (left is None) == (residual is None)
            if left is not None and residual is not None:
                assert torch.equal(left.cpu(), residual)
            staged.release()
