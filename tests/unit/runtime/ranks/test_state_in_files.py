"""A learner's state passes through its rank 0, which holds no more of it in memory than a rank's part and one tensor."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import torch
from rank_loops import PeakMemory
from torch import nn

from atoll.config import Config, load
from atoll.executor.ranks.executor import RankExecutor
from atoll.executor.ranks.state import part_of
from atoll.protocol.interface import Payload
from atoll.protocol.vocabulary import StateTransfer
from atoll.runtime.join.executor import task_of
from atoll.runtime.ranks.channel import ChannelClosed, RankChannel, tensors_of
from atoll.runtime.ranks.executor import LeadExecutor
from atoll.runtime.ranks.gathered import GatheredState, empty_in_file
from atoll.runtime.ranks.lead import RankLead
from atoll.runtime.ranks.messages import ArrivalTaken, PartOfState, ReadState, StateArrival, ToLead, ToRank
from atoll.runtime.ranks.rendezvous import RankLink
from atoll.store.tensor_files import pack_state, unpack_state
from atoll.tasks.task import layout_for
from atoll.tensors.pieces import Box
from atoll.transport import spooled

RANKS, LAYERS, ROWS, COLUMNS = 4, 12, 1024, 512
BOXES = [
    {f"{layer}.weight": Box((rank * ROWS // RANKS, 0), (ROWS // RANKS, COLUMNS)) for layer in range(LAYERS)}
    for rank in range(RANKS)
]


def executor() -> tuple[Config, RankExecutor]:
    """Rank 0's. Its model is whole, as only what comes on top is measured."""
    config = load(preset_name="streaming", overrides={
        "learners": 2, "total_steps": 8, "model": {"name": "custom"},
        "protocol": {"local_steps_per_round": LAYERS, "fragmentation": "tensor", "fragments": LAYERS, "overlap": 1},
    })  # fmt: skip
    model = nn.Sequential(*(nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    task = task_of(config, layout_for(config, model))
    inner = RankExecutor(task, 0, 0, dict(enumerate(BOXES)), model=model, optimizer=optimizer, device=torch.device("cpu"))
    return config, inner


def part(rank: int) -> dict[str, Any]:
    """The state of a rank: weights, anchors and two moments."""
    rows = ROWS // RANKS
    keys = ("exp_avg", "exp_avg_sq")
    moments = {layer: {key: torch.full((rows, COLUMNS), float(rank)) for key in keys} for layer in range(LAYERS)}
    state = {
        "tensors": {name: torch.full((rows, COLUMNS), float(rank)) for name in BOXES[rank]},
        "optimizer": {"state": moments, "param_groups": []},
        "anchors": [torch.full((rows * COLUMNS,), float(rank)) for _ in range(LAYERS)],
        "round_start": [None] * LAYERS, "kept": {},
    }  # fmt: skip
    boxes = {layer: dict.fromkeys(keys, BOXES[rank][f"{layer}.weight"]) for layer in range(LAYERS)}
    return part_of(state, BOXES[rank], boxes)


class Others:
    """Ranks 1 to 3, as threads: they answer with parts that are in files, and drop what they receive."""

    def __init__(self, folder: Path) -> None:
        self.received: list[Any] = []
        self._threads: list[threading.Thread] = []
        links, self._ends = {}, []
        for rank in range(1, RANKS):
            (here, there), (here_bulk, there_bulk) = _connected(), _connected()
            links[rank] = RankLink(RankChannel(here, ToLead), RankChannel(here_bulk, ToLead))
            control, bulk = RankChannel(there, ToRank), RankChannel(there_bulk, ToRank)
            bulk.spool = folder  # what they hold is not rank 0's
            self._ends += [control, bulk]
            packed = [
                empty_in_file(folder, (chunk.numel(),), torch.uint8).copy_(chunk) for chunk in tensors_of(pack_state(part(rank)))
            ]
            self._threads.append(threading.Thread(target=self._answer, args=(control, bulk, packed), daemon=True))
            self._threads.append(threading.Thread(target=self._take, args=(bulk, rank), daemon=True))
        self.lead = RankLead(links, 60.0)
        self.lead.spool_into(folder)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self.lead.close("over", failed=False)
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()

    def _answer(self, control: RankChannel, bulk: RankChannel, packed: list[torch.Tensor]) -> None:
        while True:
            note, _ = control.receive()
            if not isinstance(note, ReadState):
                return
            bulk.send(PartOfState(note.request), packed)

    def _take(self, bulk: RankChannel, rank: int) -> None:
        while True:
            try:
                note, data = bulk.receive()
            except ChannelClosed:
                return
            assert isinstance(note, StateArrival)
            found = unpack_state(data.numpy().data, shared=True)
            self.received.append((rank, {float(t[0, 0]) for t in found["tensors"].values()}, found["anchors"][0].numel()))
            del found, data
            bulk.send(ArrivalTaken(note.arrival))


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
    return here, there


def test_rank_0_gathers_and_deals_out_a_state_without_holding_it(tmp_path: Path) -> None:
    """Weights, anchors and moments are 100 MB. A learner of four ranks serves, then one of four ranks recovers; each rank's part
    is a quarter. Rank 0 once held the state up to three times."""
    config, inner = executor()
    others, own = Others(tmp_path), part(0)
    size = 4 * 4 * LAYERS * ROWS * COLUMNS
    request = others.lead.number()
    memory = PeakMemory()
    others.lead.tell(ReadState(request))
    whole = GatheredState(others.lead, inner, request, own, tmp_path).resolve()
    assert whole is not None
    served = memory.grown()
    weight = whole["tensors"]["3.weight"]
    assert weight.shape == (ROWS, COLUMNS) and weight[:: ROWS // RANKS, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    chunks = pack_state(whole)
    received = memoryview(spooled(sum(map(len, chunks)), tmp_path))
    at = 0
    for chunk in chunks:
        received[at : at + len(chunk)] = chunk
        at += len(chunk)
    del whole, weight, chunks
    leading = LeadExecutor(config, inner, others.lead, 1)
    leading.spool = tmp_path
    memory = PeakMemory()
    state = unpack_state(received, shared=True)
    share = leading.arriving(StateTransfer(1, 0, (0,) * LAYERS, ()), Payload("state", len(received), state)).content
    dealt = memory.grown()
    assert sorted(others.received) == [(rank, {float(rank)}, ROWS * COLUMNS // RANKS) for rank in range(1, RANKS)]
    assert share.own["optimizer"]["state"][5]["exp_avg"].shape == (ROWS // RANKS, COLUMNS)
    assert not list(tmp_path.iterdir()), "the files have no names"
    assert served < 0.3 * size, f"{served / size:.2f} of a whole state while it serves"
    assert dealt < 0.4 * size, f"{dealt / size:.2f} of a whole state while it recovers, its own quarter among it"
    others.close()
