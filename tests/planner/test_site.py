"""The border: what a cluster file may say, and the one sentence for what it may not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import ConfigError
from atoll.planner import site

GOOD: dict[str, Any] = {
    "model": {"parameters": 1e9, "layers": 24},
    "sites": [
        {"name": "oslo", "chips": 16, "step_seconds": 2.0},
        {"name": "lima", "chips": 8, "step_seconds": 3.0, "count": 2},
    ],
    "links": [
        {"between": ["oslo", "lima"], "gbit": 1.0, "latency_seconds": 0.1},
        {"between": ["lima", "lima"], "gbit": 10.0},
    ],
}


def changed(path: str, value: Any) -> dict[str, Any]:
    raw: Any = copy.deepcopy(GOOD)
    here, (*parts, last) = raw, path.split(".")
    for part in parts:
        here = here[int(part)] if isinstance(here, list) else here.setdefault(part, {})
    if isinstance(here, list):
        here[int(last)] = value
    else:
        here[last] = value
    return raw  # type: ignore[no-any-return]


def test_a_good_file_is_accepted_and_links_are_found_either_way() -> None:
    cluster = site.cluster_from_builtins(GOOD)
    assert cluster.chips == 32
    assert cluster.link_between("lima", "oslo").latency_seconds == 0.1
    assert cluster.link_between("lima", "lima").gbit == 10.0


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("sites.0.mtbi_hours", -3.0, ["sites[0].mtbi_hours = -3.0", "> 0"]),
        ("sites.0.chips", 0, ["sites[0].chips = 0", ">= 1"]),
        ("sites.0.step_seconds", 0.0, ["sites[0].step_seconds = 0.0"]),
        ("links.0.gbit", 0.0, ["links[0].gbit = 0.0", "> 0"]),
        ("links.0.gbit", float("nan"), ["links[0].gbit", "finite"]),
        ("links.0.variation", 1.5, ["links[0].variation = 1.5"]),
        ("links.0.between", ["oslo", "lina"], ["'lina'", "did you mean 'lima'?"]),
        ("links.0.between", ["oslo", "oslo"], ["joins a site with itself", "inside_gbit"]),
        ("links.0.between", ["oslo"], ["must name two sites"]),
        ("links", [], ["none between 'oslo' and 'lima'", "[link]"]),
        ("links.1", {"between": ["oslo", "lima"], "gbit": 2.0}, ["two rows join lima and oslo"]),
        ("sites.0.chipz", 4, ["sites[0].chipz = 4", "did you mean sites[0].chips?"]),
        ("sits", [], ["did you mean sites?"]),
        ("sites.1.name", "oslo", ["two are named 'oslo'"]),
        ("sites", [], ["at least one"]),
        ("model", {}, ["model.parameters: is missing"]),
        ("model.parameters", "big", ["model.parameters = 'big'"]),
        ("syncer.site", "paris", ["syncer.site = 'paris'", "oslo, lima"]),
        ("fixed", {"interval": 24, "overlap": 24}, ["fixed.overlap = 24", "below fixed.interval = 24"]),
        ("fixed", {"learners": 1000}, ["fixed.learners = 1000", "32 chips"]),
        ("fixed", {"preset": "fedavg"}, ["fixed.preset = 'fedavg'", "must be ddp"]),
        ("quality", {"loss_slope": 0.0}, ["quality.loss_slope = 0.0"]),
    ],
)  # fmt: skip
def test_nonsense_is_refused_in_one_sentence(path: str, value: Any, says: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        site.cluster_from_builtins(changed(path, value))
    text = str(refused.value)
    assert "\n" not in text
    for part in says:
        assert part in text, text


def test_several_equal_sites_need_a_link_among_them() -> None:
    raw = changed("links", GOOD["links"][:1])
    with pytest.raises(ConfigError, match="none between the 2 sites of 'lima'"):
        site.cluster_from_builtins(raw)
    raw["link"] = {"gbit": 1.0}
    assert site.cluster_from_builtins(raw).link_between("lima", "lima").gbit == 1.0


def test_a_file_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[model\n")
    for name, says in (("a.toml", "not valid TOML"), ("b.toml", "no such file")):
        with pytest.raises(ConfigError, match=says):
            site.load_cluster(tmp_path / name)


def test_changed_moves_what_it_names_and_nothing_else() -> None:
    cluster = site.cluster_from_builtins(GOOD)
    assert cluster.changed() == cluster
    faster = cluster.changed(rate=2.0, latency=3.0)
    assert (faster.links[0].gbit, faster.links[0].latency_seconds) == (2.0, pytest.approx(0.3))
    assert faster.sites == cluster.sites
    worse = cluster.changed(interruptions=10.0, spread=0.2)
    assert worse.sites[0].mtbi_hours == 876.0
    assert worse.sites[1].speed_spread == 0.2
