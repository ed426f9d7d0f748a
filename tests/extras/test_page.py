"""The page in a browser: a live run that moves, a kill by its button, a large run, keys, and a phone."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import browser as chrome
import pytest
from browser import chromium, page_of, text, until
from made_run import make_run

ROOT = Path(__file__).parents[2]
WEB, BUILT = ROOT / "web", ROOT / "src" / "atoll" / "runtime" / "watch" / "page"
pytestmark = [pytest.mark.extras, pytest.mark.skipif(bool(chrome.missing()), reason=chrome.missing() or "there is a browser")]

LANES = "return [...document.querySelectorAll('.lanes .now')].map((e) => e.dataset.state)"
PIXELS = """const c = document.getElementById(arguments[0]);
return [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data].reduce((a, b, i) => (a * 31 + b + i) % 1000003, 7)"""
JUMP = """const [number, done] = arguments, began = performance.now(), title = document.getElementById('h-round');
const drawn = () => requestAnimationFrame(() => requestAnimationFrame(() => done((performance.now() - began) / 1000)));
const wanted = `Round ${number.toLocaleString('en')}`;
const seen = new MutationObserver(() => title.textContent === wanted && (seen.disconnect(), drawn()));
seen.observe(title, { childList: true });
const box = document.getElementById('goto');
box.value = String(number);
box.dispatchEvent(new Event('change'));"""
"""Seconds until the round is told and drawn, by the browser's own clock: its driver takes a tenth of a second for every word."""
STEADY = ["--set", "inner.warmup_share=0.0", "--set", "data.heldout_every=0"]


def step(browser: Any) -> int:
    found = re.match(r"[\d,]+", text(browser, "f-step"))
    return int(found[0].replace(",", "")) if found else 0


def complaints(browser: Any) -> list[str]:
    severe = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    return [message for message in severe if "favicon" not in message]


def test_live_run_moves_and_a_kill_by_the_button_is_a_dead_lane_and_a_recovery(tmp_path: Path) -> None:
    recipe, charts = ROOT / "recipes" / "tiny.toml", ("loss", "rounds")
    words = ("train", recipe, "--learners", 3, "--set", "total_steps=4000", *STEADY, "--out", tmp_path / "run")
    with page_of(*words, "--dashboard", "--allow-chaos") as (url, _), chromium() as browser:
        browser.get(url)
        until(lambda: step(browser) > 20, 120)
        assert browser.execute_script(LANES) == ["training"] * 3
        first, loss = step(browser), text(browser, "f-loss-now")
        drawn = {name: browser.execute_script(PIXELS, name) for name in charts}
        until(lambda: step(browser) > first + 20)
        assert text(browser, "f-loss-now") != loss
        assert all(browser.execute_script(PIXELS, name) != drawn[name] for name in charts)
        assert re.search(r"Round [\d,]+", text(browser, "h-round")) and text(browser, "why").startswith("It closed")

        browser.find_element("css selector", "button[data-fault=kill][data-learner='1']").click()
        until(lambda: browser.execute_script(LANES)[1] == "lost", 30)
        assert browser.execute_script(LANES)[0] == "training", "the others train on"
        until(lambda: browser.execute_script(LANES)[1] == "training", 90)
        until(lambda: "learner1 recovered from" in text(browser, "events"))
        assert "learner1 is lost" in text(browser, "events")
        assert not complaints(browser)


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made")
    make_run(directory, learners=8, rounds=600)
    return directory


def test_keys_move_through_the_rounds_and_the_page_asks_nobody_else(small_run: Path) -> None:
    with page_of("watch", small_run) as (url, _), chromium() as browser:
        browser.get(url)
        until(lambda: browser.execute_script(chrome.READY) == "600")
        assert text(browser, "state").endswith("finished") and text(browser, "h-round") == "Round 600"
        body = browser.find_element("tag name", "body")
        for keys, expected in (("\ue012", "Round 599"), ("\ue011", "Round 1"), ("\ue014", "Round 2"), ("\ue010", "Round 600")):
            body.send_keys(keys)  # left, Home, right, End
            until(lambda expected=expected: text(browser, "h-round") == expected, 10)  # type: ignore[misc]
        span = text(browser, "to"), text(browser, "from")
        body.send_keys("+")
        until(lambda: (text(browser, "to"), text(browser, "from")) != span, 10)
        browser.find_element("id", "goto").send_keys("300\n")
        until(lambda: text(browser, "h-round") == "Round 300", 10)
        asked = browser.execute_script("return performance.getEntriesByType('resource').map((e) => e.name)")
        own = url.partition("/?")[0]
        assert asked and all(address.startswith(f"{own}/") for address in asked)
        assert not complaints(browser)


def test_wrong_token_shows_nothing_of_the_run(small_run: Path) -> None:
    with page_of("watch", small_run) as (url, _), chromium() as browser:
        browser.get(url[:-1])
        assert "token is missing or wrong" in browser.page_source and "decoupled" not in browser.page_source
        said = "then(() => document.title = 'read', () => document.title = 'refused')"
        browser.get(f"data:text/html,<script>fetch('{url.replace('/?', '/api/status?')}').{said}</script>")
        until(lambda: browser.title == "refused", 10)


def test_phone_has_no_sideways_scrolling(small_run: Path) -> None:
    with page_of("watch", small_run) as (url, _), chromium(500, 900) as browser:
        phone = {"width": 375, "height": 800, "deviceScaleFactor": 2, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
        browser.get(url)
        until(lambda: browser.execute_script(chrome.READY) == "600")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 375
        high = browser.execute_script("return document.getElementById('next').getBoundingClientRect().height")
        assert high >= 36, "a thumb hits it"


def test_run_of_64_learners_and_100_000_rounds_opens_in_5_s_and_any_round_in_1_s(tmp_path: Path) -> None:
    make_run(tmp_path, learners=64, rounds=100_000)
    with page_of("watch", tmp_path) as (url, process), chromium() as browser:
        began = time.monotonic()
        browser.get(url)
        until(lambda: browser.execute_script(chrome.READY) == "100000", 20)
        opened = time.monotonic() - began
        assert text(browser, "h-round") == "Round 100,000" and len(browser.execute_script(LANES)) == 64
        slowest = max(browser.execute_async_script(JUMP, number) for number in (1, 77_777, 50_000, 12_345, 99_999))
        memory = chrome.peak_bytes(process.pid) + chrome.renderer_bytes(browser)
        assert opened < 5.0 and slowest < 1.0 and memory < 500e6, (opened, slowest, memory)


@pytest.mark.skipif(not (WEB / "node_modules").is_dir() or shutil.which("node") is None, reason="needs node, and npm ci in web/")
def test_build_gives_the_files_that_are_in_the_package(tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in BUILT.iterdir()}
    subprocess.run(["npx", "tsc", "--noEmit"], cwd=WEB, check=True)
    subprocess.run(["node", "build.mjs"], cwd=WEB, check=True)
    assert {path.name: path.read_bytes() for path in BUILT.iterdir()} == before
