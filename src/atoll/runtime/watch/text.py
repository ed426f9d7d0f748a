"""A run in a terminal: the same answers as the page's, as a table that is drawn anew, or in a pipe as lines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import parse_qs, urlencode, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atoll.errors import UserError
from atoll.runtime.watch.answers import BinAnswer, EventsAnswer, LanePresent, RunState, Status
from atoll.views.index.rows import LaneState

LOOK_SECONDS = 1.0
LANE_WIDTH = 48
EVENTS_SHOWN = 8
LINES_MAX = 200
"""Events at once, in a pipe: a run that is long over has very many."""
FOREVER = 1e9
ENDED = (RunState.FINISHED, RunState.CUT)
MARKS: dict[LaneState, tuple[str, str]] = {
    LaneState.TRAINING: ("█", "blue"),
    LaneState.WAITING: ("▒", "yellow"),
    LaneState.JOINING: ("↻", "cyan"),
    LaneState.SILENT: ("·", "magenta"),
    LaneState.LOST: ("✕", "red"),
    LaneState.LEFT: ("○", "bright_black"),
}


class Answering(Protocol):
    """A run of this machine, or one behind a page's address."""

    def status(self) -> Status: ...
    def bins(self, begins: float, ends: float, most: int) -> list[BinAnswer]: ...
    def events(self, begins: float, ends: float, most: int) -> EventsAnswer: ...


class RemoteRun:
    """The server of a page, asked over HTTP."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._token = (parse_qs(parts.query).get("token") or [""])[0]
        if parts.scheme != "http" or not parts.netloc or not self._token:
            raise UserError(f"address {url}: must be that of a page, http://HOST:PORT/?token=TOKEN, as atoll watch prints it")
        self._base = f"{parts.scheme}://{parts.netloc}"
        self._open = build_opener(ProxyHandler({})).open  # the page is never behind a proxy

    def _get(self, path: str, kind: Any, **query: float) -> Any:
        request = Request(f"{self._base}/api/{path}?{urlencode(query)}", headers={"Authorization": f"Bearer {self._token}"})
        try:
            with self._open(request, timeout=10.0) as answer:
                return msgspec.json.decode(answer.read(), type=kind)
        except HTTPError as error:
            raise UserError(f"address {self._base}: {error.read(300).decode(errors='replace')}") from None
        except (URLError, OSError, msgspec.MsgspecError) as error:
            raise UserError(f"address {self._base}: no page answers there ({getattr(error, 'reason', error)})") from None

    def status(self) -> Status:
        return self._get("status", Status)  # type: ignore[no-any-return]

    def bins(self, begins: float, ends: float, most: int) -> list[BinAnswer]:
        return self._get("bins", list[BinAnswer], **{"from": begins, "to": ends, "most": most})  # type: ignore[no-any-return]

    def events(self, begins: float, ends: float, most: int) -> EventsAnswer:
        return self._get("events", EventsAnswer, **{"from": begins, "to": ends, "most": most})  # type: ignore[no-any-return]


def show_text(run: Answering, console: Console) -> None:
    """Until the run ends. On a terminal a view that is drawn anew; in a pipe a line for each event, and for progress."""
    pause = threading.Event()
    if not console.is_terminal:
        for line in text_lines(run, pause):
            console.print(line, soft_wrap=True)
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            status = run.status()
            live.update(text_view(run, status), refresh=True)
            if status.state in ENDED:
                return
            pause.wait(LOOK_SECONDS)


# ---------------------------------------------------------------- lines


def text_lines(run: Answering, pause: threading.Event, every: float = 0.1) -> Iterator[str]:
    """`every`: the share of the run between two lines of progress."""
    said, next_step, seen = False, 0, 0
    while True:
        status = run.status()
        if not said and status.settings is not None:
            said = True
            yield _title(status)
        if status.events > seen:
            events = run.events(0.0, FOREVER, min(status.events - seen, LINES_MAX)).events
            if len(events) < status.events - seen:
                yield f"... {status.events - seen - len(events):,} events"
            yield from (f"{event['at']:10.2f} s  {event['text']}" for event in events)
            seen = status.events
        total = status.settings.total_steps if status.settings is not None else 0
        if status.last_step >= next_step and status.rounds:
            next_step = status.last_step + max(1, round(total * every))
            yield _progress(status)
        if status.state in ENDED:
            yield f"{status.state}: {_progress(status)}"
            return
        pause.wait(LOOK_SECONDS)


def _title(status: Status) -> str:
    s = status.settings
    assert s is not None
    return f"{status.name}: {s.preset}, {s.model}, {s.learners} learners, {s.fragments} fragments, quorum {s.quorum}"


def _progress(status: Status) -> str:
    total = status.settings.total_steps if status.settings is not None else 0
    loss = f", train loss {status.loss:.4f}" if status.loss is not None else ""
    in_sync = sum(lane.state is LaneState.TRAINING for lane in status.lanes)
    return f"step {status.last_step} of {total}, {in_sync} of {len(status.lanes)} learners in sync{loss}"


# ---------------------------------------------------------------- a terminal


def text_view(run: Answering, status: Status) -> RenderableType:
    if status.settings is None:
        return Text(f"{status.name}: its processes are being started")
    bins = run.bins(0.0, max(status.ends, 1e-6), LANE_WIDTH)
    total = status.settings.total_steps
    head = Text(f"{_title(status)}\n{status.state}: {_progress(status)}, {status.ends:.1f} s", style="bold")
    bar = Padding(ProgressBar(total=max(1, total), completed=status.last_step, width=LANE_WIDTH + 24), 0)  # ends its line
    parts: list[RenderableType] = [head, bar, _lanes(status, bins)]
    if bins:
        parts += [_why(bins), _fates(bins[-1])]
    parts.append(_events(run.events(0.0, status.ends, EVENTS_SHOWN)))
    return Group(*parts)


def _lanes(status: Status, bins: list[BinAnswer]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("learner", "", "now", "loss", "up", "merged in"):
        table.add_column(name, no_wrap=True)
    present = {lane.learner: lane for lane in status.lanes}
    for learner in sorted({*present, *(lane.learner for b in bins for lane in b.lanes)}):
        lanes = [next((lane for lane in b.lanes if lane.learner == learner), None) for b in bins]
        up = sum(lane.bytes_up for lane in lanes if lane is not None)
        merged = sum(lane.merged for lane in lanes if lane is not None)
        strip = Text()
        for b, lane in zip(bins, lanes, strict=True):
            width = max(1, round(LANE_WIDTH * (b.ends - b.begins) / max(status.ends, 1e-9)))
            state = _dominant(lane.permille) if lane is not None else None
            mark, style = MARKS[state] if state is not None else (" ", "")
            strip.append(mark * width, style=style)
        strip.truncate(LANE_WIDTH)
        now = present.get(learner)
        table.add_row(str(learner), strip, _now(now), _loss(now), f"{up / 1e6:,.1f} MB", f"{merged:,} rounds")
    return table


def _dominant(permille: tuple[int, ...]) -> LaneState | None:
    """A trouble that lasted a fifth of a bin is shown before the training around it."""
    worst = max(range(1, len(permille)), key=lambda state: permille[state])
    if permille[worst] >= 200:
        return LaneState(worst)
    return LaneState.TRAINING if permille[0] else None


def _now(lane: LanePresent | None) -> Text:
    state = lane.state if lane is not None else LaneState.LEFT
    return Text(state.name.lower(), style=MARKS[state][1])


def _loss(lane: LanePresent | None) -> str:
    return f"{lane.loss:.4f}" if lane is not None and lane.loss is not None else "–"


def _why(bins: list[BinAnswer]) -> Text:
    whys: dict[str, int] = {}
    for b in bins:
        for why, count in b.whys.items():
            whys[why] = whys.get(why, 0) + count
    words = ", ".join(f"{count:,} {why.replace('_', ' ')}" for why, count in sorted(whys.items()))
    return Text(f"rounds: {words}; gathered again: {sum(b.attempts for b in bins):,}")


def _fates(last: BinAnswer) -> Text:
    trained = max(1, last.fates["trained"])
    parts = {name: count for name, count in last.fates.items() if name != "trained"}
    shares = (f"{name.replace('_', ' ')} {100 * count / trained:.1f} %" for name, count in parts.items())
    return Text(f"tokens: {', '.join(shares)}")


def _events(answer: EventsAnswer) -> Text:
    lines = [f"{event['at']:10.2f} s  {event['text']}" for event in answer.events]
    return Text("\n".join(lines) or "no faults and no recoveries yet", style="dim")
