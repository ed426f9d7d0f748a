"""What is left of a learner's ranks, and what they send after a loss. Without processes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from atoll.codecs import codec
from atoll.config import Config, load
from atoll.errors import RunFailed
from atoll.executor.learner import TensorLearner
from atoll.executor.ranks.executor import RankExecutor
from atoll.executor.ranks.stitch import assemble
from atoll.protocol.vocabulary import NO_VERSION, Contribution, Envelope, Send, Stage, StepDone
from atoll.runtime.join.executor import task_of
from atoll.runtime.ranks.channel import RankChannel
from atoll.runtime.ranks.group import digest_of, smaller
from atoll.runtime.ranks.lead import RankLead, RankLost
from atoll.runtime.ranks.messages import GradientsReady, StepReached, TakeStep, ToLead, ToRank
from atoll.runtime.ranks.rendezvous import RankLink
from atoll.tasks.task import layout_for

SECONDS = 60.0


@pytest.mark.parametrize(
    ("order", "shards", "lost", "left"),
    [
        ((0, 1, 2), 1, {1}, (0, 2)),
        ((0, 1), 1, {1}, (0,)),
        ((0, 1), 1, {0}, ()),
        ((0, 1), 2, {1}, ()),
        ((0, 1, 2, 3), 2, {3}, (0, 1)),
        ((0, 1, 2, 3), 2, {1}, (0, 3)),
        ((0, 1, 2, 3), 2, {1, 3}, ()),
        ((0, 1, 2, 3), 2, {0}, ()),
        ((0, 1, 2, 3, 4, 5), 2, {1, 4}, (0, 3, 2, 5)),
        ((0, 3, 2, 5), 2, {2}, (0, 3)),
    ],
)
def test_what_is_left_are_whole_replicas_with_rank_0_first(
    order: Sequence[int], shards: int, lost: set[int], left: tuple[int, ...]
) -> None:  # fmt: skip
    assert smaller(order, shards, lost) == left


# ---------------------------------------------------------------- packets


def config(**protocol: Any) -> Config:
    fixed = {"local_steps_per_round": 4, "fragmentation": "sub_tensor", "fragments": 2, "overlap": 1}
    return load(preset_name="streaming", overrides={
        "learners": 1, "total_steps": 8, "model": {"name": "custom"}, "protocol": fixed | protocol,
    })  # fmt: skip


def model_of() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(31, 67), nn.Linear(67, 13))


def executor_of(made: Config, rank: int | None) -> Any:
    """Three ranks that hold the whole model, or one process; each stands at a difference to its anchors."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    task = task_of(made, layout_for(made, model))
    if rank is None:
        executor: Any = TensorLearner(task, 0, model=model, optimizer=optimizer, device=torch.device("cpu"))
    else:
        world = {other: {} for other in range(3)}
        executor = RankExecutor(
            task, 0, rank, world, model=model, optimizer=optimizer, device=torch.device("cpu"), may_shrink=True
        )  # fmt: skip
    torch.manual_seed(9)
    executor.anchors = [torch.randn(fragment.numel) for fragment in task.layout.fragments]
    executor.execute(Stage(1, 3, NO_VERSION, False), None)
    return executor


@pytest.mark.parametrize("protocol", [{"codec_up": "int4"}, {"codec_up": "fp32"}, {"codec_up": "top_k:0.2"}])
def test_packet_that_a_lost_rank_left_undone_has_the_same_bytes_from_the_others(protocol: dict[str, Any]) -> None:
    made = config(**protocol)
    contribution = Contribution(4, 1, 3, 0, 0, 1, 1, 1)
    whole = executor_of(made, None).payload_for(Send(Envelope(0, 0, -1, 1, 3, contribution))).content
    zero, two = executor_of(made, 0), executor_of(made, 2)
    for executor in (zero, two):
        executor.encoded((1, NO_VERSION), request=7)
        executor.shrink((0, 2))
    parts = [executor.encoded_again(7, 8) for executor in (zero, two)]
    splits = [zero.splits[1][rank] for rank in (0, 2)]
    packet, _ = assemble(
        codec(made.protocol.codec_up), zero.whole[1].numel, splits, [part for part, _ in parts], feedback=False
    )  # fmt: skip
    assert packet.to_bytes() == whole[0].to_bytes()


def test_what_a_lost_rank_did_not_carry_is_lost_and_no_other_rank_makes_it_up() -> None:
    zero = executor_of(config(codec_up="int4", error_feedback=True), 0)
    zero.encoded((1, NO_VERSION), request=7)
    zero.shrink((0, 2))
    part, _ = zero.encoded_again(7, 8)
    assert part.codes.numel() > 0
    zero.seams_not_carried(1, torch.full((zero.splits[1][0].seam_numel,), 3.0), generation=0)  # of the packet before
    zero.seams_not_carried(1, torch.full((zero.splits[1][0].seam_numel,), 5.0), generation=1)
    kept = zero.state(with_residuals=True)["residuals"][1]
    assert not (kept == 3.0).any() and int((kept == 5.0).sum()) == zero.splits[1][0].seam_numel
    own = torch.zeros_like(kept, dtype=torch.bool)
    for run in (*zero.splits[1][0].blocks, *zero.splits[1][0].seams):
        own[run.local : run.local + run.length] = True
    assert not kept[~own].any()


def test_digest_tells_moments_apart() -> None:
    found = set()
    for moment in (0.0, 1.0):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            optimizer.state[parameter] = {"exp_avg": torch.full_like(parameter, moment), "step": torch.tensor(1.0)}
        found |= {digest_of(optimizer), digest_of(optimizer)}
    assert len(found) == 2


# ---------------------------------------------------------------- rank 0 and two others, over sockets


class Pair:
    """Rank 0, and the ends that ranks 1 and 2 hold."""

    def __init__(self) -> None:
        self.ends: dict[int, tuple[RankChannel, RankChannel]] = {}
        links = {}
        for rank in (1, 2):
            pairs = [_connected() for _ in range(2)]
            links[rank] = RankLink(*(RankChannel(here, ToLead) for here, _ in pairs))
            control, bulk = (RankChannel(there, ToRank) for _, there in pairs)
            self.ends[rank] = control, bulk
        self.lead = RankLead(links, SECONDS)
        self.heard = threading.Event()
        self.lead.on_lost = lambda rank: self.heard.set()

    def die(self, rank: int) -> None:
        for end in self.ends[rank]:
            end.close()

    def close(self) -> None:
        for rank in self.ends:
            self.die(rank)
        self.lead.close("over", failed=False)


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
    return here, there


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    made.lead.may_lose = lambda lost: True
    yield made
    made.close()


DONE = StepDone(12, 4, 1, 0.5)


def test_step_is_not_taken_if_a_rank_is_lost_before_all_have_their_gradients(pair: Pair) -> None:
    pair.ends[1][0].send(GradientsReady(1, DONE))
    pair.die(2)
    assert pair.lead.ready(1) is False
    assert pair.lead.has_lost and pair.lead.members == (1,)
    attempt, lost = pair.lead.take_lost()
    assert attempt == 1 and set(lost) == {2} and not pair.lead.has_lost


def test_step_that_all_have_gradients_for_is_taken_and_counts_the_lost_rank(pair: Pair) -> None:
    for rank in (1, 2):
        pair.ends[rank][0].send(GradientsReady(1, DONE))
    assert pair.lead.ready(1) is True
    assert pair.ends[1][0].receive()[0] == TakeStep(1)
    pair.die(2)
    assert pair.heard.wait(SECONDS)
    pair.ends[1][0].send(StepReached(1, DONE))
    assert {rank: boundary.done for rank, boundary in pair.lead.boundaries(1).items()} == {1: DONE, 2: DONE}


def test_part_that_a_lost_rank_owes_is_waited_for_by_nobody(pair: Pair) -> None:
    pair.die(2)
    with pytest.raises(RankLost, match="rank 2"):
        pair.lead.answers(5, (1, 2))
    with pytest.raises(RunFailed, match="had not written its part"):
        pair.lead.written(6, (1, 2))


def test_rank_that_stands_still_holds_up_the_end_no_longer_than_leaving_may_take(pair: Pair) -> None:
    """It is alive, and its part of a snapshot does not come."""
    pair.lead.write_within(0.2)
    with pytest.raises(RunFailed, match="rank 1 had not written its part"):
        pair.lead.written(6, (1, 2))


def test_rank_that_no_other_replaces_takes_its_learner_down(pair: Pair) -> None:
    pair.lead.may_lose = lambda lost: False
    pair.die(1)
    with pytest.raises(RunFailed, match=r"rank 1 of this learner: .*go down together"):
        pair.lead.ready(1)
