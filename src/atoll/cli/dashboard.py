"""`--dashboard`: the page of a run while it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from atoll.chaos import Fault, Kill, Pause
from atoll.errors import UserError
from atoll.ids import LearnerId
from atoll.tape.folder import RunFolder

DashboardOption = Annotated[
    bool, typer.Option("--dashboard", help="Serve a page of the run on this machine while it trains, and print its address.")
]
AllowChaosOption = Annotated[
    bool, typer.Option("--allow-chaos", help="With --dashboard: the page has buttons that kill and pause learners.")
]
AWAY_SECONDS: Final = 5.0
"""How long a learner is dead or paused by a button."""
FAULTS: Final[dict[str, Callable[[LearnerId], Fault]]] = {
    "kill": lambda learner: Kill(0.0, learner, AWAY_SECONDS),
    "pause": lambda learner: Pause(0.0, learner, AWAY_SECONDS),
}


@dataclass(frozen=True)
class Dashboard:
    listen: tuple[str, int] | None = None
    """None: there is no page."""
    chaos: bool = False

    @staticmethod
    def of(wanted: bool, allow_chaos: bool, *, live: bool) -> Dashboard:
        if wanted and not live:
            raise UserError("--dashboard: shows processes while they train; after --virtual or --tape use atoll watch RUN")
        if allow_chaos and not wanted:
            raise UserError("--allow-chaos: its buttons are on the page; give --dashboard too")
        return Dashboard(("127.0.0.1", 0), allow_chaos) if wanted else NO_DASHBOARD

    @contextmanager
    def shown(self, run: RunFolder, say: Callable[[str], None], ask: Callable[[Fault], None] | None = None) -> Iterator[None]:
        """The page is served in a thread of this process, which only starts and watches the run's processes. `ask` strikes with
        a fault; without it there are no buttons."""
        if self.listen is None:
            yield
            return
        from atoll.runtime.watch.server import PageThread
        from atoll.runtime.watch.source import WatchedRun

        def strike(name: str, learner: LearnerId) -> str:
            if name not in FAULTS or ask is None:
                raise UserError(f"fault {name!r}: must be one of {', '.join(FAULTS)}")
            ask(FAULTS[name](learner))
            return f"{name} learner {learner}; it is back after {AWAY_SECONDS:.0f} s"

        has_buttons = self.chaos and ask is not None
        watched = WatchedRun(run, chaos=tuple(FAULTS) if has_buttons else ())
        page = PageThread(watched, host=self.listen[0], port=self.listen[1], strike=strike if has_buttons else None)
        say(f"watch this run at {page.url}")
        try:
            yield
        finally:
            page.close()


NO_DASHBOARD: Final = Dashboard()
