"""Debian's Chromium, driven by Selenium; no browser is downloaded."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
READY = "return document.body.dataset.rounds || ''"


def missing() -> str:
    """Why there is no browser here; empty: there is one."""
    try:
        import selenium
    except ImportError:
        return "selenium is not installed (pip install atoll[page])"
    assert selenium
    return "" if CHROMIUM and DRIVER else "Chromium is not installed (apt install chromium chromium-driver)"


@contextmanager
def chromium(width: int = 1400, height: int = 1600) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    assert CHROMIUM is not None and DRIVER is not None
    options.binary_location = CHROMIUM
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(word)
    options.add_argument(f"--window-size={width},{height}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield browser
    finally:
        browser.quit()


@contextmanager
def page_of(*words: object) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A command that serves a page: its address, and its process, which ends with this."""
    argv = [sys.executable, "-u", "-m", "atoll", *map(str, words)]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(argv, stdout=said, stderr=subprocess.STDOUT, text=True)

        def address() -> str:
            said.seek(0)
            found = re.search(r"http://\S+", printed := said.read())
            assert found or process.poll() is None, f"no address was printed: {printed}"
            return found[0] if found else ""

        try:
            yield until(address, 120), process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def until(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Its first value that is true. A wait for a browser, which has no event to wait for."""
    ends = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < ends, "it did not come about in time"
        time.sleep(0.05)
    return value


def text(browser: Any, name: str) -> str:
    return str(browser.execute_script("return document.getElementById(arguments[0])?.textContent ?? ''", name))


def renderer_bytes(browser: Any) -> int:
    """Memory of the process that has the page, its share of what processes share included once."""
    most = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
            if b"--type=renderer" in words and _is_below(int(process.name), browser.service.process.pid):
                rollup = (process / "smaps_rollup").read_text()
                most = max(most, 1024 * int(re.findall(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)[0]))
        except (OSError, IndexError):
            continue
    return most


def step_back(browser: Any) -> None:
    """All threads of the browser take only what others leave of the cores, as if it were on another machine. It gives a page that
    is opened its usual priority back, so this is for every page anew."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if _is_below(int(process.name), browser.service.process.pid):
                for thread in (process / "task").iterdir():
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)


def _is_below(process: int, ancestor: int) -> bool:
    while process > 1:
        if process == ancestor:
            return True
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def peak_bytes(process: int) -> int:
    return 1024 * int(re.findall(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)[0])
