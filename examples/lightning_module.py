"""A Lightning module as a learner: a small recurrent network learns the Python standard library byte by byte.

    pip install "atoll[extras]"
    atoll syncer recipes/custom.toml --dir runs/custom
    python examples/lightning_module.py --syncer 127.0.0.1:7077 --token runs/custom/token      # in two terminals

Lightning owns the loop, so the learner is attached to its optimiser, and a callback counts tokens and stops the trainer at the
end. Gradient accumulation and mixed precision are Lightning's: an optimiser step that it skips does not count.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from plain_loop import Bytes, Reader
from torch import Tensor

import atoll


class AtollCallback(lightning.Callback):
    def __init__(self, learner: atoll.Learner) -> None:
        self.learner = learner
        learner.attach()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Tensor, batch_index: int) -> None:
        self.learner.count(tokens=batch[:, 1:].numel(), samples=len(batch))

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self.learner.count(loss=loss * trainer.accumulate_grad_batches)  # Lightning has divided it by then

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_index: int) -> None:
        trainer.should_stop |= self.learner.over


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader()
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss: Tensor = self.reader(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--syncer", default="127.0.0.1:7077")
    parser.add_argument("--token", type=Path, default=None, help="file with the join token; or set ATOLL_TOKEN")
    parser.add_argument("--out", type=Path, default=None, help="where tape and snapshots go")
    options = parser.parse_args()

    # Move the model before it joins: a trainer that moves it later would leave the learner with the old buffers.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = Module().to(device)
    with atoll.join(options.syncer, module, module.optimizer, token=options.token, out=options.out) as learner:
        trainer = lightning.Trainer(
            max_epochs=-1, accelerator=device.type, devices=1, accumulate_grad_batches=2, callbacks=[AtollCallback(learner)],
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(learner.subset(Bytes()), batch_size=8, shuffle=True))
    print(f"learner {learner.id}: the run is over at outer step {learner.outer_step}")


if __name__ == "__main__":
    main()
