"""One syncer's process with 64 learners: the latency of a round, and the syncer's use of CPU and memory.

    python bench/syncer_load.py [--learners 64] [--seconds 90] [--codec-up fp32] [--width 256] [--mlp 1024] [--layers 6]
    python bench/syncer_load.py --learners 512 --step 2 --settle 90 --codec-up int4 --width 64 --mlp 192 --layers 2 --processes 2

The learners are scripted (bench/scripted.py) and take steps of half a second (`--step`), so each reports twice a second.
P = H = 24, tau = 2, K = 1, adaptive grace, pace 1, as in `decoupled`: a round every step, with nearly all learners. A
contribution is 1 MB: fragments of 262,144 parameters in fp32 up, half of that down in bf16. With --codec-up int4 --width 768
--mlp 2048 --layers 7 contributions are 1 MB too, from fragments of two million parameters, and announcements are 4 MB each.

The latency of a round is the time from FixParticipants to its Stored on the syncer's tape; the announcements are sent at once
after that. A round is late if it takes more than tau median step times: learners have then trained without it for longer than
the preset intends. A dropped participant (one that missed the pull deadline) makes its round late too.
Memory is flat if the median RSS of the last third of the run is at most 1.05 of the first third's. The tape is read
after the run. Prints PASS or FAIL, then one JSON object on a line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from provenance import commit
from scripted import Cluster, Process, Sampler, load_average

from atoll.config import Config, load
from atoll.protocol.membership import IN_SYNC
from atoll.protocol.vocabulary import Discard, FixParticipants, Membership, Received, Report, Stored
from atoll.tape.format import Tape

FLAT = 1.05
SETTLE_SECONDS = 15.0
"""From the first round to the first that counts: by then every learner has Theta, and every time has been measured."""


@dataclass(frozen=True)
class Rounds:
    count: int
    seconds: float
    participants: float
    latency_p50: float
    latency_p99: float
    latency_max: float
    adopted_p50: float
    """From FixParticipants to its first reported adoption, which comes at the end of a step: half a step later on average."""
    adopted_p99: float
    reports_per_second: float
    dropped: int
    silent: int
    late: int


def settings(options: argparse.Namespace) -> Config:
    return load(preset_name="decoupled", overrides={
        "learners": options.learners,
        "total_steps": 1_000_000,
        "data": {"max_bytes": 200_000, "seq_len": 64, "batch_size": 8, "heldout_batches": 1},
        "model": {"numbers": {"width": options.width, "mlp": options.mlp, "layers": options.layers, "heads": 4}},
        "protocol": {"codec_up": options.codec_up},
        "limits": {"start_wait_seconds": 300.0},
    })  # fmt: skip


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measured(tape: Path, tau: int, settle: float) -> Rounds:
    fixed: dict[int, tuple[int, int]] = {}
    latencies: list[tuple[int, int, float]] = []
    adopted: dict[int, float] = {}
    first = end = reports = dropped = silent = 0
    steps: list[int] = []
    troubled: set[int] = set()
    for record in Tape(tape).records():
        now = end = record.now
        for effect in record.effects:
            if isinstance(effect, FixParticipants):
                first = first or now + int(settle * 1e9)
                fixed[effect.outer_step] = (now, len(effect.participants))
            elif isinstance(effect, Discard) and now >= first > 0:
                dropped += 1
                troubled.add(effect.outer_step)
            elif isinstance(effect, Membership) and now >= first > 0 and effect.standing != IN_SYNC:
                silent += 1
        event = record.event
        if not first or now < first:
            continue
        if isinstance(event, Stored):
            began, participants = fixed[event.outer_step]
            if began >= first:
                latencies.append((event.outer_step, participants, (now - began) / 1e9))
        elif isinstance(event, Received) and isinstance(event.envelope.body, Report):
            reports += 1
            steps.append(event.envelope.body.step_nanos)
            for adoption in event.envelope.body.adopted:
                if adoption.version in fixed and fixed[adoption.version][0] >= first:
                    adopted.setdefault(adoption.version, (now - fixed[adoption.version][0]) / 1e9)
    if not latencies or not adopted:
        raise SystemExit("no round was stored and adopted after the run had settled: give it more --seconds")
    limit = tau * statistics.median(steps) / 1e9
    took = [seconds for _, _, seconds in latencies]
    return Rounds(
        count=len(took), seconds=(end - first) / 1e9, participants=statistics.mean(n for _, n, _ in latencies),
        latency_p50=percentile(took, 0.5), latency_p99=percentile(took, 0.99), latency_max=max(took),
        adopted_p50=percentile(list(adopted.values()), 0.5), adopted_p99=percentile(list(adopted.values()), 0.99),
        reports_per_second=reports / ((end - first) / 1e9), dropped=dropped, silent=silent,
        late=sum(1 for t, _, seconds in latencies if seconds > limit or t in troubled),
    )  # fmt: skip


@dataclass(frozen=True)
class Burden:
    syncer_cores: float
    learner_cores: float
    rss_first_third: int
    rss_last_third: int
    rss_peak: int
    machine_idle: float
    """Idle share of all cores: near zero, the machine and not the syncer is the limit."""


def idle_seconds() -> tuple[float, float]:
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return fields[3] + fields[4], sum(fields[:8])


def watched(cluster: Cluster, learners: Sequence[Process], seconds: float, settle: float) -> Burden:
    time.sleep(settle)
    sampler = Sampler(lambda: cluster.syncer.memory("VmRSS"), 0.5)
    began, syncer0, learners0 = time.monotonic(), cluster.syncer.cpu_seconds(), sum(p.cpu_seconds() for p in learners)
    idle0, all0 = idle_seconds()
    sampler.start()
    while time.monotonic() < began + seconds:
        time.sleep(1.0)
        for process in cluster.processes:
            process.check()
    took, seen = time.monotonic() - began, sampler.stop()
    idle1, all1 = idle_seconds()
    third = len(seen) // 3
    return Burden(
        syncer_cores=(cluster.syncer.cpu_seconds() - syncer0) / took,
        learner_cores=(sum(p.cpu_seconds() for p in learners) - learners0) / took,
        rss_first_third=int(statistics.median(seen[:third])), rss_last_third=int(statistics.median(seen[-third:])),
        rss_peak=cluster.syncer.memory("VmHWM"), machine_idle=(idle1 - idle0) / (all1 - all0),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--codec-up", default="fp32")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--mlp", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--step", type=float, default=0.5, help="seconds of a learner's step")
    parser.add_argument("--settle", type=float, default=SETTLE_SECONDS, help="seconds before anything counts")
    parser.add_argument("--out", type=Path, help="append the line to this file")
    parser.add_argument("--processes", type=int, default=1, help="number of processes for the learners")
    options = parser.parse_args()
    config = settings(options)
    tau = config.protocol.overlap
    with Cluster(config) as cluster:
        share = -(-options.learners // options.processes)
        learners = [
            cluster.learners(first, min(share, options.learners - first), "--step", str(options.step))
            for first in range(0, options.learners, share)
        ]
        burden = watched(cluster, learners, options.seconds, options.settle)
        busy = load_average()
        cluster.syncer.kill()  # before the learners leave, so that leaving is not on its tape
        rounds = measured(cluster.tape, tau, options.settle)
        tape_bytes = cluster.tape.stat().st_size
    growth = burden.rss_last_third / burden.rss_first_third
    print(f"{options.learners} scripted learners, {options.codec_up} up, {rounds.seconds:.0f} s, load average {busy}")
    print(f"rounds: {rounds.count}, of {rounds.participants:.1f} learners each; {rounds.reports_per_second:.0f} reports a second")
    print(f"latency, fixed to stored and announced: p50 {rounds.latency_p50 * 1e3:.0f} ms, p99 {rounds.latency_p99 * 1e3:.0f} ms,"
          f" longest {rounds.latency_max * 1e3:.0f} ms")  # fmt: skip
    print(f"fixed to first adoption reported: p50 {rounds.adopted_p50 * 1e3:.0f} ms, p99 {rounds.adopted_p99 * 1e3:.0f} ms")
    print(f"CPU: the syncer {burden.syncer_cores:.2f} of a core, the load generator {burden.learner_cores:.2f},"
          f" idle {burden.machine_idle:.0%} of the machine")  # fmt: skip
    print(f"RSS: {burden.rss_first_third / 1e6:.0f} MB in the first third, {burden.rss_last_third / 1e6:.0f} MB in the last"
          f" ({growth:.3f}); peak {burden.rss_peak / 1e6:.0f} MB; tape {tape_bytes / 1e6:.0f} MB")  # fmt: skip
    if burden.machine_idle < 0.05:
        print("the machine is saturated: late rounds need not be the syncer's fault")
    on_time = rounds.late == 0
    print(f"{'PASS' if on_time else 'FAIL'} no round late: {rounds.late} of {rounds.count} took over {tau} step times or lost a"
          f" participant ({rounds.dropped} dropped, {rounds.silent} changes of standing)")  # fmt: skip
    print(f"{'PASS' if growth <= FLAT else 'FAIL'} memory flat: {growth:.3f} (at most {FLAT})")
    line = json.dumps({
        "bench": "syncer_load", "learners": options.learners, "step": options.step, "codec_up": options.codec_up,
        "load_average": busy, "rounds": asdict(rounds), "burden": asdict(burden), "cores": os.cpu_count(),
        "machine": platform.machine(), "commit": commit(),
    })  # fmt: skip
    print(line)
    if options.out is not None:
        with options.out.open("a", encoding="utf8") as file:
            file.write(line + "\n")
    return 0 if on_time and growth <= FLAT else 1


if __name__ == "__main__":
    sys.exit(main())
