"""A plain PyTorch loop on several ranks as one learner: a small recurrent network learns the Python standard library.

    atoll syncer recipes/custom.toml --dir runs/custom
    torchrun --nproc-per-node 2 examples/fsdp2_loop.py --syncer 127.0.0.1:7077 --token runs/custom/token --out runs/fsdp2

The model is sharded with `fully_shard` (FSDP2), or is in DistributedDataParallel with `--parallel ddp`. The three lines of Atoll
are marked; every rank has them.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

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


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device).view(1, -1, 1)  # of all bytes so far
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x + mean))))


class Reader(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 256)

    def forward(self, window: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte."""
        x = self.embedding(window[:, :-1])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), window[:, 1:].flatten())


def parallel(model: Reader, kind: str, device: torch.device) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--syncer", default="127.0.0.1:7077")
    parser.add_argument("--token", type=Path, default=None, help="file with the join token; or set ATOLL_TOKEN")
    parser.add_argument("--out", type=Path, default=None, help="where tape and snapshots go")
    parser.add_argument("--parallel", choices=("fsdp2", "ddp"), default="fsdp2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    device = torch.device(options.device)
    torch.distributed.init_process_group("gloo" if device.type == "cpu" else "nccl")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # DistributedDataParallel and fully_shard both begin with what each rank built
    model = parallel(Reader().to(device), options.parallel, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after sharding: it holds the sharded parameters

    with atoll.join(options.syncer, model, optimizer, token=options.token, out=options.out) as learner:  # Atoll, on every rank
        for at, batch in enumerate(learner.shard(Bytes())):  # Atoll: a rank's own samples
            batch = batch.to(device)
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=batch[:, 1:].numel(), loss=loss)  # Atoll: a rank's own tokens and loss
            if at % 20 == 0 and learner.rank == 0:
                print(f"learner {learner.id}, outer step {learner.outer_step}: loss {loss.item():.3f}", flush=True)
    if learner.rank == 0:
        print(f"learner {learner.id}: the run is over at outer step {learner.outer_step}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
