"""The two image classifiers of the DiLoCo contract: LeNet-5, which has no buffers, and ResNet-18, which has many.

As in `decoder.py`, weights come from a builder's own seed, never from torch's global generator.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.workload.data.seeds import generator
from atoll.workload.models.mlp import uninitialised_linear


def uninitialised_conv(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0, bias: bool = False
) -> nn.Conv2d:
    """As `uninitialised_linear`: the owning model fills it."""
    conv = nn.utils.skip_init(nn.Conv2d, inputs, outputs, kernel, stride=stride, padding=padding, bias=bias)
    return cast(nn.Conv2d, conv)


class Norm(nn.BatchNorm2d):
    """Batch normalisation that accepts a batch of one image. Lost slices may shrink a batch to that, and a last stage of 1 x 1
    then has one value per channel and no variance, which torch refuses. The running statistics take its place."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] * x.shape[2] * x.shape[3] > 1 or not self.training:
            return super().forward(x)
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class LeNet5(nn.Module):
    """images [batch, channels, size, size] -> [batch, classes], with ReLU and max-pooling unlike the original of 1998.

    28 x 28 is padded to 32 x 32, the original's size. For images too small for the second convolution (scikit-learn's 8 x 8
    digits) that one is padded too.
    """

    def __init__(self, seed: int, *, channels: int = 1, size: int = 28, classes: int = 10) -> None:
        super().__init__()
        if size < 4:
            raise ConfigError(f"images are {size} x {size}: LeNet-5 halves them twice, so they must be at least 4 x 4")
        padding = 0 if size >= 14 else 2
        self.conv1 = uninitialised_conv(channels, 6, 5, padding=2, bias=True)
        self.conv2 = uninitialised_conv(6, 16, 5, padding=padding, bias=True)
        side = (size // 2 + 2 * padding - 4) // 2
        self.fc1 = uninitialised_linear(16 * side * side, 120, bias=True)
        self.fc2 = uninitialised_linear(120, 84, bias=True)
        self.head = uninitialised_linear(84, classes, bias=True)
        _initialise(self, seed)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(images.to(self.conv1.weight.dtype))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))
        return cast(Tensor, self.head(x))


class Residual(nn.Module):
    """Two 3 x 3 convolutions and a shortcut, which is projected where width or resolution changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = uninitialised_conv(inputs, outputs, 3, stride=stride, padding=1)
        self.norm1 = Norm(outputs)
        self.conv2 = uninitialised_conv(outputs, outputs, 3, padding=1)
        self.norm2 = Norm(outputs)
        self.project: nn.Conv2d | None = None
        if stride > 1 or inputs != outputs:
            self.project = uninitialised_conv(inputs, outputs, 1, stride=stride)
            self.project_norm = Norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + (x if self.project is None else self.project_norm(self.project(x))))


class ResNet(nn.Module):
    """ResNet-18 with the stem for small images: one 3 x 3 convolution, no pooling before the stages.

    Four stages of `depth` blocks, each twice as wide and half as large as the previous one: depth 2 and width 64 make ResNet-18.
    The blocks are one list, so that `fragmentation = "layer"` finds them.
    """

    def __init__(self, seed: int, *, channels: int = 3, classes: int = 10, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.stem = uninitialised_conv(channels, width, 3, padding=1)
        self.stem_norm = Norm(width)
        blocks: list[Residual] = []
        inputs = width
        for stage in range(4):
            for place in range(depth):
                outputs = width * 2**stage
                blocks.append(Residual(inputs, outputs, 2 if stage > 0 and place == 0 else 1))
                inputs = outputs
        self.blocks = nn.ModuleList(blocks)
        self.head = uninitialised_linear(inputs, classes, bias=True)
        _initialise(self, seed)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.stem_norm(self.stem(images.to(self.stem.weight.dtype))))
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(x.mean(dim=(2, 3))))


@torch.no_grad()
def _initialise(model: nn.Module, seed: int) -> None:
    """He's initialisation before a ReLU, 1 / sqrt(inputs) for the head."""
    rng = generator("vision", seed)
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            inputs = module.weight[0].numel()
            module.weight.normal_(0.0, ((1.0 if name == "head" else 2.0) / inputs) ** 0.5, generator=rng)
            if module.bias is not None:
                module.bias.zero_()


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images).float(), labels)
