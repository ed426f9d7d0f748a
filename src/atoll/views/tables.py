"""Summaries as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from atoll.views.run import Summary


def run_table(s: Summary) -> Table:
    """The verdict of one run."""
    table = Table(title=f"{s.preset}, {s.learners} learners, seed {s.seed}", show_header=False)
    table.add_column("what")
    table.add_column("figure")
    rows = [
        ("outer steps", str(s.total_steps)),
        (f"{s.clock} time", f"{s.seconds:,.1f} s"),
        ("goodput", f"{s.goodput:.1%} of the learners' time went into steps that count"),
        ("uptime", f"{s.uptime:.1%} of the time at least one learner was stepping"),
        ("waited", f"{s.waited_seconds:,.1f} s, all learners together" if s.waited_seconds else "no learner ever waited"),
        ("rounds by participants", ", ".join(f"{n}: {count}" for n, count in s.participants.items())),
        ("(token, fragment)", _tokens(s)),
        ("bytes up, down", f"{s.bytes_up:,}, {s.bytes_down:,}"),
    ]
    rows += [(f"  learner {t.learner}", f"{t.bytes_up:,}, {t.bytes_down:,}") for t in s.traffic[:16]]
    rows += [("fault", fault) for fault in s.faults[:16]]
    rows += [
        ("recovery", f"learner {r.learner} from {r.source} in {r.seconds:.2f} s, {r.bytes:,} bytes") for r in s.recoveries[:12]
    ]
    if len(s.recoveries) > 12:
        rows.append(("", f"and {len(s.recoveries) - 12} more recoveries"))
    if s.loss_first is not None and s.loss_final is not None:
        rows.append(("held-out loss", f"{s.loss_first:.4f} at first, {s.loss_final:.4f} at the end"))
    if s.heldout:
        rows.append(("  on the way", _on_the_way(s)))
    if s.accuracy is not None:
        rows.append(("held-out accuracy", f"{s.accuracy:.2%}"))
    if s.twin_loss and s.loss_final:
        rows.append(("twin without faults", f"{s.twin_loss:.4f}: this run ends {s.loss_final / s.twin_loss - 1:+.2%} from it"))
    if s.theta_sha256:
        rows.append(("Theta", f"sha256 {s.theta_sha256}"))
    if s.run_dir:
        rows.append(("run", s.run_dir))
    for what, figure in rows:
        table.add_row(what, figure)
    return table


def _on_the_way(s: Summary, most: int = 8) -> str:
    """Spread over all of them."""
    every = -(-len(s.heldout) // most)
    return ", ".join(f"{point.outer_step}: {_loss(point.loss)}" for point in s.heldout[every - 1 :: every])


def _tokens(s: Summary) -> str:
    t = s.tokens
    why = ", ".join(f"{reason} {count:,}" for reason, count in t.discarded_by_reason.items())
    discarded = f"discarded {t.discarded:,} ({why or 'none'})"
    return f"trained {t.trained:,} = merged {t.merged:,} + {discarded} + in flight {t.in_flight:,}"


def comparison_table(summaries: Sequence[Summary], reference: str = "ddp") -> Table:
    """Presets line by line on the same recipe."""
    base = next((s for s in summaries if s.preset == reference), None)
    table = Table(title="held-out loss of Theta at equal outer steps")
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
            s.preset, _loss(s.loss_first), _loss(s.loss_final), ratio, over, f"{tokens_trained(s):,}",
            megabytes(s.bytes_up + s.bytes_down), f"{s.goodput:.1%}", f"{s.waited_seconds:,.0f} s",
            *(["" if s.accuracy is None else f"{s.accuracy:.2%}"] * judged),
        )  # fmt: skip
    return table


def tokens_trained(s: Summary) -> int:
    return s.tokens.trained // max(1, s.fragments)


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f}"


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
