"""What a run's records say of its tokens, by the learners' tapes and by the syncer's."""

from __future__ import annotations

from typing import Any

from atoll.config import load
from atoll.protocol.ledger import Fates
from atoll.protocol.vocabulary import StepDone
from atoll.views.run import RunView, Summary, summarise
from atoll.views.tables import run_table


def after(steps: int, fates: Fates, **changes: Any) -> Summary:
    config = load(preset_name="decoupled", overrides={"learners": 1, "protocol": {"fragments": 6, "local_steps_per_round": 6}})
    view = RunView(1)
    for step in range(steps):
        view((step + 1) * 1000, 0, StepDone(100, 1, 1000, 2.0), ())
    return summarise(config, view, fates, **changes)


def test_steps_that_the_syncer_never_heard_of_lower_the_goodput_of_tokens() -> None:
    s = after(10, Fates(trained=6 * 800, merged=6 * 600, discarded={}, in_flight=6 * 200))
    assert (s.tokens_trained, s.tokens_unreported, s.token_goodput) == (800, 200, 0.6)
    assert s.token_shares == {"merged": 0.75, "in_flight": 0.25}, "shares of what was reported"


def test_tape_with_a_gap_cannot_raise_the_goodput_of_tokens() -> None:
    s = after(3, Fates(trained=6 * 800, merged=6 * 600, discarded={}, in_flight=6 * 200))
    assert (s.tokens_unreported, s.token_goodput) == (0, 0.75)


def test_table_has_both_goodputs() -> None:
    names = list(run_table(after(8, Fates(6 * 800, 6 * 600, {}, 6 * 200))).columns[0].cells)
    assert names.index("goodput of tokens") == names.index("goodput of time") + 1
