"""A loop with Hugging Face Accelerate on several ranks as one learner: FSDP2 is Accelerate's.

    pip install "atoll[extras]"
    atoll syncer recipes/custom.toml --dir runs/custom
    torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py --syncer 127.0.0.1:7077 --token runs/custom/token --out runs/acc

`accelerate launch` starts it as well. The model joins after `prepare`, which shards it and replaces the optimiser's parameters.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from fsdp2_loop import Bytes, Reader

import atoll


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--syncer", default="127.0.0.1:7077")
    parser.add_argument("--token", type=Path, default=None, help="file with the join token; or set ATOLL_TOKEN")
    parser.add_argument("--out", type=Path, default=None, help="where tape and snapshots go")
    options = parser.parse_args()

    sharded = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )  # fmt: skip
    accelerator = Accelerator(fsdp_plugin=sharded, cpu=not torch.cuda.is_available())
    model = Reader()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))

    with atoll.join(options.syncer, model, optimizer, token=options.token, out=options.out) as learner:
        for batch in learner.shard(Bytes(), batch_size=4):  # each rank gets its own samples, so Accelerate deals out none
            loss = model(batch.to(accelerator.device))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=batch[:, 1:].numel(), loss=loss)
    accelerator.print(f"learner {learner.id}: the run is over at outer step {learner.outer_step}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
