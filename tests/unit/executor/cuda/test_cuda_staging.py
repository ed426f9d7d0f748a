"""Staging on a GPU. What needs no device is tested everywhere; the rest exists only where there is one (an H200, by hand)."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from atoll.codecs import BLOCK, Packet, UncheckedCodec, codec, encode_with_feedback
from atoll.config.codecs import CODECS
from atoll.errors import NotFinite
from atoll.executor.cuda.staging import (
    FREE_MAX,
    CudaStager,
    PinnedPool,
    StagedPacket,
    adopt_into,
    master_weights,
    refuse_not_finite,
    why_on_host,
)
from atoll.tensors.access import cast_like, named_tensors, read_buffers, read_params
from atoll.tensors.layout import Fragment, build_layout
from atoll.tensors.outer import mix
from atoll.workload.models.mlp import BatchNormMlp, Mlp

DEVICE_NAMES = sorted(spec.name for spec in CODECS.values() if spec.on_device)


class Event:
    """A CUDA event, as far as pools and packets see one."""

    def __init__(self, done: bool = True) -> None:
        self.done = done
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1

    def query(self) -> bool:
        return self.done


def ordinary(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def awkward(numel: int, seed: int = 0) -> Tensor:
    """Blocks of every magnitude a float has, zeros, ties and a short block."""
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=chance)
    exponents = torch.randint(-140, 120, (numel // BLOCK + 1,), generator=chance).float()
    x *= torch.exp2(exponents).repeat_interleave(BLOCK)[:numel]
    if numel > 2 * BLOCK:
        x[:BLOCK] = 0.0
        x[BLOCK : 2 * BLOCK] = torch.arange(BLOCK) / 2.0 - 64.0
        x[2 * BLOCK] = torch.finfo(torch.float32).max
    return x


def whole(model: nn.Module) -> tuple[dict[str, Tensor], Fragment]:
    return named_tensors(model), build_layout(model, "whole").fragments[0]


# ---------------------------------------------------------------- the pool


def test_pool_with_a_returned_buffer_hands_it_out_again_and_allocates_nothing() -> None:
    pool = PinnedPool(ordinary)
    first = pool.take(100_000)
    pool.give(first, Event())
    assert pool.take(100_001).data_ptr() == first.data_ptr()  # nearly one size shares buffers
    assert pool.allocations == 1


def test_pool_with_a_buffer_the_device_still_writes_does_not_hand_it_out() -> None:
    pool = PinnedPool(ordinary)
    first, copying = pool.take(5000), Event(done=False)
    pool.give(first, copying)
    second = pool.take(5000)
    assert second.data_ptr() != first.data_ptr()
    copying.done = True
    assert pool.take(5000).data_ptr() == first.data_ptr()


def test_pool_keeps_a_limited_number_of_idle_buffers() -> None:
    pool = PinnedPool(ordinary)
    for buffer in [pool.take(4096) for _ in range(FREE_MAX + 3)]:
        pool.give(buffer, Event())
    again = [pool.take(4096) for _ in range(FREE_MAX + 3)]
    assert len({b.data_ptr() for b in again}) == len(again)
    assert pool.allocations == FREE_MAX + 3 + 3


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 1_000_000, 11_534_336, 2**33 + 1])
def test_pool_sizes_waste_at_most_an_eighth_or_a_page(size: int) -> None:
    asked: list[int] = []

    def allocate(nbytes: int) -> Tensor:
        asked.append(nbytes)
        return torch.empty(0, dtype=torch.uint8)

    PinnedPool(allocate).take(size)
    assert size <= asked[0] <= max(size + 4096, size * 9 // 8)


# ---------------------------------------------------------------- a staged packet


def staged_with(finish: Callable[[], tuple[Packet, Tensor, Tensor | None]], given: list[str]) -> StagedPacket:
    return StagedPacket(1, Event(), finish, lambda: given.append("back"))


def packet_of(x: Tensor) -> tuple[Packet, Tensor, Tensor | None]:
    return codec("fp32").encode(x), torch.empty(0), None


def test_staged_packet_held_by_a_send_gives_its_memory_back_after_the_last_release() -> None:
    given: list[str] = []
    staged = staged_with(lambda: packet_of(torch.ones(3)), given)
    send = staged.hold()
    staged.release()
    assert given == []
    assert send.wait()[0].codes.tolist() == [1.0, 1.0, 1.0]
    send.release()
    assert given == ["back"]
    for late in (staged.release, staged.hold, staged.wait):
        with pytest.raises(AssertionError):
            late()
    assert given == ["back"]


def test_staged_packet_waited_for_by_many_threads_finishes_once() -> None:
    calls: list[int] = []

    def finish() -> tuple[Packet, Tensor, Tensor | None]:
        calls.append(1)
        return packet_of(torch.ones(3))

    staged = staged_with(finish, [])
    threads = [threading.Thread(target=staged.wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_poisoned_staged_packet_fails_everybody_who_waits_and_leaves_no_residual() -> None:
    def finish() -> tuple[Packet, Tensor, Tensor | None]:
        raise NotFinite("tensor w")

    staged = staged_with(finish, [])
    for _ in range(2):
        with pytest.raises(NotFinite, match="tensor w"):
            staged.wait()
    with pytest.raises(AssertionError):
        _ = staged.residual


# ---------------------------------------------------------------- finite or not


@pytest.mark.parametrize("name", DEVICE_NAMES)
@pytest.mark.parametrize("numel", [3 * BLOCK + 1, 3 * BLOCK + 77, 130 * BLOCK])
def test_unchecked_encoding_gives_the_bytes_of_the_checked_one(name: str, numel: int) -> None:
    c, x = codec(name), awkward(numel)
    assert isinstance(c, UncheckedCodec)
    packet, finite = c.encode_unchecked(x)
    assert bool(finite)
    assert packet.to_bytes() == c.encode(x).to_bytes()


@pytest.mark.parametrize("name", DEVICE_NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, BLOCK + 5, 3 * BLOCK + 6])
def test_unchecked_encoding_of_nan_or_inf_raises_nothing_and_says_false(name: str, bad: float, at: int) -> None:
    c, x = codec(name), torch.randn(3 * BLOCK + 7, generator=torch.Generator().manual_seed(0))
    x[at] = bad
    assert isinstance(c, UncheckedCodec)
    assert not bool(c.encode_unchecked(x)[1])


@pytest.mark.parametrize(("name", "expected"), [("int4", "tensor layers.0.weight"), ("fp32", "tensor layers.0.weight")])
def test_refusal_names_the_tensor_that_is_not_finite(name: str, expected: str) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(BLOCK, 2, bias=False), nn.Linear(2, 2, bias=False)])})
    tensors, fragment = whole(model)
    with torch.no_grad():
        tensors["layers.0.weight"][1, 3] = float("nan")
    c = codec(name)
    assert isinstance(c, UncheckedCodec)
    packet, finite = c.encode_unchecked(read_params(tensors, fragment))
    with pytest.raises(NotFinite) as caught:
        refuse_not_finite(fragment, packet, torch.empty(0), finite)
    assert caught.value.where == expected


def test_refusal_of_a_block_across_two_tensors_names_both() -> None:
    tensors, fragment = whole(nn.Linear(4, 4))
    with torch.no_grad():
        tensors["bias"][0] = float("inf")
    c = codec("int8")
    assert isinstance(c, UncheckedCodec)
    packet, finite = c.encode_unchecked(read_params(tensors, fragment))
    with pytest.raises(NotFinite, match="tensor weight or bias"):
        refuse_not_finite(fragment, packet, torch.empty(0), finite)


def test_refusal_of_a_buffer_names_it_and_finite_ones_pass() -> None:
    model = BatchNormMlp(0, inputs=4, hidden=6, outputs=2)
    tensors, fragment = whole(model)
    packet = codec("int4").encode(read_params(tensors, fragment))
    refuse_not_finite(fragment, packet, read_buffers(tensors, fragment), torch.tensor(True))
    name = next(s.name for s in fragment.buffers if s.name.endswith("running_var"))
    tensors[name][1] = float("inf")
    with pytest.raises(NotFinite, match=name):
        refuse_not_finite(fragment, packet, read_buffers(tensors, fragment), torch.tensor(True))


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4", "int2", "e3m0"])
def test_codec_without_a_generator_is_for_the_device_and_with_one_for_the_host(name: str) -> None:
    assert why_on_host(codec(name), None) is None
    assert "random" in str(why_on_host(codec(name), torch.Generator()))


@pytest.mark.parametrize("name", ["int1", "top_k:0.1", "random_drop:0.5"])
def test_codec_whose_bytes_depend_on_the_device_is_for_the_host(name: str) -> None:
    assert why_on_host(codec(name), None) is not None


# ---------------------------------------------------------------- master weights


class MasterSgd(torch.optim.SGD):
    """SGD on fp32 copies of 16-bit parameters."""

    def __init__(self, params: list[nn.Parameter], lr: float, key: str = "master") -> None:
        super().__init__(params, lr=lr)
        for p in params:
            self.state[p][key] = p.detach().float().clone()


@pytest.mark.parametrize("key", ["master", "master_param", "master_weights", "fp32_param"])
def test_master_weights_are_found_under_the_names_optimisers_use(key: str) -> None:
    p = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    optimizer = MasterSgd([p], 0.1, key)
    assert master_weights(optimizer, p) is optimizer.state[p][key]


def test_master_weights_of_another_shape_or_dtype_or_of_plain_adam_are_none() -> None:
    p = nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.Adam([p])
    p.sum().backward()
    optimizer.step()
    assert master_weights(optimizer, p) is None
    optimizer.state[p]["master"] = torch.ones(6)
    optimizer.state[p]["fp32_param"] = torch.ones(3, 2, dtype=torch.float64)
    assert master_weights(optimizer, p) is None


@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_adopting_with_master_weights_writes_them_and_the_weights_are_their_cast(alpha: float) -> None:
    model = Mlp(0, inputs=5, hidden=7, outputs=3).to(torch.bfloat16)
    tensors, fragment = whole(model)
    optimizer = MasterSgd(list(model.parameters()), 0.1)
    for p in model.parameters():
        optimizer.state[p]["master"].add_(1e-4)  # finer than bf16
    masters = {name: optimizer.state[t]["master"] for name, t in tensors.items()}
    announced = torch.randn(fragment.numel, generator=torch.Generator().manual_seed(1))
    expected = mix(read_params(masters, fragment), announced, alpha)
    adopt_into(fragment, tensors, announced, torch.empty(0), alpha, optimizer)
    assert torch.equal(read_params(masters, fragment), expected)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, masters[name].to(torch.bfloat16))


def test_adopting_a_part_of_a_parameter_leaves_the_rest_of_its_master_alone() -> None:
    model = nn.Linear(4, 8, bias=False).to(torch.bfloat16)
    tensors = named_tensors(model)
    fragments = build_layout(model, "sub_tensor", 2).fragments
    optimizer = MasterSgd(list(model.parameters()), 0.1)
    master = optimizer.state[model.weight]["master"]
    before = master.clone()
    adopt_into(fragments[1], tensors, torch.full((fragments[1].numel,), 7.0), torch.empty(0), 0.0, optimizer)
    slot = fragments[1].params[0]
    assert bool((master[slot.row_start : slot.row_stop] == 7.0).all())
    assert int((master == before).sum()) == fragments[0].numel


def test_adopting_without_master_weights_mixes_as_the_cpu_learner_and_takes_buffers() -> None:
    model = BatchNormMlp(0, inputs=4, hidden=6, outputs=2)
    tensors, fragment = whole(model)
    announced = torch.randn(fragment.numel, generator=torch.Generator().manual_seed(1))
    buffers = torch.arange(fragment.buffer_numel, dtype=torch.float32)
    expected = mix(read_params(tensors, fragment), announced, 0.5)
    adopt_into(fragment, tensors, announced, buffers, 0.5, None)
    assert torch.equal(read_params(tensors, fragment), expected)
    assert torch.equal(read_buffers(tensors, fragment), buffers)


# ---------------------------------------------------------------- on a device

if torch.cuda.is_available():
    CUDA = torch.device("cuda", 0)

    def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
        """A short last block, and weights of many magnitudes."""
        model = Mlp(0, inputs=301, hidden=517, outputs=33)
        with torch.no_grad():
            for at, p in enumerate(model.parameters()):
                p.copy_(awkward(p.numel(), at).clamp_(-5e37, 5e37).view_as(p))  # no difference, nor its bf16, overflows
        return model.to(dtype).to(CUDA)

    class Refused:
        """No step inside may make the host wait for the device."""

        def __enter__(self) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it warns once that it is a prototype
                torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *_: object) -> None:
            torch.cuda.set_sync_debug_mode("default")

    def anchor_of(fragment: Fragment, seed: int = 9) -> Tensor:
        return awkward(fragment.numel, seed).clamp_(-5e37, 5e37).pin_memory()

    def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: t.detach().cpu() for name, t in tensors.items()}

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", [*DEVICE_NAMES, "int1", "top_k:0.1", "random_drop:0.5"])
    def test_staged_bytes_are_those_of_the_cpu(name: str, dtype: torch.dtype) -> None:
        tensors, fragment = whole(model_of(dtype))
        anchor = anchor_of(fragment)
        difference = cast_like(fragment, anchor) - read_params(on_cpu(tensors), fragment)
        stager, c = CudaStager(CUDA, fragment.numel), codec(name)
        for other in (2.0, 3.0):  # pins memory, loads kernels, captures: these may stop the device, what follows must not
            warm = stager.stage(fragment, tensors, (anchor * other).pin_memory(), c)
            assert warm.wait()[0].to_bytes() != c.encode(difference).to_bytes()
            warm.release()
        for _ in range(2):
            with Refused():
                staged = stager.stage(fragment, tensors, anchor, c)
            packet, buffers = staged.wait()
            assert packet.to_bytes() == c.encode(difference).to_bytes()
            assert staged.nbytes == packet.nbytes and buffers.numel() == 0
            staged.release()
        assert stager.pool.allocations == 1

    def test_fragments_of_many_lengths_staged_in_turn_do_not_mix() -> None:
        model = model_of()
        tensors = named_tensors(model)
        fragments = build_layout(model, "sub_tensor", 7).fragments
        anchors = [anchor_of(f, f.id) for f in fragments]
        stager = CudaStager(CUDA, max(f.numel for f in fragments))
        for _ in range(4):
            with torch.no_grad():
                for t in tensors.values():
                    t.mul_(0.75)
            pairs = [(f, codec(name)) for f in fragments for name in ("int4", "e3m0", "fp32")]
            staged = [stager.stage(f, tensors, anchors[f.id], c) for f, c in pairs]
            stager.before_optimizer_step()
            here = on_cpu(tensors)
            for (f, c), s in zip(pairs, staged, strict=True):
                assert s.wait()[0].to_bytes() == c.encode(anchors[f.id] - read_params(here, f)).to_bytes()
                s.release()

    @pytest.mark.parametrize("name", DEVICE_NAMES)
    def test_codec_on_the_device_of_a_large_vector_gives_the_bytes_of_the_cpu(name: str) -> None:
        c = codec(name)
        assert isinstance(c, UncheckedCodec)
        for x in (awkward(40_000_013), torch.randn(17_000_000, generator=torch.Generator().manual_seed(3)) * 1e-3):
            there, finite = c.encode_unchecked(x.to(CUDA))
            assert bool(finite)
            here = c.encode(x)
            assert torch.equal(there.codes.cpu().view(torch.uint8), here.codes.view(torch.uint8))
            if here.scales is not None and there.scales is not None:
                assert torch.equal(there.scales.cpu().view(torch.int32), here.scales.view(torch.int32))

    @pytest.mark.parametrize("name", ["int4", "e3m0", "int8"])
    def test_staging_with_stochastic_rounding_draws_on_the_host_and_gives_its_bytes(name: str) -> None:
        tensors, fragment = whole(model_of())
        anchor = anchor_of(fragment)
        staged = CudaStager(CUDA, fragment.numel).stage(
            fragment, tensors, anchor, codec(name), rng=torch.Generator().manual_seed(5)
        )
        difference = anchor - read_params(on_cpu(tensors), fragment)
        expected = codec(name).encode(difference, rng=torch.Generator().manual_seed(5))
        assert staged.wait()[0].to_bytes() == expected.to_bytes()

    @pytest.mark.parametrize("name", [*DEVICE_NAMES, "top_k:0.1"])
    def test_error_feedback_over_four_rounds_is_that_of_the_cpu(name: str) -> None:
        tensors, fragment = whole(model_of())
        anchor = torch.randn(fragment.numel, generator=torch.Generator().manual_seed(4)).pin_memory()
        with torch.no_grad():
            for t in tensors.values():
                t.normal_()
        stager, c = CudaStager(CUDA, fragment.numel), codec(name)
        difference = anchor - read_params(on_cpu(tensors), fragment)
        left: Tensor | None = None
        residual: Tensor | None = None
        for _ in range(4):
            staged = stager.stage(fragment, tensors, anchor, c, feedback=True, residual=residual)
            packet, left = encode_with_feedback(c, difference, left)
            assert staged.wait()[0].to_bytes() == packet.to_bytes()
            residual = staged.residual
            assert residual is not None
            assert torch.equal(residual.cpu(), left)

    @pytest.mark.parametrize("name", [*DEVICE_NAMES, "int1"])
    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_staging_nan_or_inf_is_refused_when_it_is_waited_for(name: str, bad: float) -> None:
        model = model_of()
        tensors, fragment = whole(model)
        anchor = anchor_of(fragment)
        with torch.no_grad():
            next(model.parameters()).view(-1)[777] = bad
        staged = CudaStager(CUDA, fragment.numel).stage(fragment, tensors, anchor, codec(name))
        with pytest.raises(NotFinite):
            staged.wait()

    def test_weights_changed_after_the_compute_streams_wait_do_not_reach_the_staged_copy() -> None:
        tensors, fragment = whole(model_of())
        anchor, stager, c = anchor_of(fragment), CudaStager(CUDA, fragment.numel), codec("fp32")
        expected = c.encode(anchor - read_params(on_cpu(tensors), fragment)).to_bytes()
        with torch.cuda.stream(stager._reads):
            torch.cuda._sleep(200_000_000)  # a tenth of a second: the read is late
        staged = stager.stage(fragment, tensors, anchor, c)
        with Refused(), torch.no_grad():
            stager.before_optimizer_step()
            for t in tensors.values():
                t.zero_()
        assert staged.wait()[0].to_bytes() == expected

    def test_compute_stream_does_not_wait_for_encoding() -> None:
        tensors, fragment = whole(model_of())
        anchor, stager = anchor_of(fragment), CudaStager(CUDA, fragment.numel)
        with torch.cuda.stream(stager._encodes):
            torch.cuda._sleep(2_000_000_000)  # about a second
        staged = stager.stage(fragment, tensors, anchor, codec("int4"))
        stager.before_optimizer_step()
        torch.cuda.current_stream(CUDA).synchronize()
        assert not staged.is_ready()
        staged.wait()
        assert staged.is_ready()

    def test_buffers_are_those_of_the_step_boundary_though_a_forward_pass_follows() -> None:
        model = BatchNormMlp(0, inputs=12, hidden=20, outputs=5).to(CUDA)
        tensors, fragment = whole(model)
        anchor, stager = anchor_of(fragment), CudaStager(CUDA, fragment.numel)
        expected = read_buffers(on_cpu(tensors), fragment)
        with torch.cuda.stream(stager._encodes):
            torch.cuda._sleep(200_000_000)
        staged = stager.stage(fragment, tensors, anchor, codec("int4"))
        model.train()
        model(torch.randn(8, 12, device=CUDA))
        assert torch.equal(staged.wait()[1], expected)
        assert not torch.equal(read_buffers(on_cpu(tensors), fragment), expected)

    def test_not_finite_buffer_is_refused_when_it_is_waited_for() -> None:
        tensors, fragment = whole(BatchNormMlp(0, inputs=12, hidden=20, outputs=5).to(CUDA))
        name = next(s.name for s in fragment.buffers if s.name.endswith("running_mean"))
        tensors[name][0] = float("nan")
        staged = CudaStager(CUDA, fragment.numel).stage(fragment, tensors, anchor_of(fragment), codec("e3m0"))
        with pytest.raises(NotFinite, match=name):
            staged.wait()

    def test_gradients_dropped_right_after_staging_are_still_the_ones_sent() -> None:
        tensors, fragment = whole(model_of())
        grads = {name: torch.randn_like(t) for name, t in tensors.items()}
        expected = codec("fp32").encode(read_params(on_cpu(grads), fragment)).to_bytes()
        stager = CudaStager(CUDA, fragment.numel)
        with torch.cuda.stream(stager._reads):
            torch.cuda._sleep(200_000_000)
        staged = stager.stage(fragment, grads, None, codec("fp32"))
        shapes = [t.shape for t in grads.values()]
        grads.clear()
        trash = [torch.full(shape, 3.0, device=CUDA) for shape in shapes]  # would be given the same memory
        assert staged.wait()[0].to_bytes() == expected
        del trash

    def test_weights_kept_by_one_staging_are_the_anchor_of_the_next() -> None:
        tensors, fragment = whole(model_of())
        stager, c = CudaStager(CUDA, fragment.numel), codec("fp32")
        first = stager.stage(fragment, tensors, anchor_of(fragment), c, keep_weights=True)
        start = read_params(on_cpu(tensors), fragment)
        stager.before_optimizer_step()
        with torch.no_grad():
            for t in tensors.values():
                t.mul_(1.5)
        with Refused():
            second = stager.stage(fragment, tensors, first.weights, c)
        expected = c.encode(start - read_params(on_cpu(tensors), fragment))
        assert second.wait()[0].to_bytes() == expected.to_bytes()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("alpha", [0.0, 0.3])
    def test_adopted_weights_are_those_of_the_cpu_master_weights_included(alpha: float, dtype: torch.dtype) -> None:
        model = model_of(dtype)
        tensors, fragment = whole(model)
        here = {name: nn.Parameter(t) for name, t in on_cpu(tensors).items()}
        there = MasterSgd(list(model.parameters()), 0.1)
        mine = MasterSgd(list(here.values()), 0.1)
        announced = torch.randn(fragment.numel, generator=torch.Generator().manual_seed(2))
        stager = CudaStager(CUDA, fragment.numel)
        announced = stager.pin(announced)
        with Refused():
            incoming = stager.prefetch(announced, torch.empty(0))
            stager.adopt(fragment, tensors, incoming, alpha, there)
        adopt_into(fragment, here, announced, torch.empty(0), alpha, mine)
        assert incoming.announced is announced
        for name, t in tensors.items():
            assert torch.equal(t.detach().cpu(), here[name].detach())
            assert torch.equal(there.state[t]["master"].cpu(), mine.state[here[name]]["master"])

    @pytest.mark.parametrize("name", ["int8", "int4", "e3m0", "bf16", "int1"])
    def test_differences_are_decoded_on_the_device_to_the_bits_of_the_cpu(name: str) -> None:
        tensors, fragment = whole(model_of())
        base, stager, c = anchor_of(fragment), CudaStager(CUDA, fragment.numel), codec(name)
        packet = c.encode(torch.randn(fragment.numel, generator=torch.Generator().manual_seed(3)))
        expected = base + c.decode(packet)
        incoming = stager.prefetch(packet, torch.empty(0), base)
        stager.adopt(fragment, tensors, incoming, 0.0, None)
        stager.settle()
        assert incoming.announced.is_pinned() and torch.equal(incoming.announced, expected)
        assert torch.equal(read_params(on_cpu(tensors), fragment), expected)

    def test_adopting_waits_for_the_reads_of_what_was_staged_at_the_same_boundary() -> None:
        tensors, fragment = whole(model_of())
        anchor, stager, c = anchor_of(fragment), CudaStager(CUDA, fragment.numel), codec("fp32")
        expected = c.encode(anchor - read_params(on_cpu(tensors), fragment)).to_bytes()
        incoming = stager.prefetch(torch.zeros(fragment.numel), torch.empty(0))
        with torch.cuda.stream(stager._reads):
            torch.cuda._sleep(200_000_000)
        staged = stager.stage(fragment, tensors, anchor, c)
        stager.adopt(fragment, tensors, incoming, 0.0, None)
        assert staged.wait()[0].to_bytes() == expected
        assert not bool(read_params(tensors, fragment).any())

    def test_steady_state_allocates_no_pinned_memory() -> None:
        tensors, fragment = whole(model_of())
        anchor, stager = anchor_of(fragment), CudaStager(CUDA, fragment.numel)
        for _ in range(30):
            pair = [stager.stage(fragment, tensors, anchor, codec("int4")) for _ in range(2)]
            stager.before_optimizer_step()
            for staged in pair:
                staged.wait()
                staged.release()
        assert stager.pool.allocations == 2
