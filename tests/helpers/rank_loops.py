"""Ranks of a learner as processes on gloo, and loops for them. What runs in a rank is a function of this file.

The processes are forked from one that has imported torch, so that a rank starts in a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import traceback
import zlib
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

import atoll
from atoll.config import Config
from atoll.executor.environment import use_threads
from atoll.executor.ranks.executor import RankExecutor
from atoll.runtime.join.built_in import BuiltInRanks, run_rank
from atoll.runtime.join.executor import task_of
from atoll.runtime.learner.address import address_of
from atoll.runtime.learner.process import WorkerOptions
from atoll.runtime.ranks.member import RankMember
from atoll.runtime.ranks.rendezvous import lead_connects, rank_connects
from atoll.tasks.task import layout_for
from atoll.tensors.access import read_params
from atoll.tensors.inventory import walk
from atoll.tensors.local import local_part
from atoll.tensors.placements import box_of

PATIENCE_SECONDS = 180.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([
    "torch", "torch._dynamo",  # which the first optimiser of a process imports: as long again as torch itself
    "torch.distributed.fsdp", "torch.distributed.tensor", "atoll.runtime.join.joining", "atoll.runtime.join.built_in",
])  # fmt: skip


class Ranks:
    """Processes of one group. Each runs `target(rank, ranks, *arguments)` and sends back what it returns."""

    def __init__(self, ranks: int, target: Callable[..., Any], *arguments: Any) -> None:
        self._folder = tempfile.mkdtemp(prefix="atoll-ranks-")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(ranks):
            here, there = _context.Pipe()
            work = (there, rank, ranks, f"{self._folder}/store", target, arguments)
            process = _context.Process(target=_work, args=work, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def kill(self, rank: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def said(self, rank: int) -> Any:
        """The next thing that a rank said: by `say`, or what its function returned or raised at the end."""
        assert self.pipes[rank].poll(PATIENCE_SECONDS), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def end(self) -> list[Any]:
        """What every rank returned; an exception as its sentence; None of one that was killed."""
        found: list[Any] = []
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            last = None
            try:
                while pipe.poll(PATIENCE_SECONDS):
                    last = pipe.recv()
            except EOFError:
                pass
            process.join(PATIENCE_SECONDS)
            assert not process.is_alive(), "a rank hangs"
            found.append(last)
        shutil.rmtree(self._folder)
        return found


_say: Callable[[Any], None] = lambda what: None  # noqa: E731


def say(what: Any) -> None:
    """To the test, from a rank."""
    _say(what)


def _work(pipe: Connection, rank: int, ranks: int, store: str, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    global _say
    _say = pipe.send
    use_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        pipe.send(target(rank, ranks, *arguments))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {error}")
    finally:
        pipe.close()
        os._exit(0)  # gloo's threads may still wait for a rank that was killed


# ---------------------------------------------------------------- models


class Odd(nn.Module):
    """Rows that no number of ranks divides, tensors with fewer rows than ranks, a tie, a frozen part and buffers."""

    def __init__(self, width: int = 37) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(3))
        self.narrow = nn.Linear(width, 2)
        self.frozen = nn.Linear(2, 5)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x) + self.frozen(self.narrow(x)).sum(dim=1, keepdim=True)


def wrapped(model: nn.Module, kind: str, ranks: int) -> nn.Module:
    """`model` for a group of ranks: in DistributedDataParallel, or sharded in place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "tp":
        tensor_parallel(model, init_device_mesh("cpu", (ranks,)))
        return model
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    elif kind == "fsdp2 and tp":
        both = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("data", "tensor"))
        tensor_parallel(model, both["tensor"])
        mesh = both["data"]
    else:
        assert kind == "fsdp2"
        mesh = init_device_mesh("cpu", (ranks,))
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(model, mesh, {"blocks.0.0": ColwiseParallel(), "blocks.1.0": RowwiseParallel()})


def prescribed(name: str, tensor: Tensor, step: int, learner: int = 0) -> Tensor:
    """A rank's part of an update that is a function of the tensor's name, the global index, the step and the learner."""
    box = box_of(name, tensor)
    index = torch.arange(tensor.numel()).view(tensor.shape)
    if box is not None:
        for axis, (start, size) in enumerate(zip(*box, strict=True)):
            index = index.narrow(axis, start, size)
    mixed = (index * 2_654_435_761 + zlib.crc32(name.encode()) + step * 40_503 + learner * 7_919) % 65_536
    return (mixed.float() - 32_768) * 2.0**-22


@torch.no_grad()
def update(model: nn.Module, step: int, learner: int = 0) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            local_part(parameter).add_(prescribed(name, parameter, step, learner))
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.add_(prescribed(name, buffer, step, learner))


def prescribed_loop(
    rank: int, ranks: int, kind: str, address: str, token: str, out: Path, steps: int | None = None, learner_id: int = 0
) -> dict[str, Any]:  # fmt: skip
    """Returns what this rank holds of the model at the end."""
    model = Odd()
    whole = model if kind == "one" else wrapped(model, kind, ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.join(address, whole, optimizer, token=token, out=out, wants=learner_id, rank_timeout_seconds=60.0) as learner:
        step = 0
        while not learner.over and step != steps:
            step += 1
            update(model, step, learner_id)
            optimizer.step()
            learner.step(tokens=12 // ranks, samples=12 // ranks, loss=float(step))
    return {name: local_part(tensor.detach()).numpy() for name, tensor in model.named_parameters()}


def each(rank: int, ranks: int, runs: list[tuple[Any, ...]]) -> list[Any]:
    """Several loops one after the other in the same processes."""
    return [prescribed_loop(rank, ranks, *run) for run in runs]


# ---------------------------------------------------------------- loops that train


class Plain(nn.Module):
    """Without statistics of a batch, which ranks would each have of their own. Even, as tensor-parallel layers must be."""

    def __init__(self, width: int = 36) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width)) for _ in range(2))
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.blocks[1](nn.functional.gelu(self.blocks[0](x))))


def gradient_loop(rank: int, ranks: int, kind: str, address: str, token: str, out: Path) -> float:
    """AdamW on the same batches of 24 tokens at any layout. Returns the loss of all tokens at the end."""
    model = Plain()
    whole = model if kind == "one" else wrapped(model, kind, ranks)
    tensor_ranks = {"tp": ranks, "fsdp2 and tp": ranks // 2}.get(kind, 1)  # those that see the same samples
    part, parts = rank // tensor_ranks, ranks // tensor_ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(whole(tokens), (3 * tokens + 1) % 11)

    with atoll.join(address, whole, optimizer, token=token, out=out, rank_timeout_seconds=60.0) as learner:
        step = 0
        while not learner.over:
            step += 1
            batch = torch.randint(11, (24,), generator=torch.Generator().manual_seed(step)).chunk(parts)[part]
            loss = loss_of(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=len(batch) if rank % tensor_ranks == 0 else 0, loss=loss)
    with torch.no_grad():
        return float(loss_of(torch.arange(11)))


def several(rank: int, ranks: int, runs: list[tuple[Any, ...]]) -> list[float]:
    return [gradient_loop(rank, ranks, *run) for run in runs]


def training_loop(
    rank: int, ranks: int, kind: str, address: str, token: str, out: Path, wants: int = -1, dies: tuple[int, int] = (-1, 0),
    until: Path | None = None, steps_max: int = -1,
) -> dict[str, Any]:  # fmt: skip
    """AdamW on real gradients. `dies`: the rank, and the step at which it is killed. `until`: it leaves when this file is there.
    `steps_max`: it leaves after so many. The losses returned are of all eleven tokens, before the first step and after the last:
    those of batches go up and down by their draw."""
    import torch.distributed as dist

    model = Odd()
    whole = wrapped(model, kind, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.arange(512) % 11

    def loss_of_all() -> float:
        with torch.no_grad():
            return float(nn.functional.cross_entropy(whole(data[:11]), (data[:11] + 1) % 11))

    losses = [loss_of_all()]
    with atoll.join(address, whole, optimizer, token=token, out=out, wants=wants, rank_timeout_seconds=30.0) as learner:
        steps = 0
        for batch in learner.shard(data, batch_size=8):
            if until is not None and rank == 0 and until.exists():
                learner.leave("the test has seen enough")
            if until is not None:
                threading.Event().wait(0.02)  # the processors are for others
            if (rank, steps) == dies:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = nn.functional.cross_entropy(whole(batch), (batch + 1) % 11)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += learner.step(tokens=len(batch), loss=loss)
            if steps < 10:  # a pipe that nobody reads fills up
                say((steps, learner.outer_step))
            if steps == steps_max:
                break
    losses.append(loss_of_all())
    parts = {name: local_part(tensor.detach()) for name, tensor in model.named_parameters() if tensor.requires_grad}
    finite = all(bool(torch.isfinite(part).all()) for part in parts.values())
    alike = [torch.zeros(1) for _ in range(ranks)]
    dist.all_gather(alike, torch.tensor([float(steps)]))
    moments = {int(entries["step"]) for entries in optimizer.state.values()}
    return {
        "steps": steps, "losses": losses, "finite": finite, "alike": [int(n) for n in alike], "moments": moments,
    }  # fmt: skip


# ---------------------------------------------------------------- the built-in learner, and ranks that are lost


def built_in_loop(
    rank: int, ranks: int, parallel: str, address: str, token: Path, out: Path, port: int, dies: dict[int, tuple[str, int]]
) -> dict[str, Any]:  # fmt: skip
    """One rank of the built-in learner. `dies`: by rank where it is killed, and at which of its steps: in the middle of its
    backward pass, before it says that it has its gradients, or when all have and it is to take the step."""
    torch.distributed.barrier()  # a group that one has left cannot be joined by one who is late
    torch.distributed.destroy_process_group()
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    steps, learners = 0, []

    def stepped(*_: Any) -> None:
        nonlocal steps
        if dies.get(rank) == ("take", steps):
            os.kill(os.getpid(), signal.SIGKILL)
        steps += 1

    def in_backward(*_: Any) -> None:
        if dies.get(rank) == ("backward", steps):
            os.kill(os.getpid(), signal.SIGKILL)

    ready, train = RankMember.ready, BuiltInRanks.train

    def is_ready(member: RankMember, done: Any) -> bool:
        if dies.get(rank) == ("ready", steps):
            os.kill(os.getpid(), signal.SIGKILL)
        return ready(member, done)

    def trains(learner: BuiltInRanks, launcher: Any) -> None:
        learners.append(learner)
        train(learner, launcher)

    RankMember.ready, BuiltInRanks.train = is_ready, trains  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(stepped)
    register_module_full_backward_hook(in_backward)
    run_rank(WorkerOptions(address_of(address, token, None, None, "", "127.0.0.1:0", "", False), out=out), parallel)
    return {"ranks": learners[0].ranks, "steps": steps}


# ---------------------------------------------------------------- states in parts


def moved_states(rank: int, ranks: int, config: Config) -> dict[str, bool]:
    """From a sharded model to whole ones and back, without a syncer. What is the same, to the last bit, afterwards."""
    import torch.distributed as dist

    def made(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Odd() if kind == "one" else wrapped(Odd(), kind, ranks)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)

    def executor(model: nn.Module, optimizer: torch.optim.Optimizer) -> RankExecutor:
        boxes = {e.name: box for e in walk(model) if (box := box_of(e.name, e.tensor)) is not None}
        world: list[Any] = [None] * ranks
        dist.all_gather_object(world, boxes)
        task = task_of(config, layout_for(config, model))
        made = RankExecutor(task, 0, rank, dict(enumerate(world)), model=model, optimizer=optimizer, device=torch.device("cpu"))
        made.anchors = [read_params(made._tensors, fragment) for fragment in made._fragments]
        return made

    def gathered(source: RankExecutor) -> list[Any]:
        parts: list[Any] = [None] * ranks
        dist.all_gather_object(parts, source.part())
        return parts

    model, optimizer = made("fsdp2")
    for step in range(3):
        nn.functional.cross_entropy(model(torch.arange(8) + step), torch.arange(8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    source, whole, again = executor(model, optimizer), executor(*made("one")), executor(*made("fsdp2"))
    whole._load_state(whole.cut(whole.parts_of(gathered(source)), rank))
    again._load_state(again.cut(again.parts_of([whole.part()]), rank))
    same = {}
    for (name, theirs), own, back in zip(
        model.named_parameters(), whole.model.parameters(), again.model.parameters(), strict=True
    ):  # fmt: skip
        same[name] = torch.equal(theirs.full_tensor(), own) and torch.equal(local_part(theirs), local_part(back))
        for key in ("exp_avg", "exp_avg_sq") if theirs.requires_grad else ():
            moment, moved = optimizer.state[theirs][key], again.optimizer.state[back][key]
            whole_moment = whole.optimizer.state[own][key]
            same[f"{name} {key}"] = (
                bool(whole_moment.abs().sum() > 0) and torch.equal(moment.full_tensor(), whole_moment)
                and moved.placements == moment.placements and torch.equal(local_part(moment), local_part(moved))
            )  # fmt: skip
    same["anchors"] = all(map(torch.equal, source.anchors, again.anchors))
    return same


def found_each_other(rank: int, ranks: int, times: int) -> int:
    """How often the ranks connected, one time after the other and none waiting for another in between."""
    for _ in range(times):
        links = lead_connects(ranks, 60.0).values() if rank == 0 else [rank_connects(rank, 60.0)]
        for link in links:
            link.close()
    return times


# ---------------------------------------------------------------- mistakes


def sentence(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def mistakes(rank: int, ranks: int, address: str, token: str, out: Path) -> dict[str, str]:
    """What each mistake says on this rank. Each takes its learner down, and the next one begins a new learner."""
    found: dict[str, str] = {}

    def joined(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, seconds: float = 30.0) -> atoll.Learner:
        return atoll.join(address, model, optimizer, token=token, out=out / name, rank_timeout_seconds=seconds)

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def raises() -> None:
        model = wrapped(Odd(), "fsdp2", ranks)
        optimizer = sgd(model)
        with joined(model, optimizer, "raises") as learner:
            while True:
                optimizer.step()
                learner.step()
                if rank == 1:
                    raise ZeroDivisionError("of the user's own")

    def misses_a_call() -> None:
        model = wrapped(Odd(), "ddp", ranks)
        optimizer = sgd(model)
        with joined(model, optimizer, "misses", seconds=3.0) as learner:
            optimizer.step()
            learner.step()
            if rank == 1:
                threading.Event().wait(6.0)  # busy with something else for longer than the others wait
            optimizer.step()
            learner.step()

    def skips_alone() -> None:
        model = wrapped(Odd(), "ddp", ranks)
        optimizer = sgd(model)
        with joined(model, optimizer, "skips") as learner:
            if rank == 0:
                optimizer.step()
            learner.step()

    def other_model() -> None:
        model = wrapped(Odd(), "fsdp2", ranks)
        if rank == 1:
            model.register_buffer("late", torch.zeros(3))
        with joined(model, sgd(model), "model"):
            pass

    def other_optimizer() -> None:
        model = wrapped(Odd(), "ddp", ranks)
        with joined(model, torch.optim.SGD(model.parameters(), lr=0.1 + rank), "optimizer"):
            pass

    def plain() -> None:
        model = Odd()
        joined(model, sgd(model), "plain")

    def partial() -> None:
        from torch.distributed.tensor import DTensor, Partial, init_device_mesh

        model = nn.Linear(3, 2, bias=False)
        mesh = init_device_mesh("cpu", (ranks,))
        model.weight = nn.Parameter(DTensor.from_local(model.weight.data, mesh, [Partial()]))
        with joined(model, sgd(model), "partial"):
            pass

    def pipeline() -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        stages = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("stage", "shard"))
        model = nn.Sequential(OrderedDict({f"layer{rank}": nn.Linear(3, 2)}))
        fully_shard(model, mesh=stages["shard"])
        with joined(model, sgd(model), "pipeline"):
            pass

    def other_world() -> None:
        model = wrapped(Odd(), "fsdp2", ranks)
        optimizer = sgd(model)
        with joined(model, optimizer, "world") as learner:
            optimizer.step()
            learner.step()
            torch.distributed.destroy_process_group()  # as a launcher that goes on with the ranks that are left
            torch.distributed.init_process_group("gloo", init_method=f"file://{out}/alone{rank}", rank=0, world_size=1)
            optimizer.step()
            learner.step()

    for work in (raises, misses_a_call, skips_alone, other_model, other_optimizer, plain, partial, pipeline, other_world):
        found[work.__name__] = sentence(work)
        torch.distributed.barrier()
    return found


# ---------------------------------------------------------------- memory


class PeakMemory:
    """The most memory of its own (not of mapped files) that this process had since it began, in bytes."""

    def __init__(self) -> None:
        self._first = self._most = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @staticmethod
    def _now() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return 1024 * int(line.split()[1])

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self._most = max(self._most, self._now())

    def so_far(self) -> int:
        return max(self._most, self._now()) - self._first

    def grown(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.so_far()


def memory_loop(
    rank: int, ranks: int, layers: int, address: str, token: str, out: Path, wants: int = -1, until: Path | None = None,
    steps_max: int = -1,
) -> dict[str, int]:  # fmt: skip
    """A model that no rank ever builds whole: made on the meta device, sharded, and filled shard by shard. By how much the memory
    of this rank had grown at most when it had joined, and in the end. `until`: it leaves when this file is there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    memory = PeakMemory()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            local_part(parameter).fill_(0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, foreach=False)
    found, steps = {}, 0
    with atoll.join(address, model, optimizer, token=token, out=out, wants=wants, rank_timeout_seconds=60.0) as learner:
        found["joined"] = memory.so_far()
        while not learner.over and steps != steps_max:
            steps += 1
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=1)
            if steps == 1:
                say("trains")
            if until is not None:
                threading.Event().wait(0.15)  # the processors are for others
                if rank == 0 and until.exists():
                    learner.leave("the test has seen enough")
    return found | {"end": memory.grown(), "moments": len(optimizer.state)}


def careful_loop(rank: int, ranks: int, address: str, token: str, out: Path) -> dict[str, Any]:
    """FSDP2 in bf16, a scaler that skips a step on all ranks, two batches to a step, and an evaluation before every report, after
    which FSDP holds whole copies of the weights."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = nn.Sequential(nn.Linear(11, 33), nn.GELU(), nn.Linear(33, 5))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))
    plain = nn.Sequential(nn.Linear(11, 33), nn.GELU(), nn.Linear(33, 5)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    probe = torch.randn(4, 11, generator=torch.Generator().manual_seed(1))
    counted, stale, attempts = [], 0, 0
    with atoll.join(address, model, optimizer, token=token, out=out, rank_timeout_seconds=30.0) as learner:
        while not learner.over:
            attempts += 1
            for micro in range(2):
                loss = model(torch.randn(8, 11) + rank).square().mean()
                scaler.scale(loss / 2 * (float("inf") if attempts == 3 and micro else 1.0)).backward()
                learner.count(tokens=8, loss=loss)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            with torch.no_grad():
                model(probe)
            counted.append(learner.step())
            with torch.no_grad():
                now = model(probe)  # first: a state dict makes FSDP drop its whole copies
                plain.load_state_dict({name: tensor.full_tensor() for name, tensor in model.state_dict().items()})
                stale += not torch.allclose(now, plain(probe.bfloat16()).float(), atol=1e-2)
    return {"counted": counted, "stale": stale, "moments": len(optimizer.state)}
