"""A syncer that listens in a thread of this process, and loops for `atoll.join`: for tests about loops, not about processes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import atoll
from atoll.config import CUSTOM, Config, load
from atoll.ids import Nanos, WorkerId
from atoll.protocol.vocabulary import Effect, Event, Goodbye, Received
from atoll.runtime.shards.group import ShardStarter
from atoll.runtime.syncer.directory import SyncerDirectory
from atoll.runtime.syncer.process import SyncerProcess
from atoll.tape.format import Tape
from atoll.tasks.registry import task_for
from atoll.transport import server_credentials
from atoll.transport.keys import load_server

PATIENCE_SECONDS = 180.0
UNHURRIED = {"silence_steps": 1e4, "patience_seconds": 60.0, "recovery_intervals": 1e4}
"""Of [limits]: a round takes milliseconds here, and deadlines follow from it; one thread may stall for seconds."""
ONE_ROUND_A_STEP = {"local_steps_per_round": 2, "fragmentation": "sub_tensor", "fragments": 2, "overlap": 1, "codec_up": "fp32"}


EXACT = {"local_steps_per_round": 4, "fragmentation": "sub_tensor", "fragments": 4, "overlap": 1}


def exact(**more: Any) -> Config:
    """Every learner adopts at fixed steps, so two runs can be compared version by version. `more`: keys and sections."""
    protocol = EXACT | more.pop("protocol", {})
    return load(preset_name="streaming", overrides={
        "learners": 1, "total_steps": 10, "model": {"name": "custom"}, "limits": UNHURRIED, "protocol": protocol, **more,
    })  # fmt: skip


def custom(preset: str = "decoupled", **sections: Any) -> Config:
    overrides = {
        "learners": 2, "total_steps": 12, "model": {"name": "custom"}, "data": {"batch_size": 4},
        "protocol": ONE_ROUND_A_STEP if preset == "decoupled" else {"local_steps_per_round": 2},
    }  # fmt: skip
    return load(preset_name=preset, overrides=overrides | sections)


class Syncer:
    """One that listens in a thread of this process. `shards` are processes."""

    def __init__(self, directory: Path, config: Config, keys: Path | None = None, shards: int = 1) -> None:
        self.directory = directory
        task = task_for(config) if config.model.name != CUSTOM else None
        self._starter = ShardStarter()
        self.home = SyncerDirectory(directory, config, task, keys=keys, shards=shards, starter=self._starter)
        found = load_server(keys) if keys is not None else None
        credentials = server_credentials(found.certificate, found.key, found.ca) if found is not None else None
        self._process = SyncerProcess(self.home, "127.0.0.1:0", credentials)
        self._listens = threading.Event()
        self._heard = threading.Condition()
        self._goodbyes = 0
        self._process.observers.append(self._observe)
        write = self.home.write_address

        def said(address: str) -> None:
            write(address)
            self._listens.set()

        self.home.write_address = said  # type: ignore[method-assign]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._listens.wait(PATIENCE_SECONDS)

    def _run(self) -> None:
        self._loop.run_until_complete(self._process.run())
        self._loop.close()

    @property
    def address(self) -> str:
        return self._process.address

    def join(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> atoll.Learner:
        return atoll.join(
            options.pop("address", self.address), model, optimizer, token=self.home.token_file,
            out=options.pop("out", None) or self.directory / f"learner-{id(model)}", **options,
        )  # fmt: skip

    def _observe(self, now: Nanos, worker: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        if isinstance(event, Received) and isinstance(event.envelope.body, Goodbye):
            with self._heard:
                self._goodbyes += 1
                self._heard.notify_all()

    def hear_goodbyes(self, count: int = 1) -> None:
        """A learner that left has sent its last word; the syncer reads it when its thread gets a turn."""
        with self._heard:
            assert self._heard.wait_for(lambda: self._goodbyes >= count, PATIENCE_SECONDS), "no learner said goodbye"

    def end(self) -> None:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "its run did not end"

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._process.stop)
            self.end()
            cut(self.home)
        self._starter.close()

    def tape(self) -> list[Any]:
        return list(Tape(self.directory / "run.tape").records())


@contextlib.contextmanager
def syncers(folder: Path, kind: type[Syncer] = Syncer) -> Iterator[Callable[..., Any]]:
    """A function that starts one for a config; all are stopped in the end."""
    made: list[Syncer] = []

    def make(config: Config, **options: Any) -> Syncer:
        made.append(kind(folder / f"syncer{len(made)}", config, **options))
        return made[-1]

    try:
        yield make
    finally:
        for syncer in made:
            syncer.stop()


def cut(home: SyncerDirectory) -> None:
    """Its tape stays without an end, as a killed syncer's does; a process would close the file by ending."""
    home.tape.__exit__(KeyboardInterrupt, None, None)


def model_of(width: int = 4, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))


def train(learner: atoll.Learner, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> bool:
    """One step of anybody's loop."""
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) + seed
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return learner.step(tokens=4, loss=loss)
