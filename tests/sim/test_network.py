"""The virtual network: exact times, FIFO under clogs and partitions, and the ways a connection dies."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config import Config, load
from atoll.ids import SECOND, SYNCER, nanos
from atoll.protocol.interface import Payload
from atoll.protocol.vocabulary import Announce, Connected, ConnectionLost, Envelope, Event, Tick
from atoll.sim.hardware import Hardware
from atoll.sim.network import FRAME_BYTES, Network
from atoll.sim.world import World


def config(**cluster: float) -> Config:
    return load(overrides={"cluster": {"latency_seconds": 0.02, "up_gbit": 1.0, "down_gbit": 1.0} | cluster})


class Town:
    """Every worker's receiver: notes what arrives and what happens, with the time."""

    def __init__(self, **cluster: float) -> None:
        self.world = World()
        self.network = Network(config(**cluster), self.world, self)
        self.down: set[int] = set()
        self.arrived: list[tuple[int, int, int]] = []
        self.happened: list[tuple[int, int, Event]] = []
        self._seq = 0

    def is_up(self, worker: int) -> bool:
        return worker not in self.down

    def dispatch(self, worker: int, event: Event) -> None:
        self.happened.append((self.world.now, worker, event))

    def arrive(self, envelope: Envelope, payload: Payload | None) -> None:
        self.arrived.append((self.world.now, envelope.receiver, envelope.seq))

    def connected(self, *learners: int) -> Town:
        for learner in learners:
            self.network.dial(learner)
        self.happened.clear()
        return self

    def send(self, a: int, b: int, payload: int = 0) -> int:
        self._seq += 1
        payload = Payload("packet", payload, None) if payload else None
        body = Announce(1, 0, -1, ()) if payload else Tick(1)
        self.network.send(Envelope(a, 0, b, self._seq, 0, body), payload)
        return self._seq

    def at(self, when: float, call, *args) -> None:  # type: ignore[no-untyped-def]
        self.world.at(nanos(when), call, *args)

    def run(self, until: float = 1000.0) -> None:
        while self.world._heap and self.world._heap[0][0] <= nanos(until):
            self.world.step()


FRAME = 8 * FRAME_BYTES  # nanoseconds at 1 Gbit/s

# ---------------------------------------------------------------- arithmetic


def test_message_takes_its_bits_over_the_rate_plus_the_latency() -> None:
    town = Town().connected(0)
    town.send(0, SYNCER, 1_000_000)
    town.run()
    assert town.arrived == [(FRAME + 8_000_000 + 20_000_000, SYNCER, 1)]


def test_message_down_goes_at_the_rate_down_and_up_at_the_rate_up() -> None:
    town = Town(up_gbit=0.5, down_gbit=4.0).connected(0)
    town.send(0, SYNCER, 1000)
    town.send(SYNCER, 0, 1000)
    town.run()
    bits = 8 * (FRAME_BYTES + 1000)
    assert sorted(town.arrived) == [(bits // 4 + 20_000_000, 0, 2), (bits * 2 + 20_000_000, SYNCER, 1)]


def test_messages_one_after_the_other_share_the_line() -> None:
    town = Town().connected(0)
    for _ in range(3):
        town.send(0, SYNCER, 1000)
    town.run()
    one = FRAME + 8000
    assert [when for when, _, _ in town.arrived] == [k * one + 20_000_000 for k in (1, 2, 3)]


def test_message_after_a_pause_does_not_wait_for_the_one_before() -> None:
    town = Town().connected(0)
    town.send(0, SYNCER, 1000)
    town.at(1.0, town.send, 0, SYNCER, 1000)
    town.run()
    assert town.arrived[1][0] == SECOND + FRAME + 8000 + 20_000_000


def test_directions_and_links_do_not_share_bandwidth() -> None:
    town = Town().connected(0, 1)
    for a, b in ((0, SYNCER), (SYNCER, 0), (1, SYNCER), (0, 1)):
        town.send(a, b, 1000)
    town.run()
    assert {when for when, _, _ in town.arrived} == {FRAME + 8000 + 20_000_000}


# ---------------------------------------------------------------- dialling


def test_dial_connects_both_ends() -> None:
    town = Town()
    town.network.dial(0)
    assert town.happened == [(0, SYNCER, Connected(0)), (0, 0, Connected(SYNCER))]


def test_dial_of_a_syncer_that_is_down_tries_again_every_half_second() -> None:
    town = Town()
    town.down.add(SYNCER)
    town.network.dial(0)
    town.at(1.2, town.down.discard, SYNCER)
    town.run(5.0)
    assert [when for when, _, _ in town.happened] == [nanos(1.5)] * 2


def test_dial_by_one_that_is_down_stops() -> None:
    town = Town()
    town.down.add(0)
    town.network.dial(0)
    town.run(5.0)
    assert town.happened == []


def test_dial_twice_connects_once() -> None:
    town = Town().connected(0)
    town.network.dial(0)
    assert town.happened == []


def test_learners_connect_to_each_other_when_something_is_sent() -> None:
    town = Town()
    town.send(0, 1)
    town.run()
    assert [(w, s) for _, w, s in town.arrived] == [(1, 1)]


def test_message_to_a_learner_that_is_down_is_answered_with_a_loss() -> None:
    town = Town()
    town.down.add(1)
    town.send(0, 1)
    town.run()
    assert town.happened == [(20_000_000, 0, ConnectionLost(1, "no answer"))]


def test_message_to_a_syncer_not_connected_goes_nowhere() -> None:
    town = Town()
    town.send(0, SYNCER)
    town.run()
    assert town.arrived == town.happened == []


# ---------------------------------------------------------------- clogs


def test_clog_holds_messages_back_and_delivers_them_late_in_order() -> None:
    town = Town().connected(0)
    town.send(0, SYNCER)  # on its way when the clog comes
    unblock = town.network.block(0, SYNCER, one_way=False, breaks=False)
    for k in range(3):
        town.at(0.1 * (k + 1), town.send, 0, SYNCER)
    town.at(10.0, unblock)  # far beyond detect_seconds: a clog does not break the line
    town.run()
    assert [seq for _, _, seq in town.arrived] == [1, 2, 3, 4]
    assert all(when >= 10 * SECOND for when, _, _ in town.arrived)
    assert town.happened == []


def test_clogs_that_overlap_hold_until_the_last_lets_go() -> None:
    town = Town().connected(0)
    first = town.network.block(0, SYNCER, one_way=False, breaks=False)
    second = town.network.block(0, SYNCER, one_way=False, breaks=False)
    town.send(0, SYNCER)
    town.at(1.0, first)
    town.at(2.0, second)
    town.run()
    assert [when // SECOND for when, _, _ in town.arrived] == [2]


def test_clog_of_one_link_leaves_the_others_alone() -> None:
    town = Town().connected(0, 1)
    town.network.block(0, SYNCER, one_way=False, breaks=False)
    town.send(1, SYNCER)
    town.send(0, SYNCER)
    town.run()
    assert [seq for _, _, seq in town.arrived] == [1]


# ---------------------------------------------------------------- partitions


def test_partition_shorter_than_detection_only_delays() -> None:
    town = Town(detect_seconds=3.0).connected(0)
    unblock = town.network.block(0, SYNCER, one_way=False, breaks=True)
    town.send(0, SYNCER)
    town.at(2.0, unblock)
    town.run()
    assert [seq for _, _, seq in town.arrived] == [1] and town.happened == []


def test_partition_noticed_loses_what_was_on_its_way_and_both_ends_hear_of_it() -> None:
    town = Town(detect_seconds=3.0).connected(0)
    unblock = town.network.block(0, SYNCER, one_way=False, breaks=True)
    town.send(0, SYNCER)
    town.at(10.0, unblock)
    town.run()
    assert town.arrived == []
    lost = "the network is partitioned"
    assert town.happened[:2] == [(3 * SECOND, 0, ConnectionLost(SYNCER, lost)), (3 * SECOND, SYNCER, ConnectionLost(0, lost))]


def test_partition_over_the_learner_dials_again_and_the_line_is_clean() -> None:
    town = Town(detect_seconds=3.0).connected(0)
    unblock = town.network.block(0, SYNCER, one_way=False, breaks=True)
    town.send(0, SYNCER)
    town.at(10.0, unblock)
    town.at(11.0, town.send, 0, SYNCER)
    town.run()
    reconnected = [when for when, w, e in town.happened if isinstance(e, Connected) and w == 0]
    assert len(reconnected) == 1 and 10 * SECOND <= reconnected[0] <= nanos(10.5)
    assert [seq for _, _, seq in town.arrived] == [2]


def test_partition_one_way_lets_the_other_way_through_until_it_is_noticed() -> None:
    town = Town(detect_seconds=3.0).connected(0)
    town.network.block(0, SYNCER, one_way=True, breaks=True)
    town.at(1.0, town.send, 0, SYNCER)
    town.at(1.0, town.send, SYNCER, 0)
    town.at(4.0, town.send, SYNCER, 0)
    town.run(6.0)
    assert [(w, seq) for _, w, seq in town.arrived] == [(0, 2)]
    assert {w for _, w, e in town.happened if isinstance(e, ConnectionLost)} == {0, SYNCER}


# ---------------------------------------------------------------- damage and death


def test_corrupt_frame_is_not_delivered_and_cuts_the_connection() -> None:
    town = Town().connected(0)
    town.network.corrupt_next(0, SYNCER)
    town.send(0, SYNCER)
    town.send(0, SYNCER)
    town.run()
    assert town.arrived == []
    lost = [(w, e) for _, w, e in town.happened if isinstance(e, ConnectionLost)]
    assert lost == [
        (0, ConnectionLost(SYNCER, "a frame's checksum does not fit")),
        (SYNCER, ConnectionLost(0, "a frame's checksum does not fit")),
    ]


def test_corrupt_frame_in_one_direction_leaves_the_other_and_later_connections_alone() -> None:
    town = Town().connected(0)
    town.network.corrupt_next(SYNCER, 0)
    town.send(0, SYNCER)
    town.run(0.1)
    assert [seq for _, _, seq in town.arrived] == [1]
    town.send(SYNCER, 0)
    town.run(2.0)
    town.send(SYNCER, 0)
    town.run(3.0)
    assert [seq for _, _, seq in town.arrived] == [1, 3]


def test_death_is_heard_by_all_peers_after_the_latency_and_loses_what_it_had_sent() -> None:
    town = Town().connected(0, 1)
    town.send(0, 1)
    town.run(0.1)
    town.send(0, SYNCER, 10_000_000)
    town.down.add(0)
    town.network.cut_all(0, "the process died")
    now = town.world.now
    town.run(0.3)
    assert town.happened == [
        (now + 20_000_000, SYNCER, ConnectionLost(0, "the process died")),
        (now + 20_000_000, 1, ConnectionLost(0, "the process died")),
    ]
    assert [(w, seq) for _, w, seq in town.arrived] == [(1, 1)]


def test_cut_of_a_line_that_is_down_is_nothing() -> None:
    town = Town()
    town.network.cut(0, SYNCER, "again", 0)
    town.run()
    assert town.happened == []


faults = st.lists(st.tuples(st.floats(0.0, 8.0), st.floats(0.01, 3.0), st.booleans(), st.booleans()), max_size=6)


@settings(deadline=None)
@given(faults, st.integers(0, 2**32))
def test_channel_is_fifo_under_clogs_and_partitions_and_loses_with_the_link_only(
    plan: list[tuple[float, float, bool, bool]], seed: int
) -> None:
    town, rng = Town(detect_seconds=1.0, up_gbit=0.001).connected(0), random.Random(seed)

    def inject(lasts: float, one_way: bool, breaks: bool) -> None:
        town.world.after(nanos(lasts), town.network.block(0, SYNCER, one_way=one_way, breaks=breaks))

    for at, lasts, one_way, breaks in plan:
        town.at(at, inject, lasts, one_way, breaks)
    for _ in range(60):
        town.at(rng.random() * 12.0, town.send, 0, SYNCER, rng.randrange(1, 20_000))
    town.run()
    seqs = [seq for _, _, seq in town.arrived]
    assert seqs == sorted(set(seqs))
    if not any(isinstance(e, ConnectionLost) for _, _, e in town.happened):
        assert seqs == list(range(1, 61))


# ---------------------------------------------------------------- world and hardware


def test_world_makes_calls_in_time_order_and_in_the_order_asked_for_at_the_same_time() -> None:
    world, called = World(), []
    for when, name in ((5, "c"), (3, "a"), (5, "d"), (3, "b")):
        world.at(when, called.append, name)
    while world.step():
        pass
    assert (called, world.now) == (["a", "b", "c", "d"], 5)
    assert not world.step()


def test_world_never_goes_back() -> None:
    world, seen = World(), []
    world.at(10, lambda: world.at(3, lambda: seen.append(world.now)))
    while world.step():
        pass
    assert seen == [10]


def test_hardware_without_noise_is_exact_and_slow_learners_come_first() -> None:
    made = load(overrides={"learners": 4, "cluster": {"step_noise": 0.0, "slow_share": 0.5, "slow_factor": 1.5}})
    assert [Hardware(made).step_nanos(m) for m in range(4)] == [1_500_000_000] * 2 + [SECOND] * 2


def test_hardware_slowed_by_faults_multiplies_and_comes_back() -> None:
    hardware = Hardware(load(overrides={"cluster": {"step_noise": 0.0}}))
    hardware.slow(0, 2.0)
    hardware.slow(0, 1.5)
    assert hardware.step_nanos(0) == 3 * SECOND
    hardware.slow(0, 1 / 2.0)
    assert hardware.step_nanos(0) == pytest.approx(1.5 * SECOND)
    assert hardware.step_nanos(1) == SECOND


def test_hardware_step_times_of_one_learner_do_not_depend_on_the_others() -> None:
    one, other = Hardware(config()), Hardware(config())
    for _ in range(5):
        other.step_nanos(1)
    assert [one.step_nanos(0) for _ in range(5)] == [other.step_nanos(0) for _ in range(5)]
