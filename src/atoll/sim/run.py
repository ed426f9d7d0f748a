"""One virtual run from a config to its tape: build the workbench, run the cluster, evaluate Theta before and after."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from atoll.chaos import Plan, Scavenge
from atoll.config import Config, changed, from_builtins, to_toml
from atoll.errors import UserError
from atoll.executor.device import evaluated_on, hands_on
from atoll.executor.environment import code_version, cpu_capability, mismatches
from atoll.executor.fleet import FleetHands
from atoll.executor.kept_text import keep_text
from atoll.executor.syncer import TensorHands
from atoll.executor.tasks import workbench_for
from atoll.executor.weights import save_weights
from atoll.executor.workbench import Workbench
from atoll.ids import SYNCER, Nanos, WorkerId
from atoll.protocol.ledger import Fates
from atoll.protocol.vocabulary import Effect, Event, Stored
from atoll.sim.cluster import Cluster, Observer
from atoll.sim.slices import SliceHardware
from atoll.tape.folder import refuse_used
from atoll.tape.format import Header, Tape, TapeWriter
from atoll.tape.looks import Look, add_look
from atoll.tape.replay import Outcome, Source, replay
from atoll.tape.retrain import retrain
from atoll.tensors.access import named_tensors

HOST = torch.device("cpu")
Looked = Callable[[Look], None]


@dataclass(frozen=True)
class Outputs:
    """What a run leaves behind."""

    fates: Fates
    tape: Path | None
    loss_first: float | None
    loss_final: float | None
    theta_sha256: str | None
    accuracy: float | None = None
    looks: tuple[Look, ...] = ()


def unseen(look: Look) -> None:
    pass


class Looks:
    """An observer: Theta's held-out loss, every `data.heldout_every` outer steps, or as soon after as there is another Theta. In
    the moment in which a version is stored the disk holds it and none that is newer."""

    def __init__(self, bench: Workbench, hands: TensorHands | FleetHands, directory: Path | None, looked: Looked) -> None:
        self._bench, self._hands, self._directory, self._looked = bench, hands, directory, looked
        self._every, self._last = bench.config.data.heldout_every, bench.config.outer_steps
        self.taken: list[Look] = []

    def __call__(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if worker == SYNCER and isinstance(event, Stored) and self._every:
            step, before = event.outer_step, self.taken[-1].outer_step if self.taken else 0
            if step // self._every > before // self._every and step < self._last:
                self._take(Look(step, self._bench.evaluate_theta(*self._hands.disk.theta())))

    def _take(self, look: Look) -> None:
        self.taken.append(look)
        if self._directory is not None:
            add_look(self._directory, look)
        self._looked(look)


def header_for(
    config: Config, plan: Plan, bench: Workbench | None, hardware: dict[str, Any] | None = None, device: str = "cpu"
) -> Header:
    return Header(
        config=msgspec.to_builtins(config), code_version=code_version(),
        data_fingerprint=bench.fingerprint if bench else "", threads=torch.get_num_threads(),
        dtype=config.model.dtype, torch_version=str(torch.__version__), cpu_capability=cpu_capability(),
        tensors=bench is not None, plan=msgspec.to_builtins(plan.faults), hardware=hardware or {},
        device=device,
    )  # fmt: skip


def run_virtual(
    config: Config, plan: Plan, directory: Path | None, *, tensors: bool, observers: Sequence[Observer] = (),
    bench: Workbench | None = None, limit_seconds: float | None = None, slices: SliceHardware | None = None,
    device: torch.device = HOST, looked: Looked = unseen,
) -> Outputs:  # fmt: skip
    """`limit_seconds` bounds virtual time; by default ten times what an undisturbed run would take, and the plan's length.
    `slices`: learners made of chips that fail, for a synthetic history. `device`: where all learners train, side by side."""
    if directory is not None:
        refuse_used(directory)
    if tensors and bench is None:
        bench = workbench_for(config)
    bench = evaluated_on(bench, device) if bench else None
    hands = hands_on(bench, device, everybody(config, plan)) if bench else None
    first = bench.evaluate_theta(*hands.disk.theta()) if bench and hands else None
    header = header_for(config, plan, bench, slices.describe() if slices else None, str(device))
    writer = _open_tape(directory, config, plan, header, bench) if directory else None
    watching: list[Observer] = [writer.append] if writer else []
    looks = Looks(bench, hands, directory, looked) if bench and hands else None
    watching += [looks] if looks else []
    cluster = Cluster(config, plan=plan, hands_for=hands, observers=[*watching, *observers], hardware=slices)
    cluster.run(until_seconds=limit_seconds if limit_seconds is not None else patience(config, plan))
    if writer:
        writer.close()
    final = bench.evaluate_theta(*hands.disk.theta()) if bench and hands else None
    if bench and hands and directory:
        _save_theta(directory / "theta.safetensors", bench, hands)
    return Outputs(
        cluster.syncer.fates(), directory / "run.tape" if directory else None, first, final,
        hands.disk.theta_sha256() if hands else None,
        bench.accuracy_of_theta(*hands.disk.theta()) if bench and hands else None,
        tuple(looks.taken) if looks else (),
    )  # fmt: skip


def everybody(config: Config, plan: Plan) -> int:
    """The declared learners, and those beyond them whom the plan lets come."""
    return max([config.learners, *(fault.learner + 1 for fault in plan.faults if isinstance(fault, Scavenge))])


def train_on_tape(
    tape: Tape, config: Config, directory: Path, observers: Sequence[Observer] = (), allowed: Collection[str] = (),
    looked: Looked = unseen,
) -> Outputs:  # fmt: skip
    """The tape's history under real weights; leaves a run of its own, which replays like any other."""
    refuse_used(directory)
    bench = workbench_for(config, allowed)
    hands = TensorHands(bench)
    first = bench.evaluate_theta(*hands.disk.theta())
    plan = msgspec.convert({"faults": tape.header.plan}, Plan)
    looks = Looks(bench, hands, directory, looked)
    with _open_tape(directory, config, plan, header_for(config, plan, bench, tape.header.hardware), bench) as writer:
        outcome = retrain(tape, config, hands, [writer.append, looks, *observers])
    if outcome.fates is None:
        raise UserError(f"tape {tape.path}: holds no syncer, so there is nothing to train on")
    _save_theta(directory / "theta.safetensors", bench, hands)
    final, accuracy = bench.evaluate_theta(*hands.disk.theta()), bench.accuracy_of_theta(*hands.disk.theta())
    return Outputs(
        outcome.fates, directory / "run.tape", first, final, hands.disk.theta_sha256(), accuracy, tuple(looks.taken)
    )


DECIDED = ("preset", "learners", "outer_steps", "protocol", "cluster", "limits")
"""What decisions follow from: a tape has decided them, and what a recipe says of them does not count."""


def config_on_tape(tape: Tape, tables: Mapping[str, Any], assignments: Sequence[str]) -> Config:
    """The tape's config with a recipe's keys and --set laid over it, as far as no decision depends on them."""
    if tape.header.worker is not None:
        raise UserError(f"tape {tape.path}: is of one live worker; --tape takes a virtual run's (atoll simulate tape)")
    taped = from_builtins(tape.header.config)
    wanted = changed(taped, assignments, {key: value for key, value in tables.items() if key not in DECIDED})
    for key in DECIDED:
        if getattr(wanted, key) != getattr(taped, key):
            raise UserError(f"--tape {tape.path}: has decided {key} already; change only seed, model, data, inner or outer")
    return wanted


def patience(config: Config, plan: Plan) -> float:
    c = config.cluster
    step = c.step_seconds * c.slow_factor + 4 * c.latency_seconds + _transfer_seconds(config)
    return plan.healed_at() + config.limits.muster_seconds + 10 * config.outer_steps * step


def _transfer_seconds(config: Config) -> float:
    return config.cluster.parameters * 32 * 2 / (min(config.cluster.up_gbit, config.cluster.down_gbit) * 1e9)


def _open_tape(directory: Path, config: Config, plan: Plan, header: Header, bench: Workbench | None) -> TapeWriter:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {directory}: cannot be made a directory ({error.strerror})") from None
    writer = TapeWriter.create(directory / "run.tape", header)
    (directory / "config.toml").write_text(to_toml(config), encoding="utf8")
    (directory / "plan.toml").write_text(plan.to_toml(), encoding="utf8")
    if bench is not None:
        keep_text(directory, bench)
    return writer


def _save_theta(path: Path, bench: Workbench, hands: TensorHands | FleetHands) -> None:
    model = bench.model_of(*hands.disk.theta())
    save_weights(path, named_tensors(model))


def doubts_about(tape: Source, bench: Workbench | None) -> list[str]:
    """Why decisions or bits may differ here from those on the tape."""
    found: list[str] = []
    for h in tape.headers():
        new = mismatches(h.threads, h.torch_version, h.cpu_capability, h.code_version, decisions_only=bench is None)
        if bench is not None and h.device != "cpu":
            new.append(f"device: {h.device} on the tape, cpu here")
        found += [each for each in new if each not in found]
    h = tape.header
    if bench is not None and bench.fingerprint != h.data_fingerprint:
        found.append(f"data: fingerprint {h.data_fingerprint[:12]} on the tape, {bench.fingerprint[:12]} here")
    return found


def replay_run(
    tape: Source, *, weights: bool, progress: Callable[[int], None] | None = None, doubt: Callable[[str], None] | None = None,
    hands_of: Callable[[Workbench], TensorHands] = TensorHands, allowed: Collection[str] = (),
) -> tuple[Outcome, str | None, list[str]]:  # fmt: skip
    """Decisions, and with `weights` every Theta. What speaks against equal bits is told (`doubt`) before the replay, so
    that a difference finds its explanation beside it."""
    if weights and not tape.header.tensors:
        raise UserError(f"tape {tape.path}: holds no training of ours (atoll sim, or a loop of yours); replay without --weights")
    bench = workbench_for(msgspec.convert(tape.header.config, Config), allowed) if weights else None
    doubts = doubts_about(tape, bench)
    if doubt is not None:
        for sentence in doubts:
            doubt(sentence)
    if bench is None:
        return replay(tape, progress=progress), None, doubts
    hands: Any = hands_of(bench)
    outcome = replay(tape, hands, progress)
    return outcome, hands.disk.theta_sha256(), doubts
