"""What a learner holds after an adoption with `keep_overlap`, and what it sends next."""

from __future__ import annotations

import pytest
import torch
from small_runs import Run, batch_norm_mlp, configured, small_task_for
from torch import Tensor

from atoll.executor.learner import TensorLearner
from atoll.ids import SYNCER
from atoll.protocol.interface import Payload
from atoll.protocol.reasons import DUE
from atoll.protocol.vocabulary import (
    NO_VERSION,
    Adopt,
    Contribution,
    Envelope,
    Keep,
    LoadTheta,
    Send,
    Stage,
)  # fmt: skip
from atoll.tasks.task import initial_versions
from atoll.tensors.access import named_tensors, read_buffers, read_params

KEEPS = {"keep_overlap": True, "codec_up": "fp32"}


class Trained:
    """A learner that has adopted version 0, and moves as a test says."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.task = small_task_for(configured(protocol=KEEPS), lambda: batch_norm_mlp().to(dtype))
        self.learner = TensorLearner(self.task, 0)
        self.fragment = self.task.layout.fragments[0]
        self.version = initial_versions(self.task)[0]
        for p, version in enumerate(initial_versions(self.task)):
            self.learner.execute(Keep(p, 0, NO_VERSION), Payload("fragment", 0, (version.announced, version.buffers)))
            self.learner.execute(Adopt(p, 0, 0.0, False, DUE), None)

    def moves(self, by: float) -> None:
        with torch.no_grad():
            for parameter in self.learner.model.parameters():
                parameter.add_(by)

    def is_pulled(self, outer_step: int, local_step: int) -> Tensor:
        """The difference that it sends."""
        self.learner.execute(Stage(0, local_step, NO_VERSION, False), None)
        body = Contribution(outer_step, 0, local_step, 0, 1, 1, 1, 1)
        payload = self.learner.payload_for(Send(Envelope(0, 0, SYNCER, 0, 0, body)))
        assert payload is not None and payload.content is not None
        packet, _ = payload.content
        return packet.codes.view(torch.float32)

    def adopts(self, outer_step: int, announced: Tensor, *, keeps: bool) -> Tensor:
        buffers = torch.full_like(self.version.buffers, 3.0)
        self.learner.execute(Keep(0, outer_step, NO_VERSION), Payload("fragment", 0, (announced, buffers)))
        self.learner.execute(Adopt(0, outer_step, 0.0, True, DUE, keeps), None)
        tensors = named_tensors(self.learner.model)
        assert torch.equal(read_buffers(tensors, self.fragment), buffers), "buffers are the version's"
        assert torch.equal(self.learner.anchors[0], announced), "the anchor is the version, byte for byte"
        return read_params(tensors, self.fragment)


def test_weights_are_the_version_plus_what_was_trained_since_the_copy_that_was_sent() -> None:
    trained = Trained()
    trained.moves(0.5)
    trained.is_pulled(1, 1)
    trained.moves(0.25)
    trained.learner.execute(Stage(0, 2, NO_VERSION, False), None)  # taken anew at the boundary, and not sent
    announced = trained.version.announced + 2.0
    torch.testing.assert_close(trained.adopts(1, announced, keeps=True), announced + 0.25)


def test_weights_that_did_not_move_since_the_copy_are_the_version_bit_for_bit() -> None:
    trained = Trained()
    trained.moves(0.1)
    trained.is_pulled(1, 1)
    announced = trained.version.announced * 1.1
    assert torch.equal(trained.adopts(1, announced, keeps=True), announced)


def test_weights_are_the_version_alone_where_the_machine_keeps_nothing() -> None:
    trained = Trained()
    trained.moves(0.5)
    trained.is_pulled(1, 1)
    trained.moves(0.25)
    announced = trained.version.announced + 2.0
    assert torch.equal(trained.adopts(1, announced, keeps=False), announced)


def test_next_contribution_has_what_was_kept() -> None:
    trained = Trained()
    trained.is_pulled(1, 1)
    trained.moves(0.25)
    trained.adopts(1, trained.version.announced + 2.0, keeps=True)
    torch.testing.assert_close(trained.is_pulled(3, 2), torch.full((trained.fragment.numel,), -0.25))


def test_weights_of_16_bits_keep_what_they_can_hold() -> None:
    trained = Trained(torch.bfloat16)
    trained.is_pulled(1, 1)
    trained.moves(0.25)
    announced = trained.version.announced + 2.0
    torch.testing.assert_close(trained.adopts(1, announced, keeps=True), announced + 0.25, rtol=0.01, atol=0.01)


def test_master_weights_keep_what_their_16_bit_casts_cannot_show() -> None:
    trained = Trained(torch.bfloat16)
    optimizer = trained.learner.optimizer
    for parameter in trained.learner.model.parameters():
        optimizer.state[parameter]["master"] = parameter.detach().float().clone()
    masters = {name: optimizer.state[p]["master"] for name, p in trained.learner.model.named_parameters()}
    trained.is_pulled(1, 1)
    for master in masters.values():
        master.add_(1e-5)
    announced = trained.version.announced + 2.0
    trained.adopts(1, announced, keeps=True)
    moved = read_params(masters, trained.fragment) - announced
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-5), rtol=0.1, atol=0)


def test_copy_of_weights_that_are_gone_is_not_kept() -> None:
    trained = Trained()
    trained.is_pulled(1, 1)
    trained.learner.execute(LoadTheta(DUE), None)
    with pytest.raises(AssertionError, match="not known"):
        trained.adopts(1, trained.version.announced, keeps=True)


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_run_that_keeps_its_overlap_discards_none_of_it_and_its_checkers_agree(codec: str) -> None:
    """`Run` has all checkers of the invariants, and the executor's own."""
    runs = {}
    for keeps in (False, True):
        config = configured(total_steps=24, protocol={"keep_overlap": keeps, "codec_up": codec})
        found = Run(small_task_for(config, batch_norm_mlp)).go()
        runs[keeps] = found.cluster.syncer.fates()
        assert any(adopt.keeps for adopt in found.effects(Adopt)) == keeps
    assert runs[False].discarded["overlap"] > 0
    assert "overlap" not in runs[True].discarded
    assert runs[True].merged > runs[False].merged
