"""A Lightning module on several ranks as one learner: sharded by FSDP2 in Lightning's ModelParallelStrategy.

    pip install "atoll[extras]"
    atoll syncer recipes/custom.toml --dir runs/custom
    torchrun --nproc-per-node 2 examples/lightning_fsdp2.py --syncer 127.0.0.1:7077 --token runs/custom/token --out runs/lightning

Lightning owns the loop and shards the module when it fits, so the learner joins at the start of training, is attached to the
optimiser, and leaves at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from fsdp2_loop import Bytes, Reader
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import atoll


class Joins(lightning.Callback):
    """`join` is what atoll.join is called with, beside the model and the optimiser."""

    def __init__(self, **join: Any) -> None:
        self._join = join
        self._until_the_end = contextlib.ExitStack()
        self.learner: atoll.Learner

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        joining = atoll.join(self._join.pop("syncer"), module, trainer.optimizers[0], **self._join)
        self.learner = self._until_the_end.enter_context(joining)
        self.learner.attach()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Tensor, batch_index: int) -> None:
        self.learner.count(tokens=batch[:, 1:].numel(), samples=len(batch))

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self.learner.count(loss=loss)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_index: int) -> None:
        trainer.should_stop |= self.learner.over

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._until_the_end.close()

    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        self._until_the_end.__exit__(type(error), error, error.__traceback__)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader()

    def configure_model(self) -> None:
        """Called once the ranks know each other."""
        mesh = self.device_mesh["data_parallel"]
        for block in self.reader.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.reader, mesh=mesh)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss: Tensor = self.reader(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Drawn(torch.utils.data.IterableDataset[Tensor]):
    """Windows at random, by a seed for every rank of every learner: nobody deals out batches before the learner has joined."""

    def __init__(self, seed: int) -> None:
        self._bytes = Bytes()
        self._rng = torch.Generator().manual_seed(1000 * seed + int(os.environ.get("RANK", "0")))

    def __iter__(self) -> Any:
        while True:
            yield self._bytes[int(torch.randint(len(self._bytes), (1,), generator=self._rng))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--syncer", default="127.0.0.1:7077")
    parser.add_argument("--token", type=Path, default=None, help="file with the join token; or set ATOLL_TOKEN")
    parser.add_argument("--out", type=Path, default=None, help="where tape and snapshots go")
    parser.add_argument("--seed", type=int, default=0, help="of this learner's data: another for each learner")
    options = parser.parse_args()

    joins = Joins(syncer=options.syncer, token=options.token, out=options.out)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        max_epochs=-1, max_steps=-1, accelerator="gpu" if torch.cuda.is_available() else "cpu", devices=ranks, strategy=strategy,
        callbacks=[joins], logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(Drawn(options.seed), batch_size=4))
    print(f"learner {joins.learner.id}: the run is over at outer step {joins.learner.outer_step}")


if __name__ == "__main__":
    main()
