"""One virtual run from a config to its tape: build the task, run the cluster, evaluate Theta before and after."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from atoll.chaos import ChaosPlan, Scavenge
from atoll.config import Config, changed, from_builtins, to_toml
from atoll.errors import ReplayDiverged, UserError
from atoll.executor.compute import resolved
from atoll.executor.environment import device_words, mismatches, tape_header
from atoll.executor.fleet.executor import FleetExecutor
from atoll.executor.virtual_run import TensorExecutor, evaluated_on, executor_on
from atoll.ids import SYNCER, Nanos, WorkerId
from atoll.protocol.interface import Observer
from atoll.protocol.ledger import Fates
from atoll.protocol.vocabulary import Effect, Event, Stored
from atoll.sim.cluster import VirtualCluster
from atoll.sim.slices import SliceHardware
from atoll.store.tokenizer_file import write_tokenizer_file
from atoll.store.versions import IN_BLOCKS, average_of
from atoll.store.weights import AVERAGE_FILE, THETA_FILE, read_weights, save_weights
from atoll.tape.folder import refuse_used
from atoll.tape.format import Header, Tape, TapeWriter
from atoll.tape.heldout import HeldoutPoint, append_point
from atoll.tape.replay import Outcome, TapeSource, replay
from atoll.tape.retrain import retrain
from atoll.tape.weave import Woven
from atoll.tasks.registry import task_for
from atoll.tasks.task import Task
from atoll.tensors.access import named_tensors

HOST = torch.device("cpu")
OnPoint = Callable[[HeldoutPoint], None]


@dataclass(frozen=True)
class Outputs:
    """The results of a run."""

    fates: Fates
    tape: Path | None
    loss_first: float | None
    loss_final: float | None
    theta_sha256: str | None
    accuracy: float | None = None
    theta: Path | None = None
    """The file with the trained weights."""
    points: tuple[HeldoutPoint, ...] = ()
    loss_average: float | None = None
    """Of the average of Theta over time, where the run keeps one."""
    compute: str = ""
    """Precision and compilation of the inner steps."""


def ignore_point(point: HeldoutPoint) -> None:
    pass


class HeldoutObserver:
    """Evaluates Theta's held-out loss every `data.heldout_every` outer steps, or at the first version stored after that. It
    does so while `Stored` is handled, when the disk holds that version and no newer one."""

    def __init__(self, task: Task, executor: TensorExecutor | FleetExecutor, directory: Path | None, on_point: OnPoint) -> None:
        self._task, self._executor, self._directory, self._on_point = task, executor, directory, on_point
        self._every, self._last = task.config.data.heldout_every, task.config.total_steps
        self.taken: list[HeldoutPoint] = []

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if worker == SYNCER and isinstance(event, Stored) and self._every:
            step, before = event.outer_step, self.taken[-1].outer_step if self.taken else 0
            if step // self._every > before // self._every and step < self._last:
                self._take(HeldoutPoint(step, self._task.evaluate_theta(*self._executor.disk.theta())))

    def _take(self, point: HeldoutPoint) -> None:
        self.taken.append(point)
        if self._directory is not None:
            append_point(self._directory, point)
        self._on_point(point)


def header_for(
    config: Config, plan: ChaosPlan, task: Task | None, hardware: dict[str, Any] | None = None, device: str = "cpu"
) -> Header:
    return tape_header(
        config, data_fingerprint=task.fingerprint if task else "", tensors=task is not None,
        plan=msgspec.to_builtins(plan.faults), hardware=hardware or {}, device=device_words(torch.device(device)),
        compute=str(resolved(config, torch.device(device))) if task else "",
    )  # fmt: skip


def run_virtual(
    config: Config, plan: ChaosPlan, directory: Path | None, *, tensors: bool, observers: Sequence[Observer] = (),
    task: Task | None = None, limit_seconds: float | None = None, slices: SliceHardware | None = None,
    device: torch.device = HOST, on_point: OnPoint = ignore_point,
) -> Outputs:  # fmt: skip
    """`limit_seconds` bounds virtual time; the default is the plan's length and ten times the duration of an undisturbed run.
    `slices`: learners made of chips that fail; by default those of `cluster.chips`. `device`: where all learners train
    together."""
    slices = slices if slices is not None else SliceHardware.of_config(config)
    if directory is not None:
        refuse_used(directory)
    if tensors and task is None:
        task = task_for(config)
    task = evaluated_on(task, device) if task else None
    executor = executor_on(task, device, learners_expected(config, plan)) if task else None
    first = task.evaluate_theta(*executor.disk.theta()) if task and executor else None
    header = header_for(config, plan, task, slices.describe() if slices else None, str(device))
    writer = _open_tape(directory, config, plan, header, task) if directory else None
    watching: list[Observer] = [writer.append] if writer else []
    points = HeldoutObserver(task, executor, directory, on_point) if task and executor else None
    watching += [points] if points else []
    cluster = VirtualCluster(config, plan=plan, executor_for=executor, observers=[*watching, *observers], hardware=slices)
    cluster.run(until_seconds=limit_seconds if limit_seconds is not None else time_limit_seconds(config, plan))
    if writer:
        writer.close()
    final = task.evaluate_theta(*executor.disk.theta()) if task and executor else None
    if task and executor and directory:
        _save_theta(directory / THETA_FILE, task, executor)
    return Outputs(
        cluster.syncer.fates(), directory / "run.tape" if directory else None, first, final,
        executor.disk.theta_sha256() if executor else None,
        task.accuracy_of_theta(*executor.disk.theta()) if task and executor else None,
        directory / THETA_FILE if task and directory else None, tuple(points.taken) if points else (),
        _average(directory, task, executor) if task and executor else None, header.compute,
    )  # fmt: skip


def learners_expected(config: Config, plan: ChaosPlan) -> int:
    """The declared learners and the scavenged ones that the plan adds."""
    return max([config.learners, *(fault.learner + 1 for fault in plan.faults if isinstance(fault, Scavenge))])


def train_on_tape(
    tape: Tape, config: Config, directory: Path, observers: Sequence[Observer] = (), allowed: Collection[str] = (),
    on_point: OnPoint = ignore_point,
) -> Outputs:  # fmt: skip
    """Train real weights through the tape's history. The result is a run folder of its own, which replays like any other."""
    refuse_used(directory)
    task = task_for(config, allowed)
    executor = TensorExecutor(task)
    first = task.evaluate_theta(*executor.disk.theta())
    plan = msgspec.convert({"faults": tape.header.plan}, ChaosPlan)
    points = HeldoutObserver(task, executor, directory, on_point)
    header = header_for(config, plan, task, tape.header.hardware)
    with _open_tape(directory, config, plan, header, task) as writer:
        outcome = retrain(tape, config, executor, [writer.append, points, *observers])
    if outcome.fates is None:
        raise UserError(f"tape {tape.path}: has no events of a syncer, so there is nothing to train on")
    _save_theta(directory / THETA_FILE, task, executor)
    final, accuracy = task.evaluate_theta(*executor.disk.theta()), task.accuracy_of_theta(*executor.disk.theta())
    return Outputs(
        outcome.fates, directory / "run.tape", first, final, executor.disk.theta_sha256(), accuracy, directory / THETA_FILE,
        tuple(points.taken), _average(directory, task, executor), header.compute,
    )  # fmt: skip


DECIDED = ("preset", "learners", "total_steps", "protocol", "cluster", "limits")
"""Keys that decisions depend on. The tape has fixed them, so the same keys of a recipe are ignored."""


def config_on_tape(tape: Tape, tables: Mapping[str, Any], assignments: Sequence[str]) -> Config:
    """The tape's config with the recipe's keys and --set laid over it, where no decision depends on them."""
    if tape.header.worker is not None:
        raise UserError(f"tape {tape.path}: belongs to one live worker; --tape takes a virtual run's tape (atoll simulate tape)")
    if not tape.header.derivable:
        raise UserError(f"tape {tape.path}: is of torch's data-parallel training; --tape takes a virtual run's tape")
    taped = from_builtins(tape.header.config)
    wanted = changed(taped, assignments, {key: value for key, value in tables.items() if key not in DECIDED})
    for key in DECIDED:
        if getattr(wanted, key) != getattr(taped, key):
            raise UserError(f"--tape {tape.path}: has fixed {key} already; change only seed, model, data, inner or outer")
    return wanted


def time_limit_seconds(config: Config, plan: ChaosPlan) -> float:
    c = config.cluster
    step = c.step_seconds * c.slow_factor + 4 * c.latency_seconds + _transfer_seconds(config)
    return plan.healed_at() + config.limits.start_wait_seconds + 10 * config.total_steps * step


def _transfer_seconds(config: Config) -> float:
    return config.cluster.parameters * 32 * 2 / (min(config.cluster.up_gbit, config.cluster.down_gbit) * 1e9)


def _open_tape(directory: Path, config: Config, plan: ChaosPlan, header: Header, task: Task | None) -> TapeWriter:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {directory}: cannot be made a directory ({error.strerror})") from None
    writer = TapeWriter.create(directory / "run.tape", header)
    (directory / "config.toml").write_text(to_toml(config), encoding="utf8")
    (directory / "plan.toml").write_text(plan.to_toml(), encoding="utf8")
    if task is not None:
        write_tokenizer_file(directory, task)
    return writer


def _save_theta(path: Path, task: Task, executor: TensorExecutor | FleetExecutor) -> None:
    model = task.model_of(*executor.disk.theta())
    save_weights(path, named_tensors(model))


def _average(directory: Path | None, task: Task, executor: TensorExecutor | FleetExecutor) -> float | None:
    """Saves the average of Theta over time, if there is one, and measures it."""
    average = average_of(executor.disk.newest())
    if average is None:
        return None
    if directory is not None:
        save_weights(directory / AVERAGE_FILE, named_tensors(task.model_of(*average)))
    return task.evaluate_theta(*average)


def replay_mismatches(tape: TapeSource, task: Task | None, device: torch.device = HOST) -> list[str]:
    """Differences between this machine and the tape's that may change decisions or bits."""
    found: list[str] = []
    for h in tape.headers():
        here = str(resolved(task.config, device)) if task else ""
        new = mismatches(h, here, device_words(device), decisions_only=task is None)
        found += [each for each in new if each not in found]
    h = tape.header
    if task is not None and task.fingerprint != h.data_fingerprint:
        found.append(f"data: fingerprint {h.data_fingerprint[:12]} on the tape, {task.fingerprint[:12]} here")
    return found


def replay_run(
    tape: TapeSource, *, weights: bool, progress: Callable[[int, int], None] | None = None,
    on_mismatch: Callable[[str], None] | None = None,
    executor_of: Callable[[Task], TensorExecutor] = TensorExecutor, allowed: Collection[str] = (),
    device: torch.device = HOST, tolerance: float | None = None,
) -> tuple[Outcome, str | None, list[str]]:  # fmt: skip
    """Replay the decisions, and with `weights` every Theta. `on_mismatch` gets the reasons for which bits may differ before the
    replay begins, so that a difference stands beside its explanation. `device`: where `executor_of` puts the learners.
    `tolerance`: of the final Theta's relative distance; by default every Theta is demanded bit for bit."""
    if weights and not tape.header.tensors:
        raise UserError(
            f"tape {tape.path}: was recorded without weights (atoll sim) or by a custom training loop; only its decisions can "
            "be replayed, so leave --weights out"
        )
    ranked = [header.worker for header in tape.headers() if not header.tensors] if weights and isinstance(tape, Woven) else []
    if ranked:
        raise UserError(
            f"tape {tape.path}: learner {ranked[0]} had several ranks, whose sums differ in their last bits from those of one "
            f"process; only the run's decisions can be replayed, so leave --weights out"
        )
    task = task_for(msgspec.convert(tape.header.config, Config), allowed) if weights else None
    recorded = _recorded_theta(tape.path) if weights and tolerance is not None else {}
    mismatches_found = replay_mismatches(tape, task, device)
    if on_mismatch is not None:
        for sentence in mismatches_found:
            on_mismatch(sentence)
    if task is None:
        return replay(tape, progress=progress), None, mismatches_found
    executor: Any = executor_of(task)
    executor.in_blocks = tape.header.digests == IN_BLOCKS
    outcome = replay(tape, executor, progress, exact=tolerance is None)
    if tolerance is not None:
        away = _distance(named_tensors(task.model_of(*executor.disk.theta())), recorded)
        outcome = msgspec.structs.replace(outcome, distance=away)
        if not away <= tolerance:
            raise ReplayDiverged(
                f"the final Theta is {away:.2e} of its norm away from the recorded one, more than --tolerance {tolerance:g}; "
                f"{outcome.differing} Thetas differ in bits"
            )
    return outcome, executor.disk.theta_sha256(), mismatches_found


def _recorded_theta(path: Path) -> dict[str, Tensor]:
    """Of a live run's folder, or beside a virtual run's tape."""
    folder = path / "syncer" if path.is_dir() else path.parent
    if not (folder / THETA_FILE).is_file():
        raise UserError(f"--tolerance: compares with {folder / THETA_FILE}, which a run leaves when it is over; there is none")
    return read_weights(folder / THETA_FILE)


def _distance(here: Mapping[str, Tensor], recorded: Mapping[str, Tensor]) -> float:
    """The L2 norm of the difference over that of the recorded weights. Counts of batches and the like are no weights."""
    floating = {name: tensor for name, tensor in recorded.items() if tensor.is_floating_point()}
    if unknown := sorted(floating.keys() - here.keys()):
        raise UserError(f"--tolerance: {THETA_FILE} has the tensor {unknown[0]}, which this model has not")
    pairs = [(here[name].detach().cpu().double(), tensor.double()) for name, tensor in floating.items()]
    apart = sum(float((mine - theirs).square().sum()) for mine, theirs in pairs)
    return math.sqrt(apart / sum(float(theirs.square().sum()) for _, theirs in pairs))
