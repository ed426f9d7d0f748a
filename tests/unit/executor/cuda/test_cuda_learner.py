"""A learner on a GPU. What needs no device is tested everywhere; the rest exists only where there is one (an H200, by hand)."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from small_runs import Run, _Tapped, batch_norm_mlp, configured, draw, finite, small_task_for
from torch import Tensor, nn

from atoll.codecs import Packet, codec
from atoll.errors import ConfigError, NotFinite
from atoll.executor.cuda.learner import StagedSend, cuda_device_of
from atoll.executor.cuda.losses import LateLosses
from atoll.executor.cuda.staging import PinnedPool, StagedPacket
from atoll.executor.cuda.transfer import on_host, to_device
from atoll.executor.learner import TensorLearner
from atoll.executor.virtual_run import TensorExecutor
from atoll.ids import SYNCER, Incarnation, WorkerId
from atoll.protocol.interface import Executor, Payload
from atoll.protocol.reasons import DUE, Reason, Why
from atoll.protocol.vocabulary import (
    NO_VERSION,
    Adopt,
    Contribution,
    Envelope,
    InnerStep,
    Keep,
    LoadState,
    LoadTheta,
    Poisoned,
    Recovered,
    Send,
    Stage,
    StateTransfer,
    StepDone,
    Unstage,
)  # fmt: skip
from atoll.runtime import payload as wire
from atoll.runtime.learner.sender import Sender
from atoll.store.versions import MemoryVersions
from atoll.tasks.task import initial_versions
from atoll.tensors.access import read_params

CODECS = ["fp32", "bf16", "int8", "int4", "int2", "int1", "e3m0", "top_k:0.1"]
SOON = 5.0


class Event:
    """A CUDA event, as far as packets see one."""

    def __init__(self, done: bool = True) -> None:
        self.done = done

    def synchronize(self) -> None:
        self.done = True

    def query(self) -> bool:
        return self.done


def payload_of(payload: Payload) -> bytes | None:
    views = wire.to_buffers(payload)
    return None if views is None else b"".join(views)


def former_payload(packet: Packet, buffers: Tensor) -> bytes:
    """As the wire says it: one after the other, the packet by its own `to_bytes`."""
    data = packet.to_bytes()
    return b"".join((b"\x01", len(data).to_bytes(8, "little"), data, buffers.numpy().tobytes()))


# ---------------------------------------------------------------- bytes on the wire


@pytest.mark.parametrize("numel", [0, 1, 130, 5000])
@pytest.mark.parametrize("name", CODECS)
def test_payload_made_of_views_has_the_bytes_of_the_packet(name: str, numel: int) -> None:
    packet = codec(name).encode(torch.randn(numel, generator=torch.Generator().manual_seed(numel)))
    for buffers in (torch.empty(0), torch.arange(3.0)):
        assert payload_of(Payload("packet", 0, (packet, buffers))) == former_payload(packet, buffers)


def in_pinned_memory(pool: PinnedPool, values: Tensor, buffers: Tensor) -> StagedPacket:
    """As the stager leaves it, in memory of a pool."""
    memory, done = pool.take(8192), Event()
    codes = memory[: 4 * values.numel()].view(torch.float32)
    flat = memory[4096 : 4096 + 4 * buffers.numel()].view(torch.float32)
    codes.copy_(values), flat.copy_(buffers)
    packet = Packet("fp32", values.numel(), codes, None)
    return StagedPacket(packet.nbytes, done, lambda: (packet, flat, None), lambda: pool.give(memory, done))


def test_memory_of_a_sent_packet_goes_back_when_its_last_reader_is_gone() -> None:
    pool = PinnedPool(lambda size: torch.empty(size, dtype=torch.uint8))
    values, buffers = torch.arange(50.0), torch.ones(2)
    staged = in_pinned_memory(pool, values, buffers)
    payload = Payload("packet", staged.nbytes, StagedSend(staged))
    assert wire.waits_for_device(payload)
    assert not wire.waits_for_device(None)
    assert not wire.waits_for_device(Payload("packet", 0, None))
    views = wire.to_buffers(payload)
    staged.release()  # replaced at the next boundary
    assert views is not None
    read_later = [memoryview(view).cast("B")[:] for view in views]
    del payload, views
    other = in_pinned_memory(pool, torch.zeros(50), torch.zeros(2))
    assert pool.allocations == 2, "the memory is still being read"
    assert b"".join(read_later) == former_payload(codec("fp32").encode(values), buffers)
    read_later.clear()
    in_pinned_memory(pool, torch.zeros(50), torch.zeros(2))
    assert pool.allocations == 2, "nobody reads it any more"
    other.release()


def test_send_that_nobody_makes_gives_its_memory_back() -> None:
    pool = PinnedPool(lambda size: torch.empty(size, dtype=torch.uint8))
    staged = in_pinned_memory(pool, torch.ones(3), torch.empty(0))
    send = StagedSend(staged)
    staged.release()
    del send
    in_pinned_memory(pool, torch.ones(3), torch.empty(0))
    assert pool.allocations == 1


def test_poisoned_packet_has_no_payload_and_says_where_without_waiting() -> None:
    def check() -> None:
        raise NotFinite("tensor w")

    def finish() -> tuple[Packet, Tensor, Tensor | None]:
        raise NotFinite("tensor w")

    ready = Event(done=False)
    staged = StagedPacket(12, ready, finish, lambda: None, check)
    assert staged.poison() == "" and not ready.done
    assert wire.to_buffers(Payload("packet", 12, StagedSend(staged))) == []
    assert staged.poison() == "tensor w"


# ---------------------------------------------------------------- the order of sends


class Gate:
    """A send whose bytes are not there yet."""

    def __init__(self, said: list[str], name: str) -> None:
        self.open = threading.Event()
        self._said, self._name = said, name

    def __call__(self) -> None:
        assert self.open.wait(SOON)
        self._said.append(self._name)


def test_sends_behind_one_that_waits_for_the_device_keep_their_order_by_lane() -> None:
    said: list[str] = []
    sender = Sender(lambda error: said.append(str(error)))

    def say(word: str, *, control: bool = True, overtakes: bool = False) -> None:
        sender.put(lambda: said.append(word), waits_for_device=False, control=control, overtakes=overtakes)

    say("before")
    assert said == ["before"], "what needs no wait is sent at once, by the caller"
    first, second = Gate(said, "first packet"), Gate(said, "second packet")
    sender.put(first, waits_for_device=True, control=False, overtakes=False)
    sender.put(second, waits_for_device=True, control=False, overtakes=False)
    say("report", overtakes=True)
    assert said == ["before", "report"]
    say("hello")
    say("report behind a hello", overtakes=True)
    say("state", control=False)
    assert said == ["before", "report"]
    second.open.set()
    first.open.set()
    sender.drain()
    assert said == ["before", "report", "first packet", "second packet", "hello", "report behind a hello", "state"]
    say("after")
    assert said[-1] == "after"


def test_send_that_fails_is_told_and_the_rest_goes_on() -> None:
    said: list[str] = []
    sender = Sender(lambda error: said.append(f"failed: {error}"))

    def fails() -> None:
        raise RuntimeError("the device is gone")

    sender.put(fails, waits_for_device=True, control=False, overtakes=False)
    sender.drain()
    sender.put(lambda: said.append("next"), waits_for_device=False, control=True, overtakes=False)
    assert said == ["failed: the device is gone", "next"]


# ---------------------------------------------------------------- values


def test_model_on_no_gpu_has_no_cuda_device_and_one_in_two_places_is_refused() -> None:
    assert cuda_device_of({"a": torch.ones(1)}) is None

    class There:
        device = torch.device("cuda", 0)

    mixed: Any = {"a": torch.ones(1), "b": There()}
    with pytest.raises(ConfigError, match="cpu, cuda:0"):
        cuda_device_of(mixed)


def test_batches_of_any_shape_are_moved_and_what_is_no_tensor_stays() -> None:
    x = torch.ones(2)
    moved = to_device({"x": x, "pair": (x, [x, "label"])}, torch.device("meta"))
    assert moved["x"].is_meta and moved["pair"][0].is_meta and moved["pair"][1][0].is_meta and moved["pair"][1][1] == "label"


def test_state_on_the_host_is_a_copy() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = on_host(optimizer.state_dict())
    assert state["param_groups"] == optimizer.state_dict()["param_groups"]
    average = optimizer.state[model.weight]["exp_avg"]
    assert torch.equal(state["state"][0]["exp_avg"], average) and state["state"][0]["exp_avg"] is not average


# ---------------------------------------------------------------- on a device

if torch.cuda.is_available():
    CUDA = torch.device("cuda", 0)
    TWO = {"fragmentation": "tensor", "fragments": 2}
    PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
        "ddp": ("ddp", {}),
        "diloco": ("diloco", {}),
        "async_diloco": ("async_diloco", {"overlap": 4}),
        "streaming": ("streaming", TWO),
        "decoupled": ("decoupled", {}),
        "decoupled with alpha": ("decoupled", {"alpha": 0.5, "quorum": 3}),
        "decoupled that keeps": ("decoupled", {"keep_overlap": True, "quorum": 3}),
        "error feedback": ("diloco", {"codec_up": "int4", "error_feedback": True}),
        "error feedback on the host": ("diloco", {"codec_up": "top_k:0.2", "error_feedback": True}),
        "stochastic rounding": ("diloco", {"codec_up": "int4", "stochastic_rounding": True}),
    }

    @pytest.fixture(autouse=True)
    def exact_sums() -> Iterator[None]:
        torch.backends.cuda.matmul.allow_tf32 = False
        yield

    class NoWaiting:
        """No step inside may make the host wait for the device, but for the loss's own event."""

        def __enter__(self) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *_: object) -> None:
            torch.cuda.set_sync_debug_mode("default")

    def alone(preset: str = "decoupled", build: Any = None, own: bool = False, **sections: Any) -> TensorLearner:
        """A learner by itself on the device, holding version 0 of everything."""
        task = small_task_for(configured(preset, **sections), *([build] if build else []))
        if own:
            model = task.build().to(CUDA)
            learner = TensorLearner(task, 0, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        else:
            learner = TensorLearner(task, 0, device=torch.device("cuda"))
        for p, version in enumerate(MemoryVersions(initial_versions(task)).newest()):
            learner.execute(Keep(p, 0, NO_VERSION), Payload("fragment", 0, (version.announced.clone(), version.buffers.clone())))
            learner.execute(Adopt(p, 0, 0.0, False, DUE), None)
        return learner

    def contribution(learner: TensorLearner, fragment: int = 0) -> Payload:
        body = Contribution(4, fragment, 1, 0, 1, 1, 1, 1)
        payload = learner.payload_for(Send(Envelope(0, 0, SYNCER, 0, (0, 0), body)))
        assert payload is not None
        return payload

    def host_tensors(learner: TensorLearner) -> dict[str, Tensor]:
        return {name: t.detach().cpu() for name, t in learner._tensors.items()}

    def settled(payload: Payload | None) -> Payload | None:
        """For drivers that send at once."""
        if payload is None or not isinstance(payload.content, StagedSend):
            return payload
        found = payload.content.resolve()
        if found is None:
            return Payload("packet", 0, None)
        packet, buffers = found
        scales = None if packet.scales is None else packet.scales.clone()
        copied = Packet(packet.codec, packet.numel, packet.codes.clone(), scales)
        return Payload("packet", payload.nbytes, (copied, buffers.clone()))

    class OnDevice(TensorExecutor):
        def __call__(self, worker: WorkerId, incarnation: Incarnation) -> Executor:
            if worker == SYNCER:
                return super().__call__(worker, incarnation)
            self.learners[worker] = TensorLearner(self.task, worker, self.snapshots, device=CUDA)
            return Settling(self.learners[worker])

    class Settling:
        def __init__(self, inner: TensorLearner) -> None:
            self._inner = inner
            self.execute, self.inspect = inner.execute, inner.inspect

        def payload_for(self, send: Send) -> Payload | None:
            return settled(self._inner.payload_for(send))

    class DeviceRun(Run):
        def _tapped(self, worker: WorkerId, incarnation: Incarnation) -> Executor:
            if not isinstance(self.executor, OnDevice):
                self.executor = OnDevice(self.executor.task, self.executor.disk, self.executor.snapshots)
            return _Tapped(self, worker, self.executor(worker, incarnation))

    def both(preset: str, protocol: dict[str, Any], **task: Any) -> tuple[Run, Run]:
        config = configured(preset, protocol=protocol, total_steps=16)
        return Run(small_task_for(config, **task)).go(), DeviceRun(small_task_for(config, **task)).go()

    @pytest.mark.parametrize("build", [None, batch_norm_mlp], ids=["mlp", "batch norm"])
    @pytest.mark.parametrize("which", PRESETS)
    def test_run_on_the_device_is_the_run_on_the_host_up_to_rounding(which: str, build: Any) -> None:
        here, there = both(*PRESETS[which], **({"build": build} if build else {}))
        assert there.cluster.syncer.outer_step == 16 and not there.events(Poisoned)
        assert {e.reason for e in there.effects(Recovered)} == {Reason(Why.JOINS)}
        assert [e.body.fragment for e, _ in here.packets] == [e.body.fragment for e, _ in there.packets]
        lossy = "decoupled" in which or which in ("streaming", "stochastic rounding") or "feedback" in which
        for name, value in here.theta().items():
            if build is not None and name in ("first.bias", "norm.running_mean"):
                continue  # before a batch norm a bias's gradient is nothing but rounding, and Adam makes steps of that
            assert torch.allclose(there.theta()[name], value, rtol=1e-2 if lossy else 1e-3, atol=2e-2 if lossy else 1e-4), name
        losses = [[e.loss for e in run.events(StepDone, 0)] for run in (here, there)]
        assert losses[0] == pytest.approx(losses[1], rel=0.05, abs=0.02)

    def poisoned(*streams: int) -> Callable[[int, int, int], Any]:
        def batch(learner: int, stream: int, position: int) -> Any:
            x, y = draw(learner, stream, position)
            return (x, y) if stream not in streams or position != 5 else (x * math.nan, y)

        return batch

    @pytest.mark.parametrize("which", ["ddp", "diloco", "streaming", "decoupled"])
    def test_run_with_nan_on_one_learner_goes_on_and_sends_nothing_poisoned(which: str) -> None:
        preset, protocol = PRESETS[which]
        found = DeviceRun(small_task_for(configured(preset, protocol=protocol, total_steps=24), batch=poisoned(1))).go()
        for _, payload in found.packets:
            packet = None if payload.content is None else payload.content[0]
            assert packet is None or bool(torch.isfinite(codec(packet.codec).decode(packet)).all())
        assert finite(found.theta()) and found.cluster.syncer.outer_step == 24
        assert all(finite(learner.model.state_dict()) for learner in found.executor.learners.values())

    @pytest.mark.parametrize("name", CODECS)
    def test_staged_bytes_are_those_of_the_host_and_buffers_travel(name: str) -> None:
        learner = alone(build=batch_norm_mlp, protocol={"codec_up": name})
        for at in range(3):
            learner.execute(InnerStep(at + 1, 0, at, 0), None)
            learner.execute(Stage(0, at + 1, NO_VERSION, False), None)
            anchor = learner.anchors[0]
            assert anchor is not None and anchor.is_pinned()
            tensors, fragment = host_tensors(learner), learner._fragments[0]
            expected = codec(name).encode(anchor - read_params(tensors, fragment))
            flat = [tensors[s.name].reshape(-1).float() for s in fragment.buffers]
            data = payload_of(contribution(learner))
            assert data == former_payload(expected, torch.cat(flat) if flat else torch.empty(0))

    @pytest.mark.parametrize("own", [False, True])
    def test_copy_staged_before_a_step_holds_the_weights_before_it_when_read_late(own: bool) -> None:
        learner = alone(own=own, protocol={"codec_up": "fp32"})
        learner.execute(InnerStep(1, 0, 0, 0), None)
        anchor = learner.anchors[0]
        assert anchor is not None and learner._cuda is not None
        expected = codec("fp32").encode(anchor - read_params(host_tensors(learner), learner._fragments[0])).to_bytes()
        with torch.cuda.stream(learner._cuda.stager._reads):
            torch.cuda._sleep(200_000_000)
        learner.execute(Stage(0, 1, NO_VERSION, False), None)
        payload = contribution(learner)
        for at in range(1, 4):
            learner.execute(InnerStep(at + 1, 0, at, 0), None)
        learner.execute(Unstage(0, NO_VERSION), None)
        data = payload_of(payload)
        assert data is not None and data[9:] == expected

    def test_nothing_at_a_boundary_makes_the_host_wait() -> None:
        learner = alone(build=batch_norm_mlp, protocol={"alpha": 0.25})
        pairs = zip(learner.anchors, learner._fragments, strict=True)
        announced = [(a.clone(), torch.ones(f.buffer_numel)) for a, f in pairs if a is not None]

        def round_of(at: int) -> list[Payload]:
            done = learner.execute(InnerStep(at + 1, 0, at, 0), None)
            assert isinstance(done[0], StepDone) and done[0].loss is not None and math.isfinite(done[0].loss)
            for p in range(len(announced)):
                learner.execute(Keep(p, at + 1, NO_VERSION), Payload("fragment", 0, announced[p]))
                learner.execute(Adopt(p, at + 1, 0.25, True, Reason(Why.DUE)), None)
                learner.execute(Stage(p, at + 1, NO_VERSION, False), None)
            return [contribution(learner, p) for p in range(len(announced))]

        for at in range(6):
            for payload in round_of(at):
                assert payload_of(payload) is not None
        for at in range(6, 10):
            with NoWaiting():
                payloads = round_of(at)
            for payload in payloads:
                assert payload_of(payload) is not None

    def test_work_that_is_kept_is_added_on_the_device_and_the_host_waits_for_nothing() -> None:
        learner = alone(protocol={"keep_overlap": True, "codec_up": "fp32"})
        anchor = learner.anchors[0]
        assert anchor is not None
        for at in range(8):
            with NoWaiting() if at > 5 else nullcontext():
                learner.execute(InnerStep(at + 1, 0, at, 0), None)
                learner.execute(Stage(0, at + 1, NO_VERSION, False), None)
                payload = contribution(learner)  # for outer step 4
            taken = read_params(host_tensors(learner), learner._fragments[0])
            assert payload_of(payload) is not None
            announced = anchor.clone() + 1.0
            learner.execute(Keep(0, 4, NO_VERSION), Payload("fragment", 0, (announced, torch.empty(0))))
            with NoWaiting() if at > 5 else nullcontext():
                learner.execute(InnerStep(at + 2, 0, at + 100, 0), None)
            moved = read_params(host_tensors(learner), learner._fragments[0]) - taken
            assert float(moved.abs().max()) > 0
            with NoWaiting() if at > 5 else nullcontext():
                learner.execute(Adopt(0, 4, 0.0, True, DUE, keeps=True), None)
            found = read_params(host_tensors(learner), learner._fragments[0])
            torch.testing.assert_close(found, announced + moved)
            assert learner.anchors[0] is not None and torch.equal(learner.anchors[0], announced)

    def test_nan_is_named_at_the_next_boundary_and_is_never_sent() -> None:
        learner = alone()
        learner.execute(InnerStep(1, 0, 0, 0), None)
        assert learner.execute(Stage(0, 1, NO_VERSION, False), None) == ()
        name = learner._fragments[0].params[0].name
        with torch.no_grad():
            learner._tensors[name].view(-1)[0] = math.nan
        assert learner.execute(Stage(0, 2, NO_VERSION, False), None) == ()
        assert payload_of(contribution(learner)) == b"", "the send finds it"
        payload = contribution(learner)
        assert (payload.nbytes, payload.content) == (0, None), "and from then on it is known"
        (event,) = learner.execute(Stage(1, 2, NO_VERSION, False), None)
        assert isinstance(event, Poisoned) and name in event.where
        torch.cuda.synchronize()
        learner.execute(LoadTheta(DUE), None)
        assert learner.execute(Stage(1, 3, NO_VERSION, False), None) == (), "it is said once"

    @pytest.mark.parametrize("preset", ["decoupled", "async_diloco"])
    def test_state_goes_to_the_host_and_comes_back_onto_the_device(preset: str) -> None:
        protocol = {"overlap": 4} if preset == "async_diloco" else {}
        giver, taker = (alone(preset, batch_norm_mlp, protocol=protocol) for _ in range(2))
        for at in range(3):
            giver.execute(InnerStep(at + 1, 0, at, 0), None)
        giver.execute(Stage(0, 3, NO_VERSION, preset == "async_diloco"), None)
        state = giver.state(with_residuals=True)
        flat: list[Tensor] = [*state["tensors"].values(), *(t for s in state["optimizer"]["state"].values() for t in s.values())]
        assert all(not t.is_cuda for t in [*flat, *(t for t in state["round_start"] + state["anchors"] if t is not None)])
        data = b"".join(wire.to_buffers(Payload("state", 0, giver.state())) or ())
        host = TensorLearner(giver._task, 0)
        for learner in (taker, host):
            learner.execute(LoadState(1, (0,)), wire.from_buffer(StateTransfer(1, 0, (0,), ()), memoryview(data)))
            assert all(torch.equal(t.cpu(), state["tensors"][name]) for name, t in learner._tensors.items())
        assert all(t.device == CUDA for t in taker._tensors.values()) and all(a is None or a.is_pinned() for a in taker.anchors)
        for learner in (giver, taker):
            learner.execute(InnerStep(4, 0, 3, 0), None)
            learner.execute(Stage(0, 4, NO_VERSION, False), None)
        assert payload_of(contribution(giver)) == payload_of(contribution(taker))

    def test_memory_in_steady_state_is_not_allocated_anew() -> None:
        learner = alone()
        assert learner._cuda is not None
        for at in range(40):
            learner.execute(InnerStep(at + 1, 0, at, 0), None)
            for p in (0, 1):
                learner.execute(Stage(p, at + 1, NO_VERSION, False), None)
            payload_of(contribution(learner, at % 2))
            if at == 10:
                warm = learner._cuda.stager.pool.allocations
        assert learner._cuda.stager.pool.allocations == warm

    def test_losses_are_told_one_call_late_and_those_of_the_host_with_them() -> None:
        late, found = LateLosses(), []
        for value in (1.0, 2.0, 3.0):
            loss = torch.tensor(value, device="cuda", requires_grad=True)
            found.append([float(each) for each in late.following([loss * 2, value])])
        assert found == [[], [2.0, 1.0], [4.0, 2.0]]
