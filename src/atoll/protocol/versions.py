"""Which versions of each fragment exist, who holds which, what may be forgotten, and what to announce to whom.

A version is named by the outer step that announced it. A learner's difference is against a version, so the syncer keeps
a version until every member has reported adopting a newer one, and never more than `versions_max` of a fragment: a
laggard beyond that is refused and recovers (differences are never re-based).

Flow control: at most one announcement of a fragment is outstanding per learner. While one is, newer versions wait in
`deferred`, newest only: a slow learner costs no memory and always gets the newest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.config import Config
from atoll.config.codecs import codec_spec
from atoll.ids import FragmentId, LearnerId, OuterStep
from atoll.protocol.effects import Effects
from atoll.protocol.local_steps import LocalSteps
from atoll.protocol.membership import EXPELLED, JOINING, LEFT, Member, Roster
from atoll.protocol.vocabulary import NO_VERSION, Adoption, Announce, ForgetVersion, Tick


class Versions:
    def __init__(self, config: Config, effects: Effects, roster: Roster, local_steps: LocalSteps | None = None) -> None:
        """`local_steps`: of dynamic local updates, where only those who took part in a version are sent it."""
        self._effects = effects
        self._roster = roster
        self._local_steps = local_steps
        # during one interval of a learner each other one is merged about once, twice while their paces change
        self.keep_max = max(config.limits.versions_max, 2 * config.learners if local_steps is not None else 0)
        self._keeps_overlap = config.protocol.keep_overlap
        self._always_full = codec_spec(config.protocol.codec_down).lossless
        fragments = config.protocol.fragments
        self._kept: list[list[OuterStep]] = [[0] for _ in range(fragments)]
        self._merged: list[dict[OuterStep, tuple[LearnerId, ...]]] = [{} for _ in range(fragments)]
        """Of kept versions, whose packets were merged into them."""
        self.is_pinned: Callable[[FragmentId, OuterStep], bool] = lambda fragment, version: False
        """Of a rollback point: no learner needs it any more, and its file stays."""

    def newest(self, fragment: FragmentId) -> OuterStep:
        return self._kept[fragment][-1]

    def count(self, fragment: FragmentId) -> int:
        return len(self._kept[fragment])

    def all_kept_versions(self) -> tuple[tuple[OuterStep, ...], ...]:
        return tuple(tuple(kept) for kept in self._kept)

    def restore(self, kept: Sequence[Sequence[OuterStep]]) -> None:
        """Who took part in them is not known any more: learners adopt the newest as it is."""
        self._kept = [list(versions) for versions in kept]
        self._merged = [{} for _ in kept]

    def all_newest(self) -> tuple[OuterStep, ...]:
        return tuple(kept[-1] for kept in self._kept)

    def has(self, fragment: FragmentId, version: OuterStep) -> bool:
        return version in self._kept[fragment]

    def all_kept(self, held: Sequence[OuterStep]) -> bool:
        return len(held) == len(self._kept) and all(v in kept for v, kept in zip(held, self._kept, strict=True))

    def ever_was(self, adoption: Adoption) -> bool:
        return 0 <= adoption.fragment < len(self._kept) and 0 <= adoption.version <= self._kept[adoption.fragment][-1]

    def add(self, fragment: FragmentId, version: OuterStep, merged: tuple[LearnerId, ...]) -> None:
        assert version > self._kept[fragment][-1], "outer steps are consecutive"
        self._kept[fragment].append(version)
        self._merged[fragment][version] = merged

    # ------------------------------------------------------------ announcing

    def announce_step(self, outer_step: OuterStep, fragments: Sequence[FragmentId]) -> None:
        for member in self._roster.connected():
            if not fragments or not self._is_sent(member, outer_step, fragments):
                self._effects.send(member.learner, Tick(outer_step))
                continue
            for fragment in fragments:
                self.announce(member, fragment)

    def _is_sent(self, member: Member, outer_step: OuterStep, fragments: Sequence[FragmentId]) -> bool:
        return self._local_steps is None or any(member.learner in self._merged[p].get(outer_step, ()) for p in fragments)

    def announce(self, member: Member, fragment: FragmentId) -> None:
        """Send the newest version unless an older one is still on its way."""
        kept = self._kept[fragment]
        newest = kept[-1]
        if member.sent[fragment] >= newest:
            return
        if member.sent[fragment] != member.held[fragment]:
            member.deferred[fragment] = newest
            return
        member.deferred.pop(fragment, None)
        previous = kept[-2] if len(kept) > 1 else NO_VERSION
        as_difference = not self._always_full and member.standing != JOINING and member.held[fragment] == previous
        member.sent[fragment] = newest
        member.account.announced(fragment, newest, member.reported)
        steps = 0 if self._local_steps is None else self._local_steps.begins(member)
        base = previous if as_difference else NO_VERSION
        body = Announce(newest, fragment, base, self._merged_for(member, fragment), steps)
        self._effects.send(member.learner, body)

    def _merged_for(self, member: Member, fragment: FragmentId) -> tuple[LearnerId, ...]:
        """Of the newest version, and of those before it that this member is not sent: its packet may be in one of them. Not so
        with `keep_overlap`, where it keeps what came after the packet that is in this one."""
        newest, held = self.newest(fragment), member.held[fragment]
        found = self._merged[fragment].get(newest, ())
        if held == NO_VERSION or member.learner in found or self._keeps_overlap:
            return found
        skipped = (who for version, who in self._merged[fragment].items() if version > held)
        return tuple(sorted((*found, member.learner))) if any(member.learner in who for who in skipped) else found

    def announce_missing(self, member: Member) -> None:
        for fragment in range(len(self._kept)):
            self.announce(member, fragment)

    def acknowledged(self, member: Member, adoption: Adoption) -> None:
        fragment = adoption.fragment
        if adoption.version <= member.held[fragment]:
            return
        member.held[fragment] = adoption.version
        if fragment in member.deferred and member.sent[fragment] <= adoption.version:
            member.sent[fragment] = adoption.version
            self.announce(member, fragment)

    def restart_channel(self, member: Member, held: Sequence[OuterStep]) -> None:
        """After a Hello or a load: what the learner says it has is all it has."""
        member.held = list(held)
        member.sent = list(held)
        member.lent.clear()
        member.deferred.clear()

    # ------------------------------------------------------------ forgetting

    @staticmethod
    def lend(member: Member, fragments: Sequence[FragmentId], behind: int) -> None:
        """A pull is on its way: keep what the answer may be a difference to. Rounds in flight have different fragments, so
        there is one to remember for each. `behind`: how many steps its copies may be older than its last report."""
        for p in fragments:
            member.lent[p] = member.held[p]
        member.account.asked(fragments, member.reported - behind)

    @staticmethod
    def give_back(member: Member, fragments: Sequence[FragmentId]) -> None:
        for p in fragments:
            member.lent.pop(p, None)
        member.account.answered(fragments)

    def prune(self, fragments: Sequence[FragmentId]) -> None:
        for fragment in fragments:
            kept = self._kept[fragment]
            if len(kept) <= 2:
                continue
            needed = self.watermark(fragment)
            # one older than the newest stays: a member one version behind is sent the difference to it
            while len(kept) > 2 and (kept[0] < needed or len(kept) > self.keep_max):
                self._forget_oldest(fragment)

    def replace_all(self, version: OuterStep) -> None:
        """After a rollback: no learner may send a difference against anything older."""
        for fragment, kept in enumerate(self._kept):
            self.add(fragment, version, ())
            while len(kept) > 1:
                self._forget_oldest(fragment)

    def _forget_oldest(self, fragment: FragmentId) -> None:
        version = self._kept[fragment].pop(0)
        self._merged[fragment].pop(version, None)
        if not self.is_pinned(fragment, version):
            self._effects.emit(ForgetVersion(fragment, version))

    def watermark(self, fragment: FragmentId) -> OuterStep:
        """The oldest version of a fragment that any member may still send a difference against. Members report every
        adoption, so this is finer than their clocks: those say what a learner has seen, not what it has taken over."""
        held = (min(m.held[fragment], m.lent.get(fragment, m.held[fragment])) for m in self._roster if self._holds(m, fragment))
        return min(held, default=self.newest(fragment))

    @staticmethod
    def _holds(member: Member, fragment: FragmentId) -> bool:
        return member.standing not in (LEFT, EXPELLED) and not member.given_up and member.held[fragment] != NO_VERSION
