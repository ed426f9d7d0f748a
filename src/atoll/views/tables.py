"""Summaries as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.table import Table

from atoll.views.run import Summary


def run_table(s: Summary) -> Table:
    """One run."""
    table = Table(title=f"{s.preset}, {s.learners} learners, seed {s.seed}", show_header=False)
    table.add_column("what")
    table.add_column("figure")
    for what, figure in [*_times(s), *_tokens(s), *_traffic(s), *_events(s), *_losses(s), *_places(s)]:
        table.add_row(what, figure)
    return table


Rows = list[tuple[str, str]]


def _times(s: Summary) -> Rows:
    virtual = s.clock == "virtual"
    training = "of virtual time" if virtual else "by the wall clock, from the first inner step to the last event"
    rows = [
        ("steps", f"{s.total_steps:,} (one is an inner step of every learner that keeps pace)"),
        ("rounds that merged", _rounds(s)),
        *_stages(s),
        ("training time", f"{s.seconds:,.1f} s {training}"),
    ]
    if s.command_seconds:
        also = "imports and evaluation included" if virtual else "start of the processes, evaluation and replay included"
        rows.append(("command took", f"{s.command_seconds:,.1f} s, {also}"))
    waited = f"{s.waited_seconds:,.1f} s, all learners together" if s.waited_seconds else "no learner ever waited"
    if virtual and s.goodput_after_startup:
        after = f"goodput after it {s.goodput_after_startup:.1%}"
        rows.append(("start-up", f"{s.startup_seconds:,.1f} s until the first round; {after}"))
    return [
        *rows,
        ("goodput of time", f"{s.goodput:.1%} of the learners' time was spent in steps that the syncer counted"),
        ("goodput of tokens", f"{s.token_goodput:.1%} of the trained tokens reached Theta"),
        ("uptime", f"{s.uptime:.1%} of the time at least one learner was stepping"),
        ("waited", waited),
    ]


def _stages(s: Summary) -> Rows:
    """Virtual runs take no time to merge."""
    if not s.stages or s.clock == "virtual":
        return []
    between = s.stages["between_commits"]
    parts = ", ".join(f"{name} {1e3 * value:,.1f} ms" for name, value in s.stages.items() if name != "between_commits")
    return [("  of the syncer", f"{parts}; {1e3 * between:,.1f} ms between commits (medians)")]


def _rounds(s: Summary) -> str:
    by = ", ".join(f"{count:,} with {n} learner{'s' * (n != '1')}" for n, count in s.participants.items())
    return f"{s.rounds_merged:,}: {by}" if by else "none: no update was due"


FATES: Final[dict[str, str]] = {
    "merged": "merged into Theta",
    "discarded_overlap": "discarded: trained while an update was on its way, then overwritten by its result",
    "discarded_not_in_round": "discarded: overwritten by a round that their learner was not part of",
    "discarded_lost": "discarded: their learner was lost",
    "discarded_left": "discarded: their learner left before they were merged",
    "discarded_rolled_back": "discarded: a rollback undid their merge, or overwrote them",
    "in_flight": "not merged yet when the run ended",
}
"""What became of trained tokens, in words: a test holds that every reason of the ledger has some."""


def _tokens(s: Summary) -> Rows:
    if not s.tokens_trained:
        return []
    # A token trains every fragment, and fragments are merged at different steps: hence shares.
    shares = [(f"  {share:.1%}", FATES.get(name, name)) for name, share in s.token_shares.items()]
    rows = [("tokens trained", f"{s.tokens_trained:,} by all learners; of their training, mean over the fragments:"), *shares]
    if s.tokens_unreported:
        rows.append(("  beside them", f"{s.tokens_unreported:,} in steps whose learner was gone before it could report them"))
    return rows


def _traffic(s: Summary) -> Rows:
    rows = [("bytes up, down", f"{s.bytes_up:,}, {s.bytes_down:,}")]
    return rows + [(f"  learner {t.learner}", f"{t.bytes_up:,}, {t.bytes_down:,}") for t in s.traffic[:16]]


def _events(s: Summary) -> Rows:
    rows = [("fault", fault) for fault in s.faults[:16]]
    rows += [
        ("recovery", f"learner {r.learner} from {r.source} in {r.seconds:.2f} s, {r.bytes:,} bytes") for r in s.recoveries[:12]
    ]
    more = len(s.recoveries) - 12
    rows += [("", f"and {more} more recoveries")] if more > 0 else []
    return rows + [("records missing", str(each)) for each in s.missing[:12]]


def _losses(s: Summary) -> Rows:
    rows = []
    if s.loss_first is not None and s.loss_final is not None:
        rows.append(("held-out loss", f"{s.loss_first:.4f} at first, {s.loss_final:.4f} at the end"))
    if s.loss_average is not None:
        rows.append(("of the average over time", f"{s.loss_average:.4f}"))
    if s.heldout:
        rows.append(("  by step", _on_the_way(s)))
    if s.curve is not None:
        rows.append(("  as a picture", s.curve))
    if s.accuracy is not None:
        rows.append(("held-out accuracy", f"{s.accuracy:.2%}"))
    if s.twin_loss and s.loss_final:
        rows.append(("twin without faults", f"{s.twin_loss:.4f}: this run ends {s.loss_final / s.twin_loss - 1:+.2%} from it"))
    return rows


def _places(s: Summary) -> Rows:
    rows = [("Theta", f"sha256 {s.theta_sha256}")] if s.theta_sha256 else []
    return rows + ([("run", s.run_dir)] if s.run_dir else [])


def _on_the_way(s: Summary, most: int = 8) -> str:
    """At most so many points, spread over the run."""
    every = -(-len(s.heldout) // most)
    return ", ".join(f"{point.outer_step}: {_loss(point.loss)}" for point in s.heldout[every - 1 :: every])


def comparison_table(summaries: Sequence[Summary], reference: str = "ddp") -> Table:
    """Presets line by line on the same recipe."""
    base = next((s for s in summaries if s.preset == reference), None)
    table = Table(title="held-out loss of Theta after the same number of steps")
    columns = ["preset", "first", "final", "ratio", f"over {reference}", "tokens", "MB up + down", "goodput", "waited"]
    judged = any(s.accuracy is not None for s in summaries)
    for column in columns + ["accuracy"] * judged:
        table.add_column(column, justify="left" if column == "preset" else "right", no_wrap=True)
    for s in summaries:
        over = ""
        if base and base.loss_final and s.loss_final:
            over = f"{s.loss_final / base.loss_final - 1:+.1%}"
        ratio = f"{s.loss_final / s.loss_first:.3f}" if s.loss_first and s.loss_final else ""
        table.add_row(
            s.preset, _loss(s.loss_first), _loss(s.loss_final), ratio, over, f"{s.tokens_trained:,}",
            megabytes(s.bytes_up + s.bytes_down), f"{s.goodput:.1%}", f"{s.waited_seconds:,.0f} s",
            *(["" if s.accuracy is None else f"{s.accuracy:.2%}"] * judged),
        )  # fmt: skip
    return table


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f}"


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
