"""A plain PyTorch loop as a learner: a small recurrent network learns the Python standard library, byte by byte.

    atoll syncer recipes/custom.toml --dir runs/custom
    python examples/plain_loop.py --syncer 127.0.0.1:7077 --token runs/custom/token      # in two terminals

Gradient clipping, mixed precision and the schedule are the loop's own. The three lines of Atoll are marked.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
from torch import Tensor, nn

import atoll

WINDOW = 64


class Bytes(torch.utils.data.Dataset[Tensor]):
    """The sources of the standard library in windows of 65 bytes: 64 to read, 64 to predict."""

    def __init__(self, bytes_max: int = 1_000_000) -> None:
        text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))[:bytes_max]
        self.windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, WINDOW + 1, WINDOW)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index].long()


class Reader(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, window: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte."""
        state, _ = self.memory(self.embedding(window[:, :-1]))
        return nn.functional.cross_entropy(self.head(state).flatten(0, 1), window[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--syncer", default="127.0.0.1:7077")
    parser.add_argument("--token", type=Path, default=None, help="file with the join token; or set ATOLL_TOKEN")
    parser.add_argument("--out", type=Path, default=None, help="where tape and snapshots go")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)

    model = Reader().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")

    with atoll.join(options.syncer, model, optimizer, token=options.token, out=options.out) as learner:  # Atoll
        # The schedule follows the run, not this learner's own steps, so that fast and late learners have the same rate.
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.55 + 0.45 * math.cos(math.pi * learner.progress))
        for at, batch in enumerate(learner.shard(Bytes())):  # Atoll
            batch = batch.to(device)
            with torch.autocast(device.type, enabled=device.type == "cuda"):
                loss = model(batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if learner.step(tokens=batch[:, 1:].numel(), loss=loss):  # Atoll: weights change here and nowhere else
                schedule.step()
            if at % 20 == 0:
                print(f"learner {learner.id}, outer step {learner.outer_step}: loss {loss.item():.3f}", flush=True)
    print(f"learner {learner.id}: the run is over at outer step {learner.outer_step}")


if __name__ == "__main__":
    main()
