"""keep_overlap: what a learner trained after its pull goes on counting, in the learner, the syncer and the ledger."""

from __future__ import annotations

import pytest
from stage import TOKENS, LearnerStage, SyncerStage, arrival, exact, of, sent

from atoll.config import load
from atoll.errors import ConfigError
from atoll.ids import SYNCER
from atoll.protocol.accounts import Account
from atoll.protocol.reasons import Reason, Why
from atoll.protocol.vocabulary import (
    Accept,
    Adopt,
    Adoption,
    Announce,
    Connected,
    ConnectionLost,
    Contribution,
    Hello,
    Merge,
    Pull,
    Recover,
    Refuse,
    Report,
    TakeTheta,
)  # fmt: skip

KEEPS = {"fragments": 4, "interval": 4, "keep_overlap": True}


def pulled_in_its_third_step(**protocol: object) -> LearnerStage:
    """It stands in its third step, and has answered a pull of fragment 1 from the copy of step 2."""
    stage = LearnerStage(arrival(**{**KEEPS, **protocol}))  # type: ignore[arg-type]
    stage.enters()
    stage.steps()
    stage.steps()
    (answer,) = sent(stage.hears(Pull(1, (1,))))
    assert answer == Contribution(1, 1, 2, 0, 2, 2 * TOKENS, 2, 2 * TOKENS)
    return stage


def test_learner_that_was_merged_keeps_what_it_trained_after_the_copy() -> None:
    stage = pulled_in_its_third_step()
    stage.announced(1, 1, previous=0)
    effects = stage.steps()
    assert of(effects, Adopt) == [Adopt(1, 1, 0.0, True, Reason(Why.DUE), keeps=True)]
    assert stage.machine.counters.since(1) == (1, TOKENS, 1)
    (report,) = sent(effects, kind=Report)
    assert report.adopted == (Adoption(1, 1, 3, 3 * TOKENS, kept=TOKENS),)  # type: ignore[union-attr]


def test_learner_that_was_not_merged_loses_what_it_trained() -> None:
    stage = pulled_in_its_third_step()
    stage.announced(1, 1, previous=0, merged=(1,))
    assert [(a.merged, a.keeps) for a in of(stage.steps(), Adopt)] == [(False, False)]
    assert stage.machine.counters.since(1) == (0, 0, 0)


def test_without_the_key_nothing_is_kept() -> None:
    stage = pulled_in_its_third_step(keep_overlap=False)
    stage.announced(1, 1, previous=0)
    assert [(a.merged, a.keeps) for a in of(stage.steps(), Adopt)] == [(True, False)]


def test_version_that_comes_after_the_next_copy_was_sent_replaces_all() -> None:
    """On a slow link: then it is not known what was trained after the older copy."""
    stage = pulled_in_its_third_step()
    stage.hears(Pull(5, (1,)))
    stage.announced(1, 1, previous=0)
    assert [(a.version, a.keeps) for a in of(stage.steps(), Adopt)] == [(1, False)]
    stage.announced(5, 1, previous=1)
    assert [(a.version, a.keeps) for a in of(stage.steps(), Adopt)] == [(5, False)]


def test_copy_that_is_sent_again_for_the_same_outer_step_is_the_one_that_counts() -> None:
    stage = pulled_in_its_third_step()
    stage.steps()
    stage.hears(Pull(1, (1,)))  # the round was aborted and gathered again
    stage.announced(1, 1, previous=0)
    stage.steps()
    assert stage.machine.counters.since(1) == (1, TOKENS, 1)


def test_recovery_forgets_what_was_sent() -> None:
    stage = pulled_in_its_third_step()
    stage.hears(Recover(Reason(Why.POISONED)))
    stage.steps()
    for fragment in range(4):
        stage.announced(1 if fragment == 1 else 0, fragment)
    adopted = of(stage.hears(TakeTheta(2, Reason(Why.NOTHING_MERGED))), Adopt)
    assert [a.keeps for a in adopted] == [False] * 4


def test_exact_adoption_keeps_what_was_trained_in_tau_steps() -> None:
    stage = LearnerStage(
        exact("streaming", interval=4, overlap=1, fragmentation="balanced", fragments=2, alpha=0.0, keep_overlap=True)
    )
    stage.enters()
    stage.steps()
    stage.steps()  # stands at 2: fragment 1 is due and staged
    stage.hears(Pull(2, (1,)))
    stage.announced(2, 1, merged=(0, 1))
    assert of(stage.steps(), Adopt) == [Adopt(1, 2, 0.0, True, Reason(Why.DUE), keeps=True)]
    assert stage.machine.counters.since(1) == (1, TOKENS, 1)


# ---------------------------------------------------------------- the syncer


def first_round(*, kept: int) -> SyncerStage:
    """Both have trained two steps, of which outer step 1 took the first; learner 0 adopts it after the second."""
    s = SyncerStage(arrival(2, quorum=2, **KEEPS), joined=2)  # type: ignore[arg-type]
    for learner in (0, 1):
        s.steps(learner)
    for learner in (0, 1):
        s.contributes(learner, 1, 1)
    s.stored(1)
    s.steps(0, adopts=False)
    s.hears(0, s.report(0, adopted=(Adoption(1, 1, 2, 2 * TOKENS, kept),)))
    s.cast[0].told.clear()
    s.cast[0].held[1] = 1
    return s


def account_of(s: SyncerStage) -> Account:
    member = s.machine.roster.get(0)
    assert member is not None
    return member.account


def test_tokens_that_a_learner_keeps_are_not_discarded_and_the_next_merge_has_them() -> None:
    s = first_round(kept=TOKENS)
    assert s.machine.fates().discarded == {}
    assert account_of(s).steps_since(1, 2) == 1, "work on the fragment counts from the copy"


def test_tokens_of_an_overlap_that_is_not_kept_are_discarded() -> None:
    s = first_round(kept=0)
    assert s.machine.fates().discarded == {"overlap": TOKENS}
    assert account_of(s).steps_since(1, 2) == 0


def test_report_that_keeps_more_than_was_trained_is_no_message() -> None:
    s = first_round(kept=0)
    s.steps(0, adopts=False)
    effects = s.hears(0, s.report(0, adopted=(Adoption(1, 1, 3, 3 * TOKENS, 3 * TOKENS + 1),)))
    assert [e.reason.why for e in of(effects, Refuse)] == [Why.IMPOSSIBLE]


def test_learner_that_claims_to_keep_more_than_it_did_has_no_more_steps_counted() -> None:
    """It says that it kept everything, and claims both steps again: the one that was merged counts once."""
    s = first_round(kept=2 * TOKENS)
    for t in range(2, 6):
        for learner in (0, 1):
            s.steps(learner)
        round_ = s.machine.rounds[t]
        for learner in (0, 1):
            for p in round_.due:
                claims = {"c_steps": s.cast[0].local_step, "c_tokens": s.cast[0].local_step * TOKENS} if learner == 0 else {}
                effects = s.contributes(learner, t, p, **claims)
        if t < 5:
            s.stored(t)
    assert of(effects, Accept) and of(effects, Merge)
    counted = s.machine.rounds[5].counts[1]
    assert counted[0].steps == s.cast[0].local_step - 1


def test_claim_to_keep_work_of_a_version_without_it_counts_for_nothing() -> None:
    s = SyncerStage(arrival(2, quorum=1, **KEEPS), joined=2)  # type: ignore[arg-type]
    s.steps(1)
    s.contributes(1, 1, 1)
    s.stored(1)
    s.steps(0, adopts=False)
    s.hears(0, s.report(0, adopted=(Adoption(1, 1, 1, TOKENS, TOKENS),)))
    assert s.machine.fates().discarded == {"not_in_round": TOKENS}
    assert account_of(s).steps_since(1, 1) == 0


def test_learner_that_understates_the_step_of_its_copy_hoards_no_steps() -> None:
    """It says that each copy is of step 1 and that it keeps the rest; what it had reported when it was asked is taken too."""
    s = SyncerStage(arrival(4, quorum=4, fragments=1, interval=2, keep_overlap=True), joined=4)
    for t in range(1, 12):
        for learner in range(4):
            s.steps(learner, adopts=learner > 0)
        round_ = s.machine.rounds.get(t)
        if round_ is None or not round_.due:
            continue
        for learner in range(4):
            lies = {"local_step": 1, "c_steps": 1} if learner == 0 else {}
            s.contributes(learner, t, 0, **lies)
        s.stored(t)
        for told in s.cast[0].told:
            s.cast[0].held[0] = told.outer_step
            adopted = (Adoption(0, told.outer_step, 0, TOKENS, 1),)
            s.hears(0, s.report(0, adopted=adopted))
        s.cast[0].told.clear()
    reported = s.cast[0].local_step
    assert account_of(s).steps_since(0, reported) <= 2


def test_steps_of_before_a_lost_connection_count_no_second_time() -> None:
    account = Account(1)
    account.begins(0)
    account.asked((0,), 8)
    account.taken(0, 8)
    account.returns(claimed=1010, reported=10, credit=20)
    account.adopted(0, 2, 1010, keeps=True)
    assert account.steps_since(0, 1010) == 22, "the credit, and the two steps after the copy"


def test_new_incarnation_in_the_round_that_gathers_is_merged_and_keeps() -> None:
    s = SyncerStage(arrival(2, quorum=2, **KEEPS), joined=2)  # type: ignore[arg-type]
    s.steps(1)
    (theta,) = sent(s.comes_back(0), 0, TakeTheta)
    s.loads(0, theta.ticket)  # type: ignore[union-attr]
    s.steps(0)
    s.steps(0, adopts=False)
    for learner in (0, 1):
        s.contributes(learner, 1, 1, local_step=1, tokens=TOKENS)
    s.stored(1)
    assert s.machine.ledger.is_merged_in(0, 1, 1)
    s.hears(0, s.report(0, adopted=(Adoption(1, 1, 2, 2 * TOKENS, TOKENS),)))
    assert s.machine.fates().discarded.get("not_in_round", 0) == 0 and account_of(s).steps_since(1, 2) == 1


def test_packet_in_an_older_version_keeps_nothing_on_top_of_a_newer_one() -> None:
    """It was merged in version 2 and hears nothing of it; its answer for 4 is lost. Version 4 holds nothing of its copy for 4."""
    config = arrival(3, quorum=2, fragments=1, interval=2, keep_overlap=True)
    s, learner = SyncerStage(config, joined=3), LearnerStage(config)
    learner.enters()

    def all_step() -> None:
        s.steps(0, adopts=False)
        s.steps(1)
        s.steps(2)
        learner.steps()

    while 2 not in s.machine.rounds or not s.machine.rounds[2].participants:
        all_step()
    (answer,) = sent(learner.hears(Pull(2, (0,))), kind=Contribution)
    s.hears(0, answer)
    for m in (1, 2):
        s.contributes(m, 2, 0)
    s.stored(2)
    while 4 not in s.machine.rounds or not s.machine.rounds[4].participants:
        all_step()
    assert sent(learner.hears(Pull(4, (0,))), kind=Contribution)
    s.on(ConnectionLost(0, "broken"))
    learner.on(ConnectionLost(SYNCER, "broken"))
    for m in (1, 2):
        s.contributes(m, 4, 0)
    s.stored(4)
    (hello,) = sent(learner.on(Connected(SYNCER)), kind=Hello)
    (told,) = sent(s.hears(0, hello), 0, Announce)
    assert isinstance(told, Announce) and (told.outer_step, told.merged) == (4, (1, 2))
    learner.announced(4, 0, merged=told.merged)
    assert [a.keeps for a in of(learner.steps(), Adopt)] == [False]


def test_copy_of_weights_that_were_replaced_since_keeps_nothing() -> None:
    stage = pulled_in_its_third_step()
    staging = stage.machine._staged
    assert staging.covered_by(1, 1, held=7) is None
    stage = pulled_in_its_third_step()
    assert stage.machine._staged.covered_by(1, 1, held=0) == (2, 2 * TOKENS, 2)


def test_pull_that_is_answered_without_a_connection_is_not_remembered_as_sent() -> None:
    stage = LearnerStage(arrival(**KEEPS))  # type: ignore[arg-type]
    stage.enters()
    stage.steps()
    stage.on(ConnectionLost(SYNCER, "broken"))
    assert sent(stage.hears(Pull(1, (1,)))) == []
    assert stage.machine._staged.covered_by(1, 1, held=0) is None


# ---------------------------------------------------------------- the key


@pytest.mark.parametrize(("preset", "protocol", "words"), [
    ("diloco", {}, "overlap of at least 1"),
    ("streaming", {"alpha": 0.0, "overlap": 2, "overlap_by_learner": [0, 0, 0, 0]}, "overlap of at least 1"),
    ("async_diloco", {}, "nothing is lost"),
    ("streaming", {}, "kept twice"),
    ("dylu", {}, "dynamic_steps = false"),
])  # fmt: skip
def test_key_where_nothing_is_replaced_is_refused_with_a_sentence(preset: str, protocol: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(preset_name=preset, overrides={"protocol": {"keep_overlap": True} | protocol})


def test_key_is_taken_where_only_some_learners_overlap() -> None:
    protocol = {"keep_overlap": True, "alpha": 0.0, "overlap": 0, "overlap_by_learner": [0, 0, 0, 1]}
    assert load(preset_name="streaming", overrides={"learners": 4, "protocol": protocol}).protocol.keep_overlap
