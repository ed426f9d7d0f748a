"""`atoll.join`: loops of anybody's own as learners, against a real syncer on loopback.

Syncer and loops run in threads of this process, over real connections: what is asked here is about a loop, not about
processes. Those are in test_examples.py.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_syncer import PATIENCE_SECONDS, UNHURRIED, Syncer, custom, cut, model_of, syncers, train
from torch import Tensor, nn

import atoll
from atoll.config import Config, load
from atoll.errors import ConfigError, DataError, RunFailed, UserError
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import FixParticipants, Goodbye, Received, Recovered, StepDone
from atoll.runtime.join.upload import OwnWeights
from atoll.runtime.syncer import directory as home_module
from atoll.runtime.syncer.directory import SyncerDirectory
from atoll.store.model_upload import pack_model, unpack_model
from atoll.store.tensor_files import StorageFailed
from atoll.tape.format import Tape
from atoll.tensors.access import named_tensors
from atoll.tensors.inventory import frozen_digest, with_frozen
from atoll.tensors.layout import fingerprint_of


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Config], Syncer]]:
    with syncers(tmp_path) as make:
        yield make
    ours = [t.name for t in threading.enumerate() if t.name.startswith(("network", "snapshot", "Thread-"))]
    assert not [name for name in ours if "_poll_wrapper" not in name], "threads were left (gRPC's own stays with the process)"


def steps_taped(directory: Path) -> list[StepDone]:
    return [r.event for r in Tape(directory / "0.tape").records() if isinstance(r.event, StepDone)]


# ---------------------------------------------------------------- what changes in a loop, and when


def test_weights_and_buffers_are_everybodys_after_a_merge_and_ones_own_between(start: Callable[[Config], Syncer]) -> None:
    """diloco with H = 2 waits for everybody, inside step(): after every second step all learners hold the same."""
    syncer = start(custom("diloco", total_steps=6, limits=UNHURRIED))
    both = threading.Barrier(2)

    def loop(seed: int) -> list[dict[str, Tensor]]:
        model = model_of(seed=seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        seen = []
        with syncer.join(model, optimizer, wants=seed) as learner:
            both.wait(PATIENCE_SECONDS)
            while not learner.over:
                train(learner, model, optimizer, seed)
                seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return seen

    with ThreadPoolExecutor(2) as pool:
        ours, theirs = pool.map(loop, range(2))
    syncer.end()
    merges = [e.participants for r in syncer.tape() for e in r.effects if isinstance(e, FixParticipants) if e.fragments]
    assert merges == [(0, 1)] * 3
    for at in (1, 3):
        assert ours[at].keys() == theirs[at].keys()
        assert all(torch.equal(ours[at][name], theirs[at][name]) for name in ours[at]), f"after step {at + 1}"
    for at in (0, 2):
        assert not torch.equal(ours[at]["1.running_mean"], theirs[at]["1.running_mean"]), "their data are not alike"
    assert not torch.equal(ours[1]["1.running_mean"], ours[0]["1.running_mean"])
    assert (syncer.directory / "theta.safetensors").exists()


def test_joining_loads_theta_before_the_first_step_over_the_second_learners_weights(
    start: Callable[[Config], Syncer],
) -> None:
    syncer = start(custom("diloco", learners=1))
    first, second = model_of(seed=1), model_of(seed=2)
    given = [parameter.detach().clone() for parameter in first.parameters()]
    with syncer.join(first, torch.optim.AdamW(first.parameters())) as one:
        assert not one.over and one.outer_step == 0 and one.progress == 0.0
        assert all(torch.equal(a, b) for a, b in zip(given, first.parameters(), strict=True))
        with syncer.join(second, torch.optim.AdamW(second.parameters())) as two:
            assert two.id != one.id
            assert all(torch.equal(a, b) for a, b in zip(given, second.parameters(), strict=True))
    assert one.over and two.over


def test_step_that_a_scaler_skips_does_not_count_and_its_batch_is_tried_again(
    start: Callable[[Config], Syncer], tmp_path: Path
) -> None:
    """A plain optimiser is not called at all by the scaler; a fused one is called, and skips by itself."""
    for fused in (False, True):
        syncer = start(custom("diloco", learners=1, total_steps=4, limits=UNHURRIED))
        model = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        data = torch.randn(64, 3)
        batches, counted = [], []
        with syncer.join(model, optimizer, out=tmp_path / str(fused)) as learner:
            for at, batch in enumerate(learner.shard(data)):
                batches.append(batch)
                loss = model(batch).square().mean() * (float("inf") if at == 1 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                counted.append(learner.step(tokens=batch.numel(), loss=loss))
        syncer.end()
        assert counted == [True, False, True, True, True]
        assert torch.equal(batches[1], batches[2]) and not torch.equal(batches[0], batches[1])
        steps = steps_taped(tmp_path / str(fused))
        assert [(s.tokens, s.samples) for s in steps] == [(12, 4)] * 4
        assert all(s.loss is not None for s in steps), "the loss of the skipped step is not of the next one"


def test_accumulated_batches_make_one_step_and_an_attached_optimiser_reports_itself(
    start: Callable[[Config], Syncer], tmp_path: Path
) -> None:
    syncer = start(custom("diloco", learners=1, total_steps=4, inner={"accumulate": 3}, limits=UNHURRIED))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.arange(96.0).repeat_interleave(3).view(96, 3) / 96
    seen: list[float] = []
    with syncer.join(model, optimizer, out=tmp_path / "l") as learner:
        learner.attach()
        for at, batch in enumerate(learner.shard(data, batch_size=2), 1):
            seen += batch[:, 0].tolist()
            loss = model(batch).square().mean()
            (loss / 3).backward()
            learner.count(tokens=batch.numel(), loss=float(at))
            if at % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
        with pytest.raises(UserError, match="attached"):
            learner.step()
    syncer.end()
    assert len(seen) == 4 * 3 * 2 and len(set(seen)) == len(seen), "no sample twice"
    assert [(s.tokens, s.samples, s.loss) for s in steps_taped(tmp_path / "l")] == [(18, 6, 3.0 * k - 1) for k in range(1, 5)]


def test_mistakes_of_a_loop_are_told_apart(start: Callable[[Config], Syncer]) -> None:
    syncer = start(custom("diloco", learners=1))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(16, 3)
    with syncer.join(model, optimizer) as learner:
        with pytest.raises(UserError, match=r"before learner\.step.*inner\.accumulate"):
            for batch in learner.shard(data):
                model(batch).sum().backward()
        with pytest.raises(DataError, match="no length"):
            learner.shard(iter(data))
        with pytest.raises(DataError, match="0 samples"):
            learner.shard([])
        with pytest.raises(UserError, match="negative"):
            learner.step(tokens=-1)
        optimizer.step()
        optimizer.step()
        with pytest.raises(UserError, match="called 2 times"):
            learner.step()
        with pytest.raises(RunFailed, match="no optimiser step completed"):
            while True:
                assert not learner.step(), "no step was taken"
        model.register_buffer("late", torch.zeros(1))
        model.weight = nn.Parameter(model.weight.detach().clone())
        optimizer.step()
        with pytest.raises(ConfigError, match="weight was replaced"):
            learner.step()


def test_parameter_unfrozen_after_join_is_refused_at_the_first_step_a_frozen_not(
    start: Callable[[Config], Syncer],
) -> None:
    """What was frozen is in no fragment: it would train here and never travel."""
    syncer = start(custom("diloco", learners=1))
    model = model_of()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with syncer.join(model, optimizer) as learner:
        assert train(learner, model, optimizer)
        model[2].bias.requires_grad_(False)
        assert train(learner, model, optimizer)
        model[0].bias.requires_grad_(True)
        with pytest.raises(ConfigError, match=r"parameter 0\.bias was frozen in atoll\.join and trains now.*before atoll\.join"):
            train(learner, model, optimizer)


# ---------------------------------------------------------------- coming and going


def test_learner_with_another_model_is_refused_and_the_first_trains_on(start: Callable[[Config], Syncer]) -> None:
    syncer = start(custom(learners=1))
    model, other = model_of(), model_of(width=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with syncer.join(model, optimizer) as learner:
        with (
            pytest.raises(ConfigError, match="not the one that this run trains"),
            syncer.join(other, torch.optim.SGD(other.parameters(), lr=0.01)),
        ):
            pass
        while not learner.over:
            train(learner, model, optimizer)
    syncer.end()
    assert syncer.home.machine.finished


def test_learner_with_another_frozen_part_is_refused_also_by_a_restarted_syncer(
    start: Callable[[Config], Syncer], tmp_path: Path
) -> None:
    """It does not travel, and heads of different backbones would be averaged without a word."""
    config = custom("diloco", learners=1)
    syncer = start(config)
    models = [model_of(seed=seed) for seed in (0, 0, 1)]
    for model in models:
        model[0].requires_grad_(False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    with syncer.join(models[0], optimizers[0]) as learner:
        assert train(learner, models[0], optimizers[0])
        with syncer.join(models[1], optimizers[1]) as second:
            assert not second.over
        with (
            pytest.raises(ConfigError, match=r"frozen part of the model here .* load the same weights"),
            syncer.join(models[2], optimizers[2]),
        ):
            pass
    said = syncer.home.layout_digest
    uploaded = (syncer.directory / "model.upload").read_bytes()
    syncer.stop()
    layout, *_ = unpack_model(config, memoryview(uploaded))
    weights = OwnWeights(named_tensors(models[0]), layout.fragments)
    assert layout.fingerprint == said == with_frozen(fingerprint_of(list(layout.fragments)), frozen_digest(models[0]))
    for digest, refused in (("", False), ("a" * 64, False), ("a" * 63, True), ("A" * 64, True)):
        told = replace(layout, fingerprint=f"{fingerprint_of(list(layout.fragments))}+{digest}")
        payload = memoryview(b"".join(map(bytes, pack_model(told, weights).pieces())))
        with pytest.raises(DataError, match="frozen part's digest") if refused else contextlib.nullcontext():
            assert unpack_model(config, payload)[0].fingerprint == told.fingerprint.rstrip("+")


def test_loop_that_raises_leaves_at_once_and_the_other_goes_on(start: Callable[[Config], Syncer]) -> None:
    syncer = start(custom(total_steps=40))
    left = threading.Event()

    def fails() -> None:
        model = model_of(seed=1)
        optimizer = torch.optim.AdamW(model.parameters())
        try:
            with syncer.join(model, optimizer, wants=1) as learner:
                train(learner, model, optimizer)
                raise ZeroDivisionError("of the user's own")
        finally:
            left.set()

    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    with ThreadPoolExecutor(1) as pool, syncer.join(model, optimizer, wants=0) as learner:
        failed = pool.submit(fails)
        while not learner.over:
            if learner.outer_step >= 20:
                assert left.wait(PATIENCE_SECONDS)
                syncer.hear_goodbyes()
            train(learner, model, optimizer)
        with pytest.raises(ZeroDivisionError):
            failed.result(PATIENCE_SECONDS)
    syncer.end()
    words = [r.event.envelope for r in syncer.tape() if isinstance(r.event, Received)]
    farewells = [(e.sender, e.body.reason.detail) for e in words if isinstance(e.body, Goodbye)]
    assert farewells == [(1, "its loop ended by ZeroDivisionError")]
    assert syncer.home.machine.finished


def test_reason_longer_than_a_message_may_carry_is_cut(start: Callable[[Config], Syncer]) -> None:
    syncer = start(custom(total_steps=1000))
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    with syncer.join(model, optimizer) as learner:
        train(learner, model, optimizer)
        learner.leave("x" * 2000, 0.0)
        while not learner.over:
            train(learner, model, optimizer)
    syncer.hear_goodbyes()
    syncer.stop()


def test_loop_that_breaks_says_goodbye_and_a_step_after_the_end_is_harmless(start: Callable[[Config], Syncer]) -> None:
    syncer = start(custom(total_steps=1000))
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    with syncer.join(model, optimizer) as learner:
        for _ in range(5):
            train(learner, model, optimizer)
    assert learner.over and not train(learner, model, optimizer)
    syncer.hear_goodbyes()
    syncer.stop()
    words = [r.event.envelope.body for r in syncer.tape() if isinstance(r.event, Received)]
    assert [w.reason for w in words if isinstance(w, Goodbye)] == [Reason(Why.LEAVES, "its loop ended")]


def test_late_learner_takes_a_peers_optimiser_state_or_theta_where_optimisers_differ(
    start: Callable[[Config], Syncer],
) -> None:
    syncer = start(custom(total_steps=10**6, learners=1, limits=UNHURRIED))
    model, alike, unlike = model_of(), model_of(seed=1), model_of(seed=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    stop = threading.Event()

    def first(started: threading.Event) -> None:
        with syncer.join(model, optimizer, wants=0) as learner:
            while not stop.is_set():
                train(learner, model, optimizer)
                if learner.outer_step > 4:
                    started.set()

    with ThreadPoolExecutor(1) as pool:
        started = threading.Event()
        running = pool.submit(first, started)
        try:
            assert started.wait(PATIENCE_SECONDS)
            adam = torch.optim.AdamW(alike.parameters(), lr=0.5)
            with syncer.join(alike, adam, wants=1):
                assert adam.state and adam.param_groups[0]["lr"] == 0.5
            sgd = torch.optim.SGD(unlike.parameters(), lr=0.5)
            with syncer.join(unlike, sgd, wants=2):
                assert not sgd.state
        finally:
            stop.set()
        running.result(PATIENCE_SECONDS)
    syncer.stop()
    recovered = [e for r in syncer.tape() for e in r.effects if isinstance(e, Recovered)]
    assert [(e.learner, e.source) for e in recovered] == [(0, -1), (1, 0), (2, -1)]


def test_syncer_killed_while_it_takes_a_model_asks_the_next_learner_again(
    tmp_path: Path, start: Callable[[Config], Syncer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its two writes: the versions are there, and whose they are is not written down."""
    config = custom(learners=1, total_steps=3)
    uploaded: list[bytes] = []
    take_model = SyncerDirectory.take_model

    def recorded(self: SyncerDirectory, received: Path) -> None:
        uploaded.append(received.read_bytes())
        take_model(self, received)

    monkeypatch.setattr(SyncerDirectory, "take_model", recorded)
    syncer = start(config)
    model = model_of()
    with syncer.join(model, torch.optim.SGD(model.parameters(), lr=0.01)):
        pass
    monkeypatch.undo()
    home = SyncerDirectory(tmp_path / "killed", config, None)

    def full(received: Path, path: Path) -> None:
        raise StorageFailed(f"{path}: no space left")

    received = tmp_path / "received"
    received.write_bytes(uploaded[0])
    monkeypatch.setattr(home_module, "publish_file", full)
    with pytest.raises(StorageFailed):
        home.take_model(received)
    home.close(complete=False)
    cut(home)
    monkeypatch.undo()
    again = SyncerDirectory(tmp_path / "killed", config, None)
    assert again.layout is None
    again.take_model(received)
    again.close(complete=False)
    cut(again)
    third = SyncerDirectory(tmp_path / "killed", config, None)
    assert third.layout is not None
    third.close(complete=False)
    cut(third)


# ---------------------------------------------------------------- refused before joining


class Callables(torch.optim.SGD):
    def __init__(self, params: Any, when: str) -> None:
        super().__init__(params, lr=0.1)
        self.when = when
        if when == "start":
            self.param_groups[0]["rule"] = lambda: None

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["rule"] = lambda: None


class FullyShardedDataParallel(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_what_cannot_be_a_learner_is_refused_before_anybody_is_dialled() -> None:
    model = model_of()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    some = torch.optim.SGD(list(model.parameters())[1:], lr=0.1)
    meta = nn.Linear(2, 2, device="meta")
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    refused: list[tuple[Any, Any, dict[str, Any], str]] = [
        (FullyShardedDataParallel(model), sgd, {}, "a FullyShardedDataParallel, which hides its parameters: .*fully_shard"),
        (model, object(), {}, "takes a torch.optim.Optimizer"),
        ("gpt2", sgd, {}, "takes a torch.nn.Module"),
        (model_of(), sgd, {}, "parameters that the model has not"),
        (model, some, {}, "parameter 0.weight requires grad and is not in the optimizer"),
        (model, Callables(model.parameters(), "start"), {}, "Callables cannot be stored or sent.*rule"),
        (meta, torch.optim.SGD(meta.parameters()), {}, "meta device"),
        (mixed, torch.optim.SGD(mixed.parameters()), {}, "on one device"),
        (model, sgd, {"syncer": "syncer.example:7077"}, "not a loopback address.*keys"),
        (model, sgd, {"syncer": "nowhere"}, "syncer"),
        (model, sgd, {"listen": "0.0.0.0:1"}, "listen 0.0.0.0:1: is not a loopback"),
        (model, sgd, {"token": None}, "no token"),
        (model, sgd, {"token": Path("/no/such/file")}, "/no/such/file"),
    ]
    for refused_model, optimizer, options, sentence in refused:
        arguments: dict[str, Any] = {"syncer": "127.0.0.1:1", "token": "t"} | options
        with pytest.raises(UserError, match=sentence):
            atoll.join(arguments.pop("syncer"), refused_model, optimizer, **arguments)


def test_one_of_several_ranks_with_a_plain_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="one of 2 ranks"):
        atoll.join("127.0.0.1:1", model, torch.optim.SGD(model.parameters()), token="t")


def test_folder_of_another_learner_is_refused_and_the_learner_in_it_trains_on(
    start: Callable[[Config], Syncer], tmp_path: Path
) -> None:
    syncer = start(custom(learners=1))
    model, other = model_of(), model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with syncer.join(model, optimizer, out=tmp_path / "l") as learner:
        with (
            pytest.raises(UserError, match="another learner"),
            syncer.join(other, torch.optim.SGD(other.parameters()), out=tmp_path / "l"),
        ):
            pass
        assert train(learner, model, optimizer)


def test_optimiser_state_that_cannot_travel_is_refused_at_the_step_that_makes_it(start: Callable[[Config], Syncer]) -> None:
    syncer = start(custom(learners=1))
    model = model_of()
    optimizer = Callables(model.parameters(), "step")
    with pytest.raises(ConfigError, match="Callables cannot be stored or sent"), syncer.join(model, optimizer) as learner:
        train(learner, model, optimizer)


def test_run_that_does_not_fit_a_loop_of_ones_own_is_refused(start: Callable[[Config], Syncer]) -> None:
    syncer = start(load(preset_name="ddp", overrides={"model": {"name": "custom"}, "learners": 1}))
    model = model_of()
    with pytest.raises(ConfigError, match="choose a preset that averages weights"), syncer.join(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    ):
        pass


def test_importing_atoll_brings_no_torch_until_join_is_asked_for() -> None:
    code = "import sys, atoll; assert 'join' in atoll.__all__ and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_SECONDS)
    with pytest.raises(AttributeError, match="no attribute 'joyn'"):
        _ = atoll.joyn
