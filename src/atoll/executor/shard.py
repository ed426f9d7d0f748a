"""One shard of a syncer: its stripe of every fragment, merged and stored as a syncer does it with whole fragments.

A stripe is a fragment of its own, so the executor is the syncer's. What a stripe cannot tell alone it learns from the other
shards while it merges (the norms of slots that are cut), or tells the coordinator after it: how far Theta moved, leaf by leaf,
and its part of the checksum. The coordinator decides with these what a syncer decides with whole fragments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from atoll.config import Config
from atoll.executor.merging import Merged, stripe_merger
from atoll.executor.syncer import TensorSyncer
from atoll.ids import FragmentId, OuterStep
from atoll.protocol.vocabulary import Merge, Store
from atoll.store.versions import DigestPart, VersionStore, digest_part
from atoll.tensors.layout import Fragment
from atoll.tensors.norms import Array, leaf_squares_of
from atoll.tensors.stripes import Meeting, Stripe, stripes_of


class StripeResult(NamedTuple):
    """What the coordinator learns of a merged stripe."""

    moves: Array
    """The squares of how far Theta moved, leaf by leaf."""
    sizes: Array
    """Of the announced vector, likewise."""
    theta: DigestPart
    buffers: DigestPart


class ShardSyncer(TensorSyncer):
    def __init__(
        self, config: Config, fragments: Sequence[Fragment], shard: int, shards: int, disk: VersionStore, *,
        in_blocks: bool = True, threads: int | None = None,
    ) -> None:  # fmt: skip
        """`fragments` are the whole ones, `disk` holds the stripes."""
        self._stripes: tuple[Stripe, ...] = tuple(stripes_of(fragment, shards)[shard] for fragment in fragments)
        self._whole = fragments
        own = [stripe.fragment for stripe in self._stripes]
        merger = stripe_merger(config, fragments, shard, shards, threads=threads)
        self._moves: dict[tuple[OuterStep, FragmentId], Merged] = {}
        super().__init__(config, own, disk, in_blocks=in_blocks, merger=merger)

    def merge(self, effect: Merge, meeting: Meeting) -> StripeResult:
        self.merger.meeting = meeting
        try:
            self.execute(effect, None)
        finally:
            self.merger.meeting = None
        return self.result(effect.outer_step, effect.fragment)

    def store(self, effect: Store) -> None:
        """May be asked again: where another shard's disk was full, this one has stored its stripes already."""
        t = effect.outer_step
        if any((t, p) in self._merged for p in effect.fragments):
            self.execute(Store(t, effect.fragments), None)

    def _jump(self, t: OuterStep, p: FragmentId) -> float:
        """The coordinator has judged how far the whole fragment moved."""
        return 0.0

    def _measured(self, t: OuterStep, p: FragmentId, merged: Merged) -> None:
        """The norms of a stripe alone are of no use."""
        self._moves[t, p] = merged

    def result(self, t: OuterStep, p: FragmentId) -> StripeResult:
        """Of what was merged, or copied from an earlier version, and is not stored yet."""
        version, before, stripe = self._merged[t, p], self._previous[t, p], self._stripes[p]
        merged = self._moves.pop((t, p), None)
        measured = merged is not None and stripe.fragment.numel > 0
        moves, sizes = (merged.moves, merged.sizes) if measured and merged is not None else (None, None)
        whole = self._whole[p].numel
        return StripeResult(
            leaf_squares_of(version.theta - before.theta) if moves is None else moves,
            leaf_squares_of(version.announced) if sizes is None else sizes,
            digest_part(version.theta, stripe.first, whole, self.merger.spread),
            digest_part(version.buffers, 0, version.buffers.numel()),
        )
