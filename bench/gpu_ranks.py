"""FSDP2 on one GPU: what a learner of CUDA ranks costs, that it comes back after SIGKILL, and two ranks that share the device.

    python bench/gpu_ranks.py --json bench/results/gpu_ranks.jsonl           # all three parts, on a GPU
    python bench/gpu_ranks.py --device cpu --size tiny --json /tmp/out.jsonl   # to try this script without one

Each part has processes and a time limit of its own, prints one JSON line when it is done, and appends it to --json at once. A
part that fails or hangs leaves a line with `failed`, and the next one begins.

`overhead`: one rank, `fully_shard` on gpu_speed's decoder (560M by default), bf16 by MixedPrecisionPolicy, blocks and loss
compiled, fused AdamW, int4 up, int8 down. One process trains the same loop alone, joined, and alone again. `ratio` is that of the
medians over spans of H/P steps, in each of which a fragment leaves and one arrives; `ratio_of_means` is that of all the time. A
span lies between two events on the compute stream: nothing waits for the device at a step but what Atoll waits for. The first H
joined steps are left out: they pin memory and capture graphs. `rounds_adopted` of `rounds_due` counts all joined steps. The
target is a ratio of at most 1.02 at 560M; `passed` says whether it was met.

`killed`: two learners of one rank each (35M) on the one device. The second is killed in the middle, started again, takes a peer's
state, and trains on; then both leave in order. `seconds_to_first_step` is from the start of its process to its first step after
the recovery, `join_seconds` the part of it inside `atoll.join`. `consistent`: all fragments that both hold at the same version in
the end have the same digests, at least one is such, the recovery is on the syncer's tape, and that tape replays.

`shared`: one learner of two ranks (35M) that share the device over gloo, measured as `overhead`. Where torch refuses a
collective, `refused` is its own sentence.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_speed import SIZES as GPU_SIZES
from provenance import commit
from scripted import Cluster
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

import atoll
from atoll.config import Config, load
from atoll.config.models import SIZES as DECODERS
from atoll.protocol.vocabulary import Adopt, Goodbye, Received, Recovered, StepDone
from atoll.runtime.join.ranked import RankedLearner
from atoll.tape.format import Tape
from atoll.workload.models.decoder import build_model, token_losses

TARGET = 1.02
FRAGMENTS = 12
WARM_STEPS = 10
SIZES: dict[str, dict[str, Any]] = GPU_SIZES | {
    "tiny": {"model": {"size": "tiny", "numbers": {"vocab": 512}}, "batch": 4, "seq": 32},
}
LIMITS = {"overhead": 170.0, "killed": 90.0, "shared": 90.0}
"""Seconds. The first compiles a model and uploads it."""


# ---------------------------------------------------------------- the loop of one rank


def sharded(options: argparse.Namespace, device: torch.device) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The model, and the loss of a batch, compiled block by block as trainers of FSDP2 do: hooks stay outside of the graphs."""
    shape = SIZES[options.size]
    numbers = DECODERS[shape["model"]["size"]] | {"vocab": 512, "context": shape["seq"]} | shape["model"].get("numbers", {})
    model = build_model("decoder", numbers, 0).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh, losses = init_device_mesh(device.type, (options.ranks,)), token_losses
    for block in model.blocks:  # type: ignore[union-attr]
        if options.compile:
            block.with_balance = torch.compile(block.with_balance)
        fully_shard(block, mesh=mesh, mp_policy=policy)
        register_fsdp_forward_method(block, "with_balance")  # which the decoder calls of its blocks in place of `forward`
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if options.compile:
        torch._dynamo.config.recompile_limit = 64  # blocks share one graph; if they did not, the rest would silently be eager
        losses = torch.compile(token_losses)

    def loss_of(batch: Tensor) -> Tensor:
        return losses(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).mean()

    return model, loss_of


class Rank:
    """One rank's model, optimiser and tokens: random ones, made on the device."""

    def __init__(self, options: argparse.Namespace) -> None:
        cuda = options.device == "cuda"
        self.device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")
        else:
            torch.set_num_threads(1)
        backend = "nccl" if cuda and options.ranks == 1 else "gloo"  # NCCL refuses two ranks on one device
        store = f"file://{options.store}"
        dist.init_process_group(backend, init_method=store, rank=options.rank, world_size=options.ranks)
        self.model, self._loss_of = sharded(options, self.device)
        if options.forced_sums:
            self.model.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=cuda)
        shape, seed = SIZES[options.size], 10 * options.wants + options.rank + 1
        rng = torch.Generator(self.device).manual_seed(seed)
        size = (8, shape["batch"], shape["seq"] + 1)
        vocab = int(self.model.shape.vocab)  # type: ignore[union-attr,arg-type]
        self._batches = torch.randint(0, vocab, size, device=self.device, generator=rng)
        self.tokens = shape["batch"] * shape["seq"]
        self.taken = 0
        self.host_seconds: list[float] = []
        """Of each call of `learner.step`."""

    def step(self, learner: atoll.Learner | None = None) -> Tensor:
        batch = self._batches[self.taken % len(self._batches)]
        self.taken += 1
        loss = self._loss_of(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if learner is not None:
            began = time.perf_counter()
            learner.step(tokens=self.tokens, loss=loss)
            self.host_seconds.append(time.perf_counter() - began)
        return loss.detach()

    def timed(self, steps: int, learner: atoll.Learner | None = None) -> list[float]:
        """Milliseconds from the end of each step to the next one's, on the compute stream."""
        if self.device.type == "cpu":
            ends = [time.perf_counter()]
            for _ in range(steps):
                self.step(learner)
                ends.append(time.perf_counter())
            return [1e3 * (b - a) for a, b in pairwise(ends)]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self.step(learner)
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(marks)]


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def joined(options: argparse.Namespace, rank: Rank) -> atoll.Learner:
    return atoll.join(
        options.syncer, rank.model, rank.optimizer, token=options.token, out=options.folder, wants=options.wants,
        rank_timeout_seconds=60.0,
    )  # fmt: skip


def measure(options: argparse.Namespace) -> None:
    """Alone, joined, alone again. A collective that torch refuses is refused in the first step."""
    rank = Rank(options)
    try:
        first = float(rank.step())
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if options.ranks == 1:
            raise
        say(refused=f"{type(error).__name__}: {error}"[:400])
        return
    for _ in range(WARM_STEPS):
        rank.step()
    say(warm=True)
    before = rank.timed(options.steps)
    began = time.monotonic()
    with joined(options, rank) as learner:
        joining = time.monotonic() - began
        rank.timed(options.interval, learner)
        rank.host_seconds.clear()
        within = rank.timed(options.joined, learner)
        host = list(rank.host_seconds)
    after = rank.timed(options.steps)
    last = float(rank.step())
    if rank.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
    else:
        peak = 0.0
    say(
        alone=before, joined=within, again=after, join_seconds=joining, host=host, losses=[first, last], peak_gib=peak,
        parameters=sum(p.numel() for p in rank.model.parameters()), tokens=rank.tokens,
    )  # fmt: skip
    dist.destroy_process_group()


def train_until(options: argparse.Namespace) -> None:
    """A learner of the part with a kill: until a file appears."""
    rank = Rank(options)
    began = time.monotonic()
    with joined(options, rank) as learner:
        say(joined=time.monotonic() - began)
        while not options.until.exists() and not learner.over:
            loss = rank.step(learner)
            if rank.taken == 1 or rank.taken % 10 == 0:
                say(step=rank.taken, loss=float(loss))
    assert isinstance(learner, RankedLearner)
    anchors = learner._inner.state()["anchors"]  # what both must agree on, if of one version
    say(anchors=[None if a is None else hashlib.sha256(a.cpu().numpy().tobytes()).hexdigest() for a in anchors])
    dist.destroy_process_group()


# ---------------------------------------------------------------- processes


class Child:
    """A rank's process. It ends with this part, whose process group is ended as one."""

    def __init__(self, cluster: Cluster, options: argparse.Namespace, name: str, work: str, **more: Any) -> None:
        words = {
            "work": work, "syncer": cluster.address, "token": cluster.token, "folder": cluster.folder / name,
            "size": options.size, "device": options.device, "interval": options.interval, "joined": options.joined,
            "steps": options.steps, "store": cluster.folder / f"store-{name}", **more,
        }  # fmt: skip
        argv = [sys.executable, __file__, *(word for key, value in words.items() for word in (f"--{key}", str(value)))]
        self.log = cluster.folder / f"{name}-{time.monotonic_ns()}.log"
        self.began = time.monotonic()
        with self.log.open("w") as file:
            self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=file, text=True)
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self._lines.put(json.loads(line))
        self._lines.put(None)

    def said(self, key: str, at_least: Any = None) -> dict[str, Any]:
        """The next thing said with this key, or a refusal."""
        while (line := self._lines.get()) is not None:
            if "refused" in line or (key in line and (at_least is None or line[key] >= at_least)):
                return line
        raise SystemExit(f"a rank ended with {self.process.wait()}: {last_words(self.log.read_text(errors='replace'))}")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def last_words(text: str) -> str:
    return " | ".join(text.strip().splitlines()[-6:])[-900:]


def config_for(options: argparse.Namespace, learners: int) -> Config:
    return load(preset_name="decoupled", overrides={
        "learners": learners, "total_steps": 1_000_000, "model": {"name": "custom"},
        "protocol": {
            "fragments": FRAGMENTS, "local_steps_per_round": options.interval, "overlap": options.overlap,
            "codec_up": "int4", "codec_down": "int8", "fragmentation": "balanced",
        },
        "limits": {"start_wait_seconds": 60.0},
    })  # fmt: skip


# ---------------------------------------------------------------- parts


def overhead(options: argparse.Namespace, ranks: int = 1) -> None:
    """Also of two ranks, which share the device. Where torch refuses to average, sums are tried: FSDP2 then divides by itself."""
    refused = ""
    for sums in (0, 1) if ranks > 1 else (0,):
        with Cluster(config_for(options, 1)) as cluster:
            more = {"ranks": ranks, "compile": options.compile, "forced_sums": sums, "store": cluster.folder / "store"}
            children = [Child(cluster, options, f"r{rank}", "measure", rank=rank, **more, folder=cluster.folder / "learner")
                        for rank in range(ranks)]  # fmt: skip
            warm = [child.said("warm") for child in children[:1]]
            refused = str(warm[0].get("refused", ""))
            if refused:
                for child in children:
                    child.kill()
                continue
            found = [child.said("alone") for child in children]
            ended = [child.process.wait() for child in children]
            (tape,) = (cluster.folder / "learner").rglob("0.tape")
            figures = summary(options, ranks, found[0]) | rounds(options, tape)
            say(**figures, exit_codes=ended, **({"forced_sums": bool(sums)} if ranks > 1 else {}))
            return
    say(refused=refused)


def summary(options: argparse.Namespace, ranks: int, found: dict[str, Any]) -> dict[str, Any]:
    span = max(1, options.interval // FRAGMENTS)
    alone, within = spans(found["alone"], span) + spans(found["again"], span), spans(found["joined"], span)
    ratio = statistics.median(within) / statistics.median(alone)
    means = statistics.fmean(within) / statistics.fmean(alone)
    host = sorted(1e3 * each for each in found["host"])
    return {
        "ranks": ranks, "parameters": found["parameters"], "compiled": bool(options.compile), "ratio": round(ratio, 4),
        "ratio_of_means": round(means, 4), "target": TARGET, "passed": ratio <= TARGET,
        "step_ms": {
            "alone": round(statistics.median(spans(found["alone"], span)) / span, 3),
            "joined": round(statistics.median(within) / span, 3),
            "again": round(statistics.median(spans(found["again"], span)) / span, 3),
            "longest_joined": round(max(found["joined"]), 3), "longest_alone": round(max(found["alone"] + found["again"]), 3),
        },
        "tokens_per_second": {
            "alone": round(1e3 * ranks * found["tokens"] * span / statistics.median(alone)),
            "joined": round(1e3 * ranks * found["tokens"] * span / statistics.median(within)),
        },
        "host_ms_in_step": {"median": round(statistics.median(host), 3), "longest": round(host[-1], 3)},
        "join_seconds": round(found["join_seconds"], 2), "losses": [round(loss, 4) for loss in found["losses"]],
        "peak_gib": round(found["peak_gib"], 2),
    }  # fmt: skip


def spans(times: list[float], length: int) -> list[float]:
    return [sum(times[at : at + length]) for at in range(0, len(times) - length + 1, length)]


def rounds(options: argparse.Namespace, tape: Path) -> dict[str, int]:
    records = list(Tape(tape).records())
    steps = sum(isinstance(record.event, StepDone) for record in records)
    adopted = sum(isinstance(effect, Adopt) and effect.merged for record in records for effect in record.effects)
    return {"steps_joined": steps, "rounds_adopted": adopted, "rounds_due": steps * FRAGMENTS // options.interval}


def killed(options: argparse.Namespace) -> None:
    with Cluster(config_for(options, 2)) as cluster:
        until = cluster.folder / "enough"

        def start(name: str, wants: int, life: str) -> Child:
            store = cluster.folder / f"store-{name}{life}"
            return Child(cluster, options, name, "train", wants=wants, until=until, store=store, compile=options.compile)

        steady, second = start("a", 0, ""), start("b", 1, "")
        first_join = second.said("joined")["joined"]
        second.said("step", options.before_kill)
        second.kill()
        steady.said("step")
        back = start("b", 1, "-again")
        join_seconds = back.said("joined")["joined"]
        back.said("step")
        to_first_step = time.monotonic() - back.began
        resumed = back.said("step", options.after_kill)
        until.touch()
        anchors = [child.said("anchors")["anchors"] for child in (steady, back)]
        codes = [child.process.wait() for child in (steady, back)]
        tapes = [newest(cluster.folder / name) for name in ("a", "b")]
        cluster.syncer.stop()
        say(
            learners=2, first_join_seconds=round(first_join, 2), seconds_to_first_step=round(to_first_step, 2),
            join_seconds=round(join_seconds, 2), loss_after=round(resumed["loss"], 4), exit_codes=codes,
            **consistency(cluster, anchors, [adopted_versions(tape) for tape in tapes]),
        )  # fmt: skip


def newest(folder: Path) -> Path:
    return max(folder.rglob("*.tape"), key=lambda path: path.stat().st_mtime)


def adopted_versions(tape: Path) -> dict[int, int]:
    """By fragment the version adopted last."""
    return {e.fragment: e.version for r in Tape(tape).records() for e in r.effects if isinstance(e, Adopt)}


def consistency(cluster: Cluster, anchors: list[list[str | None]], versions: list[dict[int, int]]) -> dict[str, Any]:
    records = list(Tape(cluster.tape).records())
    sources = [e.source for r in records for e in r.effects if isinstance(e, Recovered) and e.learner == 1]
    goodbyes = sum(isinstance(r.event, Received) and isinstance(r.event.envelope.body, Goodbye) for r in records)
    shared = [p for p in range(FRAGMENTS) if p in versions[0] and versions[0][p] == versions[1].get(p)]
    alike = [p for p in shared if anchors[0][p] is not None and anchors[0][p] == anchors[1][p]]
    replay = subprocess.run(
        [sys.executable, "-m", "atoll", "replay", str(cluster.directory)], capture_output=True, text=True, check=False
    )
    return {
        "recovered_from": sources[-1] if sources else None, "goodbyes": goodbyes, "fragments_of_one_version": len(shared),
        "fragments_alike": len(alike), "replayed": replay.returncode == 0,
        "consistent": bool(sources) and bool(shared) and alike == shared and replay.returncode == 0 and goodbyes == 2,
        **({} if replay.returncode == 0 else {"replay_said": last_words(replay.stdout + replay.stderr)}),
    }  # fmt: skip


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "overhead": overhead, "killed": killed, "shared": lambda options: overhead(options, 2),
}  # fmt: skip


# ---------------------------------------------------------------- the whole


def end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def run_part(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """In a process group of its own, which is ended when its time is over. What it has said by then counts."""
    argv = [sys.executable, __file__, *sys.argv[1:], "--part", part]
    limit, began = options.limit or LIMITS[part], time.monotonic()
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        late = ""
        try:
            out, error = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            late = f"not done after {limit:.0f} s: "
            end_group(process.pid)
            out, error = process.communicate()
        finally:
            end_group(process.pid)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    found = json.loads(lines[-1]) if lines else {"failed": late + last_words(error)}
    return {"bench": "gpu_ranks", "part": part, **found, "seconds": round(time.monotonic() - began, 1)}


def lines_of(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = torch.cuda.get_device_name(0) if options.device == "cuda" else "cpu"
    for part in options.parts.split(","):
        size = options.size if part == "overhead" else options.small
        facts = {"size": size, "interval": options.interval, "overlap": options.overlap}
        yield run_part(part, options) | facts | {"device": device, "torch": torch.__version__, "commit": commit()}


def main() -> int:
    options = arguments().parse_args()
    if options.work:
        {"measure": measure, "train": train_until}[options.work](options)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the parts' processes end too
    options.small = "tiny" if options.size == "tiny" else "35M"
    if options.part:
        if options.part != "overhead":
            options.size, options.compile = options.small, 0
        PARTS[options.part](options)
        return 0
    if unknown := set(options.parts.split(",")) - set(PARTS):
        raise SystemExit(f"--parts: there is no {min(unknown)}; there are {', '.join(PARTS)}")
    good = True
    for line in lines_of(options):
        print(json.dumps(line), flush=True)
        good = good and "failed" not in line
        if options.json is not None:
            with options.json.open("a") as file:
                print(json.dumps(line), file=file)
    return 0 if good else 1


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="560M", help="of the first part; the others take 35M, or tiny")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--interval", type=int, default=96, help="H, local steps a round")
    parser.add_argument("--overlap", type=int, default=2, help="tau, outer steps in flight")
    parser.add_argument("--steps", type=int, default=40, help="alone, before and after")
    parser.add_argument("--joined", type=int, default=144, help="joined and timed, after H that are not")
    parser.add_argument("--compile", type=int, choices=(0, 1), default=1, help="in the first part")
    parser.add_argument("--before-kill", type=int, default=100, help="steps of the learner that is killed")
    parser.add_argument("--after-kill", type=int, default=200, help="and of the one in its place")
    parser.add_argument("--limit", type=float, help="seconds of each part, in place of its own limit")
    parser.add_argument("--json", type=Path, help="append each line to this file")
    for hidden, kind, usual in (
        ("part", str, ""), ("work", str, ""), ("syncer", str, ""), ("token", Path, None), ("folder", Path, None),
        ("store", Path, None), ("until", Path, None), ("rank", int, 0), ("ranks", int, 1), ("wants", int, 0),
        ("forced_sums", int, 0),
    ):  # fmt: skip
        parser.add_argument(f"--{hidden}", type=kind, default=usual, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
