"""A Hugging Face Trainer as a learner: a small GPT-2, from scratch, learns the Python standard library byte by byte.

    pip install "atoll[extras]"
    atoll syncer recipes/custom.toml --dir runs/custom
    python examples/hf_trainer.py --syncer 127.0.0.1:7077 --token runs/custom/token      # in two terminals

The Trainer owns the loop, so the learner is attached to its optimiser, and a callback counts tokens and stops the Trainer at the
end. Gradient accumulation and mixed precision are the Trainer's: an optimiser step that it skips does not count.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from plain_loop import Bytes
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import atoll


class AtollCallback(TrainerCallback):
    def __init__(self, learner: atoll.Learner) -> None:
        self.learner = learner
        self.tokens_counted = 0
        learner.attach()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Runs before the optimiser steps, which reports the step; all its micro-batches have been counted by then."""
        seen = int(state.num_input_tokens_seen)
        self.learner.count(tokens=seen - self.tokens_counted)
        self.tokens_counted = seen

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= self.learner.over


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--syncer", default="127.0.0.1:7077")
    parser.add_argument("--token", type=Path, default=None, help="file with the join token; or set ATOLL_TOKEN")
    parser.add_argument("--out", type=Path, default=None, help="where tape and snapshots go")
    options = parser.parse_args()

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=10**9, per_device_train_batch_size=8, gradient_accumulation_steps=2,
        include_num_input_tokens_seen="all", logging_steps=10, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    # Move the model before it joins: a Trainer that moves it later would leave the learner with the old buffers.
    shape = GPT2Config(vocab_size=256, n_positions=65, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(shape).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with atoll.join(options.syncer, model, optimizer, token=options.token, out=options.out) as learner:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.55 + 0.45 * math.cos(math.pi * learner.progress))
        Trainer(
            model=model, args=arguments, train_dataset=learner.subset(Bytes()), optimizers=(optimizer, schedule),
            data_collator=lambda windows: {"input_ids": torch.stack(windows), "labels": torch.stack(windows)},
            callbacks=[AtollCallback(learner)],
        ).train()  # fmt: skip
    print(f"learner {learner.id}: the run is over at outer step {learner.outer_step}")


if __name__ == "__main__":
    main()
