"""torchtitan's trainer as a learner: its llama model, its FSDP2, its optimiser, in a run of Atoll. A learner is one torchrun:

    atoll syncer recipes/custom.toml --dir runs/titan
    torchrun --nproc-per-node 2 examples/torchtitan/train.py --syncer 127.0.0.1:7077 --token runs/titan/token --out runs/titan-0

Three methods of the trainer are extended: it joins before its first step, tells the learner of every step, and ends when the run
does. Everything else is torchtitan's own configuration (https://github.com/pytorch/torchtitan), of release 0.3.0.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

import atoll


class JoinedTrainer(Trainer):
    """A trainer whose model is a learner's. All ranks of its process group are one learner."""

    def __init__(self, config: Trainer.Config, **join: Any) -> None:
        super().__init__(config)
        (model,), (optimizer,) = self.model_parts, self.optimizers.optimizers  # without pipeline stages there is one of each
        self._joining = atoll.join(join.pop("syncer"), model, optimizer, **join)
        self.learner: atoll.Learner

    def train(self) -> None:
        with self._joining as self.learner:
            super().train()

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        before, self._share = self.ntokens_seen, torch.zeros((), device=self.device)
        super().train_step(data_iterator)
        self.learner.step(tokens=self.ntokens_seen - before, loss=self._share * torch.distributed.get_world_size())

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        """Returns this rank's share of the mean loss: its sum over the tokens of all ranks and micro-batches."""
        share = super().forward_backward_step(**batch)
        self._share += share.detach()
        return share

    def should_continue_training(self) -> bool:
        return super().should_continue_training() and not self.learner.over


class Bytes(BaseTokenizer):
    """Text is its bytes."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


class Sources(BaseDataLoader):
    """Python's own sources as bytes, in windows; every rank of every learner draws its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        seed: int = 0

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:40])
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._shape = (local_batch_size, seq_len)
        self._rng = torch.Generator().manual_seed(1000 * config.seed + dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        samples, length = self._shape
        while True:
            starts = torch.randint(len(self._bytes) - length - 1, (samples,), generator=self._rng)
            windows = torch.stack([self._bytes[start : start + length + 1] for start in starts])
            positions = torch.arange(length).expand(samples, -1).contiguous()
            yield {"input": windows[:, :-1].contiguous(), "positions": positions}, windows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def settings(seed: int, batch_size: int, seq_len: int, steps: int, precision: str) -> Trainer.Config:
    """torchtitan's smallest llama. Its weights are fp32, which is what learners exchange; FSDP2 computes in `precision`."""
    config = llama3_debugmodel()
    config.tokenizer = Bytes.Config()
    config.training.disable_cuda_graphs = True
    config.training.local_batch_size, config.training.seq_len, config.training.steps = batch_size, seq_len, steps
    config.training.mixed_precision_param = precision
    config.dataloader = Sources.Config(seed=seed)
    config.parallelism.spmd_backend = "partial_dtensor"  # the newer ways need a torch that is newer than 2.13
    config.checkpoint.enable = config.validator.enable = False
    return config


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--syncer", required=True, help="host:port")
    words.add_argument("--token", type=Path, help="file with the join token")
    words.add_argument("--out", type=Path, help="folder for the learner's tape and snapshots")
    words.add_argument("--seed", type=int, default=0, help="of this learner's data: another for each learner")
    words.add_argument("--batch-size", type=int, default=4, help="samples of a rank")
    words.add_argument("--seq-len", type=int, default=128)
    words.add_argument("--steps", type=int, default=1000, help="of the learning rate's schedule, and at most so many")
    words.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    given = words.parse_args()
    config = settings(given.seed, given.batch_size, given.seq_len, given.steps, given.precision)
    trainer = JoinedTrainer(config, syncer=given.syncer, token=given.token, out=given.out)
    try:
        trainer.train()
    finally:
        trainer.close()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
