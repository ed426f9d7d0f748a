"""Codecs on a GPU: from the third vector of a length on, one launch of a captured graph."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.codecs import Packet, UncheckedCodec


class Encoder:
    """Runs a codec on one stream, as a CUDA graph from the third vector of a length on. The first call loads kernels, which must
    not happen during a capture; the second captures.

    Results are in memory that the next call overwrites, in the stream's order.
    """

    def __init__(self, device: torch.device, numel_max: int) -> None:
        self._memory = torch.empty(numel_max, device=device)
        self._pool = torch.cuda.graph_pool_handle()  # shared scratch: graphs of one stream never overlap
        self._seen: set[tuple[str, int, bool]] = set()
        self._graphs: dict[tuple[str, int, bool], tuple[torch.cuda.CUDAGraph, Packet, Tensor]] = {}

    def input(self, numel: int) -> Tensor:
        """Where the caller writes the vector to encode; all lengths share this memory."""
        assert numel <= self._memory.numel(), "the stager was made for shorter fragments"
        return self._memory[:numel]

    def encode(self, codec: UncheckedCodec, numel: int, feedback: bool) -> tuple[Packet, Tensor]:
        """The packet of `input(numel)` and whether it was finite. With feedback the input becomes the residual."""
        key = (codec.name, numel, feedback)
        if key not in self._seen:
            self._seen.add(key)
            return encoded_with(codec, self.input(numel), feedback)
        if key not in self._graphs:
            graph, vector = torch.cuda.CUDAGraph(), self.input(numel)
            # Thread-local: calls of other threads to the device must not invalidate the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                packet, finite = encoded_with(codec, vector, feedback)
            finally:
                graph.capture_end()
            self._graphs[key] = (graph, packet, finite)
        graph, packet, finite = self._graphs[key]
        graph.replay()
        return packet, finite


def encoded_with(codec: UncheckedCodec, vector: Tensor, feedback: bool) -> tuple[Packet, Tensor]:
    packet, finite = codec.encode_unchecked(vector)
    if feedback:
        codec.accumulate(packet, vector, -1.0)
    return packet, finite
