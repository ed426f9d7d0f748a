"""Where a virtual run's tensors lie, and who steps as a fleet there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from atoll.chaos import ChaosPlan, Kill, Scavenge
from atoll.cli.app import app
from atoll.codecs import Packet, codec
from atoll.config import Config, load
from atoll.errors import UserError
from atoll.executor import virtual_run as where
from atoll.executor.compute import PLAIN, ComputeMode
from atoll.executor.late import LateContent
from atoll.executor.learner import TensorLearner
from atoll.executor.virtual_run import (
    HostedLearner,
    TensorExecutor,
    checked_device,
    evaluated_on,
    executor_on,
    is_fleet,
    refuse_too_many,
)
from atoll.protocol.interface import Payload
from atoll.sim.cluster import VirtualCluster
from atoll.sim.run import learners_expected
from atoll.tasks.registry import task_for

CPU = torch.device("cpu")


def small(preset: str = "decoupled", *assignments: str) -> Config:
    data = {"seq_len": 16, "batch_size": 4, "max_bytes": 100_000, "heldout_batches": 2}
    top = {"learners": 3, "total_steps": 24, "data": data}
    return load(preset_name=preset, overrides=top, assignments=assignments)


@pytest.mark.parametrize(
    ("preset", "assignments", "fleet"),
    [
        ("decoupled", [], True),
        ("diloco", ["inner.optimizer=Muon"], True),
        ("ddp", [], False),
        ("decoupled", ["inner.optimizer=SGD"], False),
        ("decoupled", ["model.numbers={experts = 4}"], False),
        ("decoupled", ["model.numbers={experts = 0}"], True),
        ("decoupled", ["model.checkpoint_activations=true"], False),
        ("decoupled", ["model.name=lenet5", "data.corpus=digits", "data.max_bytes=0"], False),
    ],
)
def test_dense_decoders_with_a_stacked_optimiser_step_as_a_fleet(preset: str, assignments: list[str], fleet: bool) -> None:
    assert is_fleet(small(preset, *assignments)) is fleet


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_another_device_holds_everything_and_its_fleet_has_room_for_all(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No device here but the host: what would be built there is written down."""
    built: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(where, "FleetExecutor", lambda task, device, **kw: built.append(("fleet", kw | {"device": device})))
    monkeypatch.setattr(where, "TensorExecutor", lambda task, **kw: built.append(("one by one", kw)))
    monkeypatch.setattr(where, "resolved", lambda *_: ComputeMode("bf16", compiled=True))
    config, there = small("decoupled", f"inner.optimizer={optimizer}"), torch.device("cuda:1")
    task = task_for(config)
    executor_on(task, there, learners_expected(config, ChaosPlan((Scavenge(1.0, 4, 9.0), Kill(2.0, 1, 3.0)))))
    executor_on(task, CPU, 3)
    fleet = {"device": there, "learners": 5, "compute": ComputeMode("bf16", compiled=True)}
    there_is = {"AdamW": ("fleet", fleet), "SGD": ("one by one", {"device": there})}
    assert built == [there_is[optimizer], ("one by one", {})]


@pytest.mark.parametrize(
    ("preset", "keys"),
    [
        ("decoupled", {"local_steps_per_round": 6, "fragments": 6, "error_feedback": "true"}),
        ("async_diloco", {"local_steps_per_round": 6, "overlap": 6}),
        ("eager", {"local_steps_per_round": 6, "overlap": 6}),
        ("ddp", {}),
    ],
)
def test_resident_learners_take_the_same_course_to_the_same_bits(preset: str, keys: dict[str, object]) -> None:
    """Kills included, so that states travel between peers; data-parallel would wait for the dead."""
    numbers = "model.numbers={width = 16, layers = 2, heads = 2, mlp = 32}"
    config = small(preset, numbers, *(f"protocol.{key}={value}" for key, value in keys.items()))
    task = task_for(config)
    plan = ChaosPlan(()) if preset == "ddp" else ChaosPlan((Kill(5.0, 1, 4.0), Kill(12.0, 0, 3.0)))
    found = set()
    for executor in (TensorExecutor(task), TensorExecutor(task, device=CPU)):
        VirtualCluster(config, plan=plan, executor_for=executor).run(until_seconds=10_000)
        found.add(executor.disk.theta_sha256())
    assert len(found) == 1


def test_more_learners_than_fit_are_refused_with_what_each_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    task, there = task_for(small("decoupled")), torch.device("cuda", 1)
    each = 16 * sum(fragment.numel for fragment in task.layout.fragments)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * each, 9 * each))
    refuse_too_many(task, there, 4)
    refuse_too_many(task, CPU, 400)
    with pytest.raises(UserError, match=r"^--device cuda:1: 5 learners do not fit: .* at most 4 fit$"):
        refuse_too_many(task, there, 5)


def test_held_out_set_is_measured_where_the_tensors_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    images = ("model.name=lenet5", "data.corpus=digits", "data.max_bytes=0")
    task = task_for(small("decoupled", *images, "protocol.fragments=2"))
    assert evaluated_on(task, CPU) is task
    moved: list[Any] = []
    monkeypatch.setattr(torch.nn.Module, "to", lambda model, device: moved.append(device) or model)
    monkeypatch.setattr(where, "resolved", lambda *_: PLAIN)
    there = evaluated_on(task, torch.device("cuda"))
    model = task.build()
    assert there.accuracy is not None and task.accuracy is not None
    moved.clear()
    assert (there.evaluate(model), there.accuracy(model)) == (task.evaluate(model), task.accuracy(model))
    assert moved == [torch.device("cuda")] * 2


def test_device_that_is_not_there_is_refused_with_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--device rubbish: cannot be used here"):
        checked_device("rubbish")
    with pytest.raises(UserError, match="--device meta: cannot be used here"):
        checked_device("meta")  # tensors may be made there, but hold no numbers
    with pytest.raises(UserError, match="--device privateuseone: cannot be used here"):
        checked_device("privateuseone")  # torch looks for a module of that name
    with pytest.raises(UserError) as said:
        checked_device("xla")  # known to torch and in none of its wheels: it lists what is
    assert str(said.value) == f"--device xla: cannot be used here; available: {', '.join(where.devices_here())}"
    words = ["train", "--virtual", "--device", "rubbish", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code != 0 and not (tmp_path / "run").exists()


class OnDevice(LateContent):
    """A packet that a device has encoded, in memory that it will use again."""

    def __init__(self, found: tuple[Packet, torch.Tensor] | None) -> None:
        self.found = found

    def resolve(self) -> tuple[Packet, torch.Tensor] | None:
        return self.found


@pytest.mark.parametrize("name", ["int4", "fp32"])
def test_learner_beside_a_syncer_on_the_host_sends_a_packet_of_its_own_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = (codec(name).encode(torch.arange(8.0)), torch.ones(2))
    monkeypatch.setattr(TensorLearner, "payload_for", lambda self, send: Payload("packet", 7, OnDevice(staged)))
    learner: Any = HostedLearner(task_for(small()), 0)
    payload = learner.payload_for(None)
    packet, buffers = payload.content
    staged[0].codes.zero_()
    staged[1].zero_()
    assert payload.nbytes == 7 and torch.equal(buffers, torch.ones(2))
    assert torch.equal(codec(name).decode(packet), codec(name).decode(codec(name).encode(torch.arange(8.0))))
    assert (packet.scales is None) == (name == "fp32")


def test_learner_beside_a_syncer_on_the_host_sends_nothing_where_nan_was_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorLearner, "payload_for", lambda self, send: Payload("packet", 7, OnDevice(None)))
    learner: Any = HostedLearner(task_for(small()), 0)
    payload = learner.payload_for(None)
    assert (payload.kind, payload.nbytes, payload.content) == ("packet", 0, None)
