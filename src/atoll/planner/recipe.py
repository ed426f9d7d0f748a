"""Writes a plan as a recipe: the protocol's numbers, the learners, and the cluster for virtual runs."""

from __future__ import annotations

import msgspec

from atoll.config import Config
from atoll.planner import virtual
from atoll.planner.candidate import Candidate
from atoll.planner.score import Judge, Scored


def settings(scored: Scored, judge: Judge) -> Config:
    return virtual.settings_of(judge.keys(scored.candidate))


def recipe_toml(scored: Scored, judge: Judge, source: str) -> str:
    c, values = scored.candidate, judge.keys(scored.candidate)
    settings(scored, judge)  # fails here rather than when the recipe is read
    lines = [
        f"# Made by `atoll plan` from {source}: {100 * scored.score:.3g} % of the ideal speed expected",
        f"# (utilisation {100 * scored.utilisation:.3g} %, goodput {100 * scored.goodput:.3g} %, "
        f"token efficiency {100 * scored.tokens:.3g} %).",
        "#",
        "# `atoll sim` and `atoll train --virtual` run it on the cluster described below, whose steps take as long as planned",
        f"# and whose links have the rate that the plan may use. {_virtual_note(c, scored)}",
        f"# {_model_note(c, judge)} Data and the rest of the model are the reference ones: replace them with yours.",
    ]  # fmt: skip
    tables = msgspec.toml.encode({key: value for key, value in values.items() if value != {}}).decode()
    return "\n".join([*lines, tables])


def _virtual_note(c: Candidate, scored: Scored) -> str:
    if c.preset == "ddp":
        return "Its exchange takes as long as a step waits for the ring."
    together = scored.utilisation * scored.goodput
    return f"After start-up they should show a goodput of {100 * together:.3g} %."


def _model_note(c: Candidate, judge: Judge) -> str:
    if c.preset == "streaming":
        return f"P = {c.fragments} follows from the {judge.cluster.model.layers} layers, which the recipe sets."
    return "The outer settings are the preset's, which suit long runs."
