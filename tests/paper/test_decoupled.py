"""Decoupled DiLoCo (docs/reference/arithmetic.md): each clause that can be stated on machines."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache
from itertools import pairwise

import pytest
import torch
from tiny import Run, tensors_in, tiny_config

from atoll.chaos import ChaosPlan, Clog, Kill, KillSyncer, Partition, Pause, Slow
from atoll.codecs import codec
from atoll.config import Config, load, warnings
from atoll.ids import SYNCER, Nanos, nanos
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import (
    NO_VERSION,
    AbortRound,
    Accept,
    Adopt,
    Announce,
    ConnectionLost,
    Contribution,
    Effect,
    Envelope,
    Event,
    Finish,
    FixParticipants,
    InnerStep,
    Keep,
    LoadState,
    LoadTheta,
    Merge,
    Received,
    Recovered,
    Refuse,
    Reissue,
    Report,
    Send,
    Stage,
    Started,
    StateTransfer,
    StepDone,
    Store,
    Stored,
    Tick,
    Ticket,
    Wait,
)  # fmt: skip
from atoll.rules import Schedule
from atoll.sim.checkers import Safety
from atoll.sim.cluster import VirtualCluster


class Story:
    """A run without tensors, every event kept, every invariant checked."""

    def __init__(self, config: Config, plan: ChaosPlan | None = None) -> None:
        self.log: list[tuple[Nanos, int, Event, tuple[Effect, ...]]] = []
        safety = Safety(config)
        self.cluster = VirtualCluster(config, plan=plan, observers=[safety, self._watch])
        safety.attach(self.cluster)
        self.cluster.run(until_seconds=50_000)
        self.config = config

    def _watch(self, now: Nanos, worker: int, event: Event, effects: list[Effect]) -> None:
        self.log.append((now, worker, event, tuple(effects)))

    def effects(self, *kinds: type, of: int | None = None) -> list:  # type: ignore[type-arg]
        return [e for _, w, _, fx in self.log if of in (None, w) for e in fx if isinstance(e, kinds)]

    def bodies(self, kind: type, to: int | None = None) -> list:  # type: ignore[type-arg]
        sent = [s.envelope for s in self.effects(Send)]
        return [e.body for e in sent if isinstance(e.body, kind) and to in (None, e.receiver)]

    def mean_participants(self) -> float:
        sizes = [len(f.participants) for f in self.effects(FixParticipants)]
        return sum(sizes) / len(sizes)


def small(learners: int = 3, total_steps: int = 60, **protocol: object) -> Config:
    cluster = protocol.pop("cluster", {})
    limits = protocol.pop("limits", {})
    protocol = {"fragments": 6, "local_steps_per_round": 6} | protocol
    return load(preset_name="decoupled", overrides={
        "learners": learners, "total_steps": total_steps, "protocol": protocol, "cluster": cluster, "limits": limits,
    })  # fmt: skip


# ---------------------------------------------------------------- the learner


def test_learner_reports_after_every_inner_step() -> None:
    """Report t_m, the counters and its own step duration (metadata only, every inner step)."""
    story = Story(small())
    for m in range(3):
        steps = [fx for _, w, e, fx in story.log if w == m and isinstance(e, StepDone)]
        reports = [[s.envelope.body for s in fx if isinstance(s, Send) and isinstance(s.envelope.body, Report)] for fx in steps]
        assert all(len(r) == 1 for r in reports[:-1])
        assert [r[0].local_step for r in reports[:-1]] == list(range(1, len(reports)))
        assert all(r[0].step_nanos > 0 for r in reports[:-1])


def test_learner_adopts_at_the_first_boundary_and_zeroes_the_fragments_counters() -> None:
    """Drain whatever fragments have arrived: adopt, zero that fragment's two counters, take over the syncer's outer step."""
    story = Story(small())
    waiting: dict[int, dict[int, int]] = defaultdict(dict)
    since: dict[int, Counter[int]] = defaultdict(Counter)
    staged: dict[tuple[int, int], int] = {}
    weighed = 0
    for _, m, event, effects in story.log:
        if m == SYNCER:
            continue
        if isinstance(event, StepDone):
            since[m].update(range(6))
        for e in effects:
            match e:
                case Keep(fragment=p, version=v):
                    waiting[m][p] = v
                case Adopt(fragment=p, version=v):
                    assert waiting[m].pop(p) == v
                    since[m][p] = 0
                case Stage(fragment=p):
                    staged[m, p] = since[m][p]
                case InnerStep():
                    assert not waiting[m]  # nothing that arrived is left for a later boundary
                case Send(envelope=envelope) if isinstance(envelope.body, Contribution):
                    assert envelope.body.c_steps == staged[m, envelope.body.fragment]
                    weighed += 1
                case _:
                    pass
    assert weighed > 100


def test_learner_never_waits() -> None:
    """It never waits."""
    plan = ChaosPlan((Clog(10.0, 0, SYNCER, 8.0), KillSyncer(25.0, 6.0), Partition(40.0, 1, SYNCER, 8.0), Pause(20.0, 2, 5.0)))
    assert Story(small(), plan).effects(Wait) == []


def test_learner_goes_on_while_the_syncer_is_away() -> None:
    """It never waits; while the syncer is away the learner goes on in its own shard."""
    story = Story(small(), ChaosPlan((KillSyncer(20.0, 10.0),)))
    steps = [now for now, w, e, _ in story.log if w == 0 and isinstance(e, StepDone) and nanos(20.0) < now < nanos(30.0)]
    assert 8 <= len(steps) <= 12


def test_stalled_learner_applies_all_it_missed_when_it_resumes() -> None:
    """A stalled learner applies all it missed when it resumes."""
    story = Story(small(limits={"silence_steps": 1000.0, "first_pull_seconds": 2.0}), ChaosPlan((Pause(20.2, 2, 6.0),)))
    resumed = [fx for now, w, e, fx in story.log if w == 2 and now >= nanos(26.2) and isinstance(e, StepDone)]
    assert len([e for e in resumed[0] if isinstance(e, Adopt)] + [e for e in resumed[1] if isinstance(e, Adopt)]) >= 4
    assert not [e for e in story.effects(LoadState, LoadTheta, of=2) if isinstance(e, LoadState)]


def test_training_ends_by_the_global_outer_step() -> None:
    """Training ends by the *global* outer step; the inner learning rate is a function of outer_step / T."""
    story = Story(small(cluster={"slow_share": 0.34, "slow_factor": 2.0}))
    assert story.cluster.syncer.outer_step == 60
    assert [b.outer_step for b in story.bodies(Finish)] == [60, 60, 60]
    done = Counter(w for _, w, e, _ in story.log if isinstance(e, StepDone))
    assert done[0] < done[2]  # the slow one did fewer local steps, and the run did not wait for it
    known = [s.outer_step for s in story.effects(InnerStep, of=2)]
    assert known == sorted(known) and known[-1] >= 55


# ---------------------------------------------------------------- rounds


def test_merge_weighs_quantity_times_quality() -> None:
    """w = c_tokens * (c_tokens / c_steps): quantity times quality. c_steps = 0 gives 0."""
    story = Story(small())
    sent = {}
    for _, w, event, effects in story.log:
        if w == SYNCER and isinstance(event, Received) and isinstance(event.envelope.body, Contribution):
            body = event.envelope.body
            sent[event.envelope.sender, body.outer_step, body.fragment] = body
        for merge in effects if w == SYNCER else ():
            if isinstance(merge, Merge):
                for share in merge.shares:
                    c = sent[share.learner, merge.outer_step, merge.fragment]
                    assert share.weight == c.c_tokens * c.c_tokens / c.c_steps


def test_absent_learner_has_no_weight() -> None:
    """Who is absent has weight 0."""
    story = Story(small(quorum=1, grace="none", pace=0.0))
    fixed = {f.outer_step: f.participants for f in story.effects(FixParticipants)}
    assert any(len(p) < 3 for p in fixed.values())
    for merge in story.effects(Merge):
        assert tuple(s.learner for s in merge.shares) == fixed[merge.outer_step]


def test_result_goes_to_every_connected_learner_and_not_only_to_participants() -> None:
    """Store durably; broadcast (Theta_p, t) to every connected learner."""
    story = Story(small(quorum=1, grace="none", pace=0.0))
    told = defaultdict(set)
    for e in story.effects(Send, of=SYNCER):
        if isinstance(e.envelope.body, Announce) and e.envelope.body.outer_step > 0:
            told[e.envelope.receiver].add(e.envelope.body.fragment)
    assert all(told[m] == set(range(6)) for m in range(3))


def test_announcement_comes_only_after_the_outer_step_is_stored() -> None:
    """Store durably; broadcast."""
    story = Story(small())
    stored = 0
    for _, w, event, effects in story.log:
        if w == SYNCER:
            stored = event.outer_step if isinstance(event, Stored) else stored
            told = [e.envelope.body.outer_step for e in effects if isinstance(e, Send) and isinstance(e.envelope.body, Announce)]
            assert all(t <= stored for t in told)


def test_fresh_means_a_later_local_step_than_the_one_last_counted() -> None:
    """Fresh [ours]: a learner is fresh if its reported local_step exceeds the one it was last counted with, in any round."""
    story = Story(small(quorum=1, grace="none", pace=0.0))
    reported: dict[int, int] = {}
    counted: dict[int, int] = defaultdict(int)
    for _, w, event, effects in story.log:
        if w != SYNCER:
            continue
        if isinstance(event, Received) and isinstance(event.envelope.body, Report):
            reported[event.envelope.sender] = event.envelope.body.local_step
        for fixed in effects:
            if isinstance(fixed, FixParticipants):
                assert all(reported[m] > counted[m] for m in fixed.participants)
                counted.update({m: reported[m] for m in fixed.participants})


def test_gathering_is_serial_and_at_most_tau_rounds_overlap_on_different_fragments() -> None:
    """Gathering is serial: t+1 opens when t's participants are fixed; at most tau rounds overlap, on different fragments."""
    story = Story(small(cluster={"latency_seconds": 0.6}))
    in_flight: dict[int, tuple[int, ...]] = {}
    deepest = 0
    order = []
    for _, w, event, effects in story.log:
        if w != SYNCER:
            continue
        if isinstance(event, Stored):
            in_flight.pop(event.outer_step, None)
        for e in effects:
            if isinstance(e, FixParticipants):
                order.append(e.outer_step)
                assert not set(e.fragments) & {p for due in in_flight.values() for p in due}
                in_flight[e.outer_step] = e.fragments
                deepest = max(deepest, len(in_flight))
    assert order == list(range(1, 61))
    assert deepest == 2


def test_empty_outer_step_still_consumes_fresh_reports() -> None:
    """An outer step with nothing due (P < H) still consumes K fresh reports."""
    story = Story(small(fragments=2))
    fixed = story.effects(FixParticipants)
    assert [f.fragments for f in fixed[:6]] == [(), (), (1,), (), (), (0,)]
    assert all(f.participants for f in fixed)
    assert {b.outer_step % 3 for b in story.bodies(Tick)} == {1, 2}


def test_restarted_syncer_tapes_the_abort_and_gathers_the_same_outer_step_again() -> None:
    """A syncer that restarts before storing tapes RoundAborted and gathers the same outer step again."""
    story = Story(small(), ChaosPlan((KillSyncer(20.4, 3.0),)))
    aborted = story.effects(AbortRound)
    assert aborted and {a.reason for a in aborted} == {Reason(Why.NOT_STORED)}
    stores = [s.outer_step for s in story.effects(Store)]
    assert sorted(set(stores)) == list(range(1, 61))
    committed = [e.outer_step for _, w, e, _ in story.log if isinstance(e, Stored)]
    assert committed == list(range(1, 61))


# ---------------------------------------------------------------- pull


def test_pull_is_answered_from_the_copy_staged_at_a_boundary_with_its_counters() -> None:
    """A pull returns the staged copy with its local_step, counters and anchor version; those counters are the ones weighed."""
    story = Story(small())
    staged: dict[tuple[int, int], int] = {}
    answered = 0
    for _, w, event, effects in story.log:
        for e in effects if w != SYNCER else ():
            if isinstance(e, Stage):
                staged[w, e.fragment] = e.local_step
            if isinstance(e, Send) and isinstance(e.envelope.body, Contribution):
                body = e.envelope.body
                assert body.local_step == staged[w, body.fragment]
                answered += isinstance(event, Received)
    assert answered > 100  # in mid-step, at once


def test_learner_stages_at_every_boundary_what_is_due_in_its_next_tau_plus_1_steps() -> None:
    """Those of the tau rounds that may be in flight, and of the one beyond them, which is pulled next."""
    story = Story(small())
    schedule = Schedule(story.config)
    known = 0
    for _, w, event, effects in story.log:
        if w != 0:
            continue
        if isinstance(event, Received) and isinstance(event.envelope.body, Announce):
            known = max(known, event.envelope.body.outer_step)
        if isinstance(event, StepDone) and not any(type(e).__name__ == "Finished" for e in effects):
            wanted = schedule.due_between(known + 1, known + 3)
            assert {e.fragment for e in effects if isinstance(e, Stage)} == set(wanted)


# ---------------------------------------------------------------- the wire


def test_contribution_names_the_version_it_is_against_and_that_version_is_kept() -> None:
    """A learner sends its difference to the version it last adopted, tagged with that version."""
    story = Story(small())
    held: dict[tuple[int, int], int] = {}
    for _, w, _, effects in story.log:
        for e in effects:
            if isinstance(e, Adopt):
                held[w, e.fragment] = e.version
            if isinstance(e, Send) and isinstance(e.envelope.body, Contribution):
                assert e.envelope.body.anchor <= held[w, e.envelope.body.fragment]
    assert story.effects(Refuse) == []
    assert len(story.effects(Accept)) > 100


def test_outer_gradient_is_anchored_at_the_syncers_present_value() -> None:
    """delta_m = Theta_p - theta_{m,p}: the syncer rebuilds theta from its copy of the version it was sent against."""
    run = Run(tiny_config("decoupled", learners=1, total_steps=12, outer={"outer_optimizer": "sgd", "outer_learning_rate": 1.0},
                          protocol={"fragmentation": "whole", "overlap": 1, "codec_up": "fp32", "codec_down": "fp32",
                                    "merge": "mean"}))  # fmt: skip
    # with one learner and outer SGD at rate 1, Theta must become exactly that learner's weights, whatever its anchor was
    versions = run.executor.disk.versions[0]
    for s in run.contributions():
        after, base = versions.get(s.body.outer_step), versions.get(s.body.anchor)
        if after is not None and base is not None:
            theta = base.announced - codec("fp32").decode(s.payload.content[0])
            torch.testing.assert_close(after.theta, theta, rtol=1e-5, atol=1e-6)


def test_difference_against_a_forgotten_version_is_refused_and_its_learner_recovers() -> None:
    """A difference against a version that is gone is refused and that learner goes through recovery: never re-based."""
    story = Story(
        small(total_steps=120, grace="none", limits={"versions_max": 2, "silence_steps": 1e6, "first_pull_seconds": 1.0}),
        ChaosPlan((Pause(20.2, 2, 40.0),)),
    )
    assert story.cluster.syncer.outer_step == 120
    reasons = {r.reason for r in story.effects(Recovered) if r.learner == 2}
    assert any(r.why in (Why.NOT_REBASED, Why.VERSION_FORGOTTEN) for r in reasons)


def test_announced_version_is_the_previous_plus_the_decoded_and_the_residual_stays() -> None:
    """Down with a lossy codec: the announced version is previous + decoded, the syncer keeps the residual."""
    run = Run(tiny_config("decoupled", total_steps=24, protocol={"fragmentation": "balanced", "fragments": 2, "overlap": 1,
                                                                  "codec_down": "int4"}))  # fmt: skip
    newest = run.executor.disk.newest()
    assert any(not torch.equal(v.theta, v.announced) for v in newest)
    for p, versions in enumerate(run.executor.disk.versions):
        steps = sorted(versions)
        for before, after in pairwise(steps):
            assert torch.equal(
                versions[after].announced, versions[before].announced + codec("int4").decode(versions[after].packet)
            ), p


def test_learners_anchor_is_the_announced_version_byte_for_byte() -> None:
    """The learner's anchor equals the announced version byte for byte."""
    run = Run(tiny_config("decoupled", total_steps=24, protocol={"fragmentation": "balanced", "fragments": 2, "overlap": 1}))
    checked = 0
    for m, learner in run.executor.learners.items():
        machine = run.cluster.learner(m)
        for p, anchor in enumerate(learner.anchors):
            kept = run.executor.disk.versions[p].get(machine.held[p])
            if kept is not None:
                assert torch.equal(anchor, kept.announced)
                checked += 1
    assert checked == 4


def test_learner_that_lacks_the_previous_version_gets_the_fragment_in_full() -> None:
    """A learner that lacks the previous version gets the fragment in full."""
    story = Story(small(), ChaosPlan((Kill(20.0, 2, 5.0),)))
    ways = Counter(b.previous == NO_VERSION for b in story.bodies(Announce, to=2) if b.outer_step > 0)
    assert ways[True] >= 1 and ways[False] > 20


# ---------------------------------------------------------------- recovery


def test_newcomer_loads_from_a_healthy_peer_that_has_seen_what_came_before_it() -> None:
    """The newcomer asks a healthy peer; the peer answers once it has seen t_s. The paper's t_s is the newcomer's first broadcast;
    ours is the outer step at its Hello, since it is sent all that is announced after that."""
    story = Story(small(), ChaosPlan((Kill(20.0, 2, 5.0),)))
    (ticket,) = story.bodies(Ticket)
    (transfer,) = story.bodies(StateTransfer)
    assert transfer.outer_step >= ticket.outer_step > 15
    assert [r.source for r in story.effects(Recovered) if r.learner == 2] == [SYNCER, 0]
    assert story.effects(LoadState) == [LoadState(0, transfer.held)]


def test_peer_answers_without_pausing() -> None:
    """The peer answers, without pausing."""
    story = Story(small(), ChaosPlan((Kill(20.0, 2, 5.0),)))
    gaps = [now for now, w, e, _ in story.log if w == 0 and isinstance(e, StepDone)]
    assert max(b - a for a, b in pairwise(gaps)) < nanos(1.4)


def test_newcomer_applies_what_it_buffered_and_only_the_newest_of_each_fragment() -> None:
    """The newcomer buffers later broadcasts, only the newest version per fragment, and applies them when the transfer ends."""
    config = small(cluster={"parameters": 40_000_000, "up_gbit": 1.0})  # the state takes seconds to come
    story = Story(config, ChaosPlan((Kill(20.0, 2, 5.0),)))
    (at,) = [i for i, (_, w, _, fx) in enumerate(story.log) if w == 2 and any(isinstance(e, LoadState) for e in fx)]
    entered = next(fx for _, w, _, fx in story.log[at + 1 :] if w == 2 and any(isinstance(e, InnerStep) for e in fx))
    adopted = [e for e in entered if isinstance(e, Adopt)]
    assert len(adopted) >= 2 and len({a.fragment for a in adopted}) == len(adopted)


def test_newcomer_never_takes_over_the_peers_data_position() -> None:
    """It never takes over the peer's data position, RNG or error-feedback residual."""
    run = Run(tiny_config("decoupled", learners=3, total_steps=40, protocol={"fragmentation": "balanced", "fragments": 2,
                                                                             "overlap": 1, "error_feedback": True}),
              plan=ChaosPlan((Kill(10.4, 2, 3.0),)))  # fmt: skip
    (transfer,) = [s for s in run.sent if isinstance(s.body, StateTransfer)]
    assert set(transfer.payload.content) == {"tensors", "optimizer", "anchors", "round_start", "kept"}
    restarted = max(i for i, (_, w, e, _) in enumerate(run.log) if w == 2 and isinstance(e, Started))
    streams = {e.stream for _, w, _, fx in run.log[restarted:] if w == 2 for e in fx if isinstance(e, InnerStep)}
    assert streams == {2}
    assert tensors_in(transfer.payload.content["optimizer"])


def test_no_reachable_peer_means_theta_from_the_syncer_with_fresh_moments() -> None:
    """No reachable peer: the syncer sends all of Theta, moments start fresh, the reason goes on the tape."""
    story = Story(small(learners=1), ChaosPlan((Kill(20.0, 0, 5.0),)))
    assert [e.reason for e in story.effects(LoadTheta)] == [Reason(Why.NOTHING_MERGED), Reason(Why.NO_PEER)]
    assert story.effects(LoadState) == []


def test_transfer_that_nobody_hears_of_means_theta_from_the_syncer() -> None:
    """No state within the patience of its ticket: the syncer sends all of Theta."""
    story = Story(small(learners=2, quorum=1, pace=1.0), ChaosPlan((Kill(20.0, 1, 4.0), Partition(23.0, 0, 1, 60.0))))
    assert {e.reason.why for e in story.effects(LoadTheta)} > {Why.NOTHING_MERGED}
    assert story.effects(LoadState) == []


def test_short_stall_needs_no_recovery() -> None:
    """A short stall needs no recovery."""
    story = Story(small(), ChaosPlan((Partition(20.0, 1, SYNCER, 4.0),)))
    assert any(isinstance(e, ConnectionLost) for _, w, e, _ in story.log if w == 1)
    assert [r.learner for r in story.effects(Recovered)] == [0, 1, 2]  # the first joins only


def test_joining_for_the_first_time_is_the_same_path() -> None:
    """Joining for the first time is the same path (scavenged compute)."""
    story = Story(small(limits={"start_wait_seconds": 3.0}), ChaosPlan((Kill(0.0, 2, 25.0),)))
    late = [r for r in story.effects(Recovered) if r.learner == 2]
    assert [r.source for r in late] == [0]
    assert any(2 in f.participants for f in story.effects(FixParticipants) if f.outer_step > 40)


# ---------------------------------------------------------------- leases and fates


def test_units_of_a_lost_learner_are_trained_by_somebody() -> None:
    """Unsettled units of a lost learner are re-issued (at least once; repeats counted)."""
    story = Story(small(total_steps=150), ChaosPlan((Kill(20.0, 2, 100.0),)))
    (reissue,) = story.effects(Reissue)
    drawn = {(s.stream, s.batch // 6) for _, w, _, fx in story.log if w in (0, 1) for s in fx if isinstance(s, InnerStep)}
    assert reissue.learner == 2 and {(u.stream, u.index) for u in reissue.units} <= drawn
    assert 1 <= reissue.repeats <= len(reissue.units)


def test_every_token_has_a_fate_and_they_add_up() -> None:
    """Fates: merged; discarded; in flight. They add up; the unit is (token, fragment), so trained = P x tokens."""
    plan = ChaosPlan((Kill(20.0, 2, 5.0), Pause(30.0, 1, 12.0), Slow(10.0, 0, 3.0, 20.0), KillSyncer(45.0, 3.0)))
    story = Story(small(), plan)
    fates = story.cluster.syncer.fates()
    assert fates.add_up() and fates.merged > fates.trained // 2
    assert {"overlap", "lost"} <= set(fates.discarded)
    tokens = defaultdict(int)
    for _, w, event, _ in story.log:
        if w == SYNCER and isinstance(event, Received) and isinstance(event.envelope.body, Report):
            key = (event.envelope.sender, event.envelope.incarnation)
            tokens[key] = max(tokens[key], event.envelope.body.tokens)
    assert fates.trained >= 6 * sum(tokens.values()) * 0.99


# ---------------------------------------------------------------- grace, pace and the heterogeneity story


def uneven(**protocol: object) -> Config:
    """Eight learners, half of them 18 % slower, 10 % noise; 75 outer steps, on the default network."""
    return load(preset_name="decoupled", overrides={
        "learners": 8, "total_steps": 75, "protocol": protocol,
        "cluster": {"slow_share": 0.5, "slow_factor": 1.18, "step_noise": 0.10},
    })  # fmt: skip


@cache
def bare_quorum_of_one() -> Story:
    """Without grace and pace: two sentences are about it."""
    return Story(uneven(quorum=1, grace="none", pace=0.0))


def test_quorum_of_all_makes_the_fast_learners_idle() -> None:
    """Everybody is merged, and the fast wait for the slow; the waits are on the tape."""
    story = Story(uneven(quorum="all"))
    waits = Counter(w for _, w, _, fx in story.log for e in fx if isinstance(e, Wait))
    assert all(waits[m] > 0 for m in range(4, 8))
    waited = {m: story.cluster.learner(m).waited for m in range(8)}
    assert min(waited[m] for m in range(4, 8)) > max(waited[m] for m in range(4))
    assert story.mean_participants() == 8.0


@pytest.mark.parametrize("learners", [1, 2])
def test_nobody_waits_for_a_quorum_that_is_a_number(learners: int) -> None:
    """Though it be as many learners as there are: on a slow link a learner trains on, and its rounds come when they come."""
    slow = {"up_gbit": 1e-5, "down_gbit": 1e-5, "latency_seconds": 2.0}
    story = Story(load(preset_name="decoupled", overrides={
        "learners": learners, "total_steps": 60, "protocol": {"quorum": learners}, "cluster": slow,
    }))  # fmt: skip
    assert not story.effects(Wait)
    assert all(story.cluster.learner(m).waited == 0 for m in range(learners))


def test_quorum_of_one_without_grace_and_pace_merges_about_one_learner_a_round() -> None:
    """K = 1 without grace and with pace 0 reproduces the paper's bad case; it is allowed and warns."""
    story = bare_quorum_of_one()
    assert story.mean_participants() < 1.6
    assert story.effects(Wait) == []
    assert any("quorum = 1" in w for w in warnings(story.config))


def test_quorum_of_one_with_adaptive_grace_and_pace_merges_most_and_nobody_waits() -> None:
    """Every learner that reports inside the window joins; pace 1 by default: most are merged and nobody ever waits."""
    story = Story(uneven(quorum=1, grace="adaptive", pace=1.0))
    assert story.mean_participants() >= 6
    assert story.effects(Wait) == []
    assert all(story.cluster.learner(m).waited == 0 for m in range(8))


def test_grace_alone_already_merges_more_than_none() -> None:
    """Grace window: every learner that reports inside the window joins."""
    held = Story(uneven(quorum=1, grace="adaptive", pace=0.0))
    assert held.mean_participants() > 2 * bare_quorum_of_one().mean_participants()


def test_ramp_waits_in_its_synchronous_part_only() -> None:
    """While H_now <= tau the ramp is synchronous; waiting is allowed there and reported."""
    config = load(preset_name="decoupled_ramp", overrides={"learners": 3, "total_steps": 120})
    story = Story(config)
    schedule = Schedule(config)
    sync = [t for t in range(1, 121) if schedule.policy(t).plain_average]
    fixed = {f.outer_step: f for f in story.effects(FixParticipants)}
    assert all(fixed[t].participants == (0, 1, 2) for t in sync)
    assert {m.plain_average for m in story.effects(Merge) if m.outer_step in sync} == {True}
    assert {m.plain_average for m in story.effects(Merge) if m.outer_step > max(sync)} == {False}
    last_wait = max(now for now, _, _, fx in story.log for e in fx if isinstance(e, Wait))
    end_of_sync = next(now for now, w, e, _ in story.log if isinstance(e, Stored) and e.outer_step == max(sync) + 2)
    assert last_wait < end_of_sync


@pytest.mark.parametrize("seed", range(3))
def test_vector_clocks_follow_from_the_counts_on_messages(seed: int) -> None:
    """A message has its sender's own count. What its sender knew of everybody else is the fold of the counts that it had received
    before, entry by entry the largest: it only grows, and nobody knows more of a worker than that worker itself."""
    config = load(preset_name="decoupled", overrides={
        "seed": seed, "learners": 3, "total_steps": 30, "protocol": {"fragments": 6, "local_steps_per_round": 6},
    })  # fmt: skip
    clocks: dict[int, Counter[int]] = {worker: Counter() for worker in (SYNCER, 0, 1, 2)}
    carried: dict[Envelope, Counter[int]] = {}
    for _, worker, event, effects in Story(config).log:
        mine = clocks[worker]
        if isinstance(event, Received):
            mine |= carried.pop(event.envelope)
        for e in effects:
            if isinstance(e, Send):
                assert e.envelope.clock >= mine[worker]
                mine[worker] = e.envelope.clock
                carried[e.envelope] = mine.copy()
        assert all(clocks[other][worker] <= mine[worker] for other in clocks)
    assert clocks[SYNCER][SYNCER] == 30 and all(clocks[m][m] > 20 for m in range(3))
    assert all(clocks[m][other] > 10 for m in range(3) for other in range(3)), "learners know of each other through the syncer"
