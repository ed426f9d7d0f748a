"""The live driver, in the same order as the simulator: ask the machine, append to the tape, carry out the effects.

Events may come from several threads; one lock makes them a sequence. An event that an effect causes is processed after the
current one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from atoll.ids import Nanos, WorkerId
from atoll.protocol.interface import Machine, Observer, Payload
from atoll.protocol.vocabulary import DeadlinePassed, Effect, Event
from atoll.runtime.clock import Clock
from atoll.tape.format import TapeWriter


class Driver:
    def __init__(
        self, machine: Machine, worker: WorkerId, clock: Clock, tape: TapeWriter | None,
        carry_out: Callable[[Effect, Payload | None], None], arm: Callable[[Nanos | None], None],
        must_sync: Callable[[Event], bool] = lambda event: False,
        on_tape_error: Callable[[OSError], None] | None = None, failed: Callable[[BaseException], None] = lambda error: None,
        observers: Sequence[Observer] = (), between: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`arm` receives the next deadline, or None. `must_sync`: this event must be fsynced before its effects are carried
        out. `on_tape_error`: the tape cannot be written, and no effect is carried out until `retry_tape` succeeds. `failed`: a
        bug in the middle of an event; no event is processed after it. `observers` see each event after it was taped. `between`
        is called after each event, before the next."""
        self.machine = machine
        self._worker = worker
        self._clock = clock
        self._tape = tape
        self._carry_out = carry_out
        self._arm = arm
        self._must_sync = must_sync
        self._on_tape_error = on_tape_error
        self._failed = failed
        self._between = between
        self._observers = observers
        self._closed = False
        self._lock = threading.RLock()
        self._inbox: deque[tuple[Event, Payload | None]] = deque()
        self._busy = False
        self._held: tuple[Nanos, Event, Sequence[Effect], Payload | None] | None = None
        self._deadline: Nanos | None = None
        self.events = 0

    def dispatch(self, event: Event, payload: Payload | None = None) -> None:
        with self._lock:
            if not self._closed:
                self._inbox.append((event, payload))
                self._drain()

    @property
    def is_blocked(self) -> bool:
        return self._held is not None

    def stop(self) -> None:
        """Ignores later events. The tape ends here and has no footer: the run can go on from it."""
        with self._lock:
            self._closed = True

    def close(self) -> None:
        """Ignores later events, so that a sealed tape stays as it is."""
        with self._lock:
            self._closed = True
            if self._tape is not None:
                self._tape.close()

    def deadline_passed(self) -> None:
        with self._lock:
            due = self.machine.deadline()
            if due is not None and self._clock.now() >= due:
                self._deadline = None
                self.dispatch(DeadlinePassed())
            else:
                self._arm(due)

    def retry_tape(self) -> bool:
        """Writes the held event to the tape again. True if that succeeded and processing goes on."""
        with self._lock:
            if self._held is not None and not self._busy:
                held, self._held = self._held, None
                self._guarded(lambda: self._record_and_execute(*held))
            self._drain()
            return self._held is None

    def _drain(self) -> None:
        if not self._busy and self._held is None:
            self._guarded(self._process_inbox)

    def _guarded(self, work: Callable[[], None]) -> None:
        self._busy = True
        try:
            work()
        except BaseException as error:
            self._closed = True  # the effects were carried out in part, so no later event can rely on the state
            self._failed(error)
            raise
        finally:
            self._busy = False

    def _process_inbox(self) -> None:
        while self._inbox and self._held is None:
            event, payload = self._inbox.popleft()
            now = self._clock.now()
            self.events += 1
            self._record_and_execute(now, event, self.machine.on(event, now), payload)

    def _record_and_execute(self, now: Nanos, event: Event, effects: Sequence[Effect], payload: Payload | None) -> None:
        if self._tape is not None:
            try:
                self._tape.append(now, self._worker, event, effects, sync=self._must_sync(event))
            except OSError as error:
                if self._on_tape_error is None:
                    raise
                self._held = (now, event, effects, payload)
                self._on_tape_error(error)
                return
        for observe in self._observers:
            observe(now, self._worker, event, effects)
        for effect in effects:
            self._carry_out(effect, payload)
        deadline = self.machine.deadline()
        if deadline != self._deadline:
            self._deadline = deadline
            self._arm(deadline)
        self._between()
