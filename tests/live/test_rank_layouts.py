"""Any layout of a learner's ranks makes the same bytes: what it sends, what the syncer merges, and what it stores."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rank_loops import Ranks, each, gradient_loop, prescribed_loop, several
from thread_syncer import Syncer, exact, syncers

from atoll.executor.sharded import PartFound, ShardedSyncer
from atoll.executor.syncer import TensorSyncer
from atoll.protocol.vocabulary import Contribution, FixParticipants, Stored

pytestmark = pytest.mark.live

CODECS = {
    "plain": {"codec_up": "fp32"},
    "blocks": {"codec_up": "int4", "codec_down": "bf16"},
    "feedback": {"codec_up": "int4", "error_feedback": True},
    "whole": {"codec_up": "top_k:0.2", "error_feedback": True},
}


class Watched(Syncer):
    seen: ClassVar[dict[int, list[tuple[int, int, str]]]] = {}
    """By the syncer's executor every contribution: outer step, fragment, and a digest of all its bytes."""
    squares: ClassVar[dict[int, list[tuple[int, int, str]]]] = {}
    """The same with a digest of the squares that its norm adds up, which is all that a syncer with shards sees."""

    def contributions(self) -> list[tuple[int, int, str]]:
        return sorted(self.seen.pop(id(self.home.executor)))

    def squares_seen(self) -> list[tuple[int, int, str]]:
        return sorted(self.squares.pop(id(self.home.executor)))

    def digests(self) -> list[tuple[int, str]]:
        return [(r.event.outer_step, r.event.digest) for r in self.tape() if isinstance(r.event, Stored)]

    def merged(self) -> set[tuple[int, ...]]:
        """The learners of every round."""
        effects = (effect for record in self.tape() for effect in record.effects)
        return {tuple(sorted(e.participants)) for e in effects if isinstance(e, FixParticipants)}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Watched]]:
    inspect, judge = TensorSyncer.inspect, ShardedSyncer.judge

    def squares(executor: Any, body: Contribution, leaves: Sequence[Any]) -> None:
        told = hashlib.sha256(b"".join(each.tobytes() for each in leaves)).hexdigest()
        Watched.squares.setdefault(id(executor), []).append((body.outer_step, body.fragment, told))

    def inspected(executor: TensorSyncer, body: Any, payload: Any) -> Any:
        if isinstance(body, Contribution):
            packet, buffers = payload.content
            told = hashlib.sha256(packet.to_bytes() + buffers.numpy().tobytes()).hexdigest()
            Watched.seen.setdefault(id(executor), []).append((body.outer_step, body.fragment, told))
            leaves = executor.merger.norm_leaves(packet, by_value=False)
            if leaves is not None:
                squares(executor, body, [leaves])
        return inspect(executor, body, payload)

    def judged(executor: ShardedSyncer, body: Contribution, parts: Sequence[PartFound]) -> Any:
        squares(executor, body, [part.leaves for part in parts])
        return judge(executor, body, parts)

    monkeypatch.setattr(TensorSyncer, "inspect", inspected)
    monkeypatch.setattr(ShardedSyncer, "judge", judged)
    with syncers(tmp_path, Watched) as make:
        yield make


def run_of(syncer: Watched, kind: str, learner: str = "learner") -> tuple[Any, ...]:
    return kind, syncer.address, syncer.home.token_file, syncer.directory / learner


@pytest.fixture(scope="module")
def known() -> dict[str, tuple[list[Any], list[Any]]]:
    """By codec what one rank sent and what became of it; computed when first asked for."""
    return {}


def of_one_rank(codec: str, known: dict[str, Any], start: Callable[..., Watched]) -> tuple[list[Any], list[Any]]:
    if codec not in known:
        one = start(exact(protocol=CODECS[codec]))
        prescribed_loop(0, 1, *run_of(one, "one"))
        one.end()
        known[codec] = one.contributions(), one.digests()
        known[f"squares of {codec}"] = one.squares_seen() if id(one.home.executor) in one.squares else []
        assert len(known[codec][0]) >= 10 and len(known[codec][1]) == 10
    return known[codec]


@pytest.mark.parametrize(
    ("ranks", "kinds", "codecs"),
    [
        pytest.param(1, ("ddp", "fsdp2"), ("blocks",), marks=pytest.mark.soak),
        pytest.param(2, ("ddp", "fsdp2", "tp"), ("blocks", "feedback"), marks=pytest.mark.soak),
        (3, ("ddp", "fsdp2"), CODECS),
        (4, ("ddp", "fsdp2", "hsdp", "tp", "fsdp2 and tp"), ("feedback",)),
    ],
)
def test_every_layout_sends_and_merges_the_bytes_of_one_rank(
    start: Callable[..., Watched], known: dict[str, Any], ranks: int, kinds: Iterable[str], codecs: Iterable[str]
) -> None:
    expected = {codec: of_one_rank(codec, known, start) for codec in codecs}
    runs = {(codec, kind): start(exact(protocol=CODECS[codec])) for codec in codecs for kind in kinds}
    group = Ranks(ranks, each, [run_of(syncer, kind) for (_, kind), syncer in runs.items()])
    assert all(isinstance(result, list) for result in group.end())
    for (codec, kind), syncer in runs.items():
        syncer.end()
        contributions, digests = expected[codec]
        assert syncer.contributions() == contributions, f"{kind} on {ranks} ranks, {codec}"
        assert syncer.digests() == digests


@pytest.mark.parametrize("shards", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_ranks_and_shards_together_store_the_bytes_of_one_rank_and_one_syncer(
    start: Callable[..., Watched], known: dict[str, Any], shards: int
) -> None:
    contributions, digests = of_one_rank("feedback", known, start)
    squares = known["squares of feedback"]
    assert len(squares) == len(contributions) == len({told for _, _, told in squares})
    syncer = start(exact(protocol=CODECS["feedback"]), shards=shards)
    results = Ranks(2, prescribed_loop, *run_of(syncer, "fsdp2")).end()
    assert all(isinstance(result, dict) for result in results), results
    syncer.end()
    assert syncer.home.shards == shards
    assert syncer.squares_seen() == squares and syncer.digests() == digests


FLEET = (("one", 1), ("tp", 2), ("fsdp2", 3), ("hsdp", 4))
"""Learner m has m + 1 ranks."""


def fleet(syncer: Watched, learners: Iterable[tuple[str, int]]) -> None:
    """Every learner has updates of its own."""
    groups = [
        Ranks(ranks, prescribed_loop, *run_of(syncer, kind, f"learner{learner}"), None, learner)
        for learner, (kind, ranks) in enumerate(learners)
    ]
    for group in groups:
        results = group.end()
        assert all(isinstance(result, dict) for result in results), results
    syncer.end()
    assert syncer.merged() == {(0, 1, 2, 3)}


@pytest.mark.soak
def test_learners_of_one_to_four_ranks_merge_to_the_bytes_of_four_learners_of_one(start: Callable[..., Watched]) -> None:
    """By RDA, whose norms the shards exchange; so learners, ranks and shards are all cut another way."""
    together = {"protocol": CODECS["feedback"] | {"merge": "rda"}, "learners": 4}
    alike, mixed = start(exact(**together)), start(exact(**together), shards=2)
    fleet(alike, [("one", 1)] * 4)
    fleet(mixed, FLEET)
    contributions, digests = alike.contributions(), alike.digests()
    assert len(digests) == 10 and len({told for _, _, told in contributions}) == len(contributions), "all differ"
    assert mixed.contributions() == contributions
    assert mixed.digests() == digests


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [(2, ("fsdp2",)), *(pytest.param(*case, marks=pytest.mark.soak) for case in [
        (2, ("ddp", "tp")), (4, ("fsdp2", "hsdp", "fsdp2 and tp")),
    ])],
)  # fmt: skip
def test_gradients_of_a_layout_repeat_to_the_bit_and_train_what_one_rank_trains(
    start: Callable[..., Watched], ranks: int, kinds: Iterable[str]
) -> None:
    """Sums of another layout differ in their last bits; the loss after all steps is within 0.5 %."""
    settings = exact(total_steps=24)
    one = start(settings)
    loss = gradient_loop(0, 1, *run_of(one, "one"))
    one.end()
    assert loss < 0.5 * math.log(11), "it learns"
    runs = {(kind, again): start(settings) for kind in kinds for again in (False, True)}
    losses = Ranks(ranks, several, [run_of(syncer, kind) for (kind, _), syncer in runs.items()]).end()
    assert all(isinstance(found, list) for found in losses), losses
    for number, ((kind, again), syncer) in enumerate(runs.items()):
        syncer.end()
        assert len({found[number] for found in losses}) == 1, "all ranks hold one model"
        assert losses[0][number] == pytest.approx(loss, rel=0.005), kind
        if again:
            assert syncer.digests() == runs[kind, False].digests() and losses[0][number] == losses[0][number - 1], kind
