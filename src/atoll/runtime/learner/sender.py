"""Sends a learner's messages in order, waiting for the device off the event loop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

GOODBYE_SECONDS = 5.0
"""How long the last messages may take to be sent."""


class Sender:
    """Sends messages in the order of `put`. A message that waits for the device (a packet that a GPU is still encoding) waits in
    a separate thread, and later messages queue behind it. A control message that may overtake does so unless another control
    message is queued."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._condition = threading.Condition()
        self._waiting: deque[tuple[Callable[[], None], bool]] = deque()
        """(job, whether it is a control message). The first is running."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, job: Callable[[], None], *, waits_for_device: bool, control: bool, overtakes: bool) -> None:
        with self._condition:
            passes = overtakes and not any(is_control for _, is_control in self._waiting)
            if not waits_for_device and (passes or not self._waiting):
                job()
                return
            self._waiting.append((job, control))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="sender", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def drain(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: not self._waiting, GOODBYE_SECONDS)

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                job = self._waiting[0][0]
            try:
                job()
            except Exception as error:
                self._failed(error)
            del job  # the link holds the bytes from here on
            with self._condition:
                self._waiting.popleft()
                self._condition.notify_all()
