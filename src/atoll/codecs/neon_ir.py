"""The IR of `neon`'s kernels, with the reason for each step.

Each step processes 16 elements, which LLVM spreads over four registers. A block's byte j has the elements j and j + 128, so each
step takes 16 from either half and gives 16 whole bytes.
"""

from __future__ import annotations

import struct
from string import Template
from typing import Final

import torch

from atoll.codecs.blocks import TINY

_INT4_LARGEST_STEP: Final = torch.finfo(torch.float32).max / 7 * (1 - 2.0**-22)
"""The clamp of integers.py, which keeps decoded values finite."""
_FACTS: Final[dict[str, tuple[float, tuple[int, ...]]]] = {
    # The numerator of the inverse scale, and the values of the codes 0..7, -8..-1, as in the torch kernels' `expand`.
    "int4": (28.0, (0, 16, 32, 48, 64, 80, 96, 112, -128, -112, -96, -80, -64, -48, -32, -16)),
    # Twice the numerator of e3m0.py. Doubling is exact, and one bit of the exponent then separates codes from zeros.
    "e3m0": (256.0 * (1.0 - 2.0**-22), (0, 1, 2, 4, 8, 16, 32, 64, -128, -64, -32, -16, -8, -4, -2, -1)),
}
_MAGIC: Final = 1.5 * 2.0**25
"""As in integers.py: its ulp is the grid's step, so the sum's low bits are the code in two's complement."""

_SHARED: Final = Template("""
declare i32 @llvm.vector.reduce.umax.v16i32(<16 x i32>)
declare <16 x i32> @llvm.umax.v16i32(<16 x i32>, <16 x i32>)
declare i64 @llvm.umin.i64(i64, i64)
declare i32 @llvm.umax.i32(i32, i32)
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare <16 x i8> @llvm.aarch64.neon.tbl1.v16i8(<16 x i8>, <16 x i8>)
declare <16 x i8> @llvm.aarch64.neon.tbx1.v16i8(<16 x i8>, <16 x i8>, <16 x i8>)

; Running maxima of 16 magnitudes. Floats without their sign order as integers do, subnormals, Inf and NaN included, so
; this equals abs and amax, and a NaN comes out as a NaN, which the caller looks for.
define internal <16 x i32> @larger(<16 x i32> %so_far, ptr %at) alwaysinline {
  %bits = load <16 x i32>, ptr %at, align 4
  %magnitude = and <16 x i32> %bits, splat (i32 2147483647)
  %larger = call <16 x i32> @llvm.umax.v16i32(<16 x i32> %so_far, <16 x i32> %magnitude)
  ret <16 x i32> %larger
}

define internal <16 x float> @spread(float %value) alwaysinline {
  %first = insertelement <16 x float> poison, float %value, i64 0
  %all = shufflevector <16 x float> %first, <16 x float> poison, <16 x i32> zeroinitializer
  ret <16 x float> %all
}

; 16 products with the inverse scale each, to 16 bytes: %low in the low four bits, %high in the high ones.
define internal <16 x i8> @pack_int4(<16 x float> %low, <16 x float> %high) alwaysinline {
  %low_sum = fadd <16 x float> %low, splat (float $magic)
  %high_sum = fadd <16 x float> %high, splat (float $magic)
  %low_bits = bitcast <16 x float> %low_sum to <32 x i16>
  %high_bits = bitcast <16 x float> %high_sum to <32 x i16>
  %low_half = shufflevector <32 x i16> %low_bits, <32 x i16> poison, <16 x i32> <$even>
  %high_half = shufflevector <32 x i16> %high_bits, <32 x i16> poison, <16 x i32> <$even>
  %low_code = and <16 x i16> %low_half, splat (i16 15)
  %high_code = shl <16 x i16> %high_half, splat (i16 4)
  %both = or disjoint <16 x i16> %low_code, %high_code
  %packed = trunc <16 x i16> %both to <16 x i8>
  ret <16 x i8> %packed
}

; y = 256 x / absmax, just below 256. Codes begin at |y| = 2, where the exponent's top bit sets. From there the rounded
; exponent (half a binade is added to the upper half's bits) is 128 ... 135, and its low bits look the code up. Two
; lookups, because a sign in the index would need a table of 32: bits 6 and 7 of the index, flipped by the xor, are zero
; only for a float of the table's own sign with a code. Others exceed the table: tbl gives 0, tbx keeps what was there.
define internal <16 x i8> @code_e3m0(<16 x float> %y) alwaysinline {
  %bits = bitcast <16 x float> %y to <32 x i16>
  %upper = shufflevector <32 x i16> %bits, <32 x i16> poison, <16 x i32> <$odd>
  %carried = add <16 x i16> %upper, splat (i16 64)
  %shifted = lshr <16 x i16> %carried, splat (i16 7)
  %exponent = trunc <16 x i16> %shifted to <16 x i8>
  %upper_bytes = bitcast <16 x i16> %upper to <32 x i8>
  %top = shufflevector <32 x i8> %upper_bytes, <32 x i8> poison, <16 x i32> <$odd>
  %sign_and_first = and <16 x i8> %top, splat (i8 -64)
  %low_exponent = and <16 x i8> %exponent, splat (i8 63)
  %mixed = or disjoint <16 x i8> %sign_and_first, %low_exponent
  %if_positive = xor <16 x i8> %mixed, splat (i8 64)
  %if_negative = xor <16 x i8> %mixed, splat (i8 -64)
  %positive = call <16 x i8> @llvm.aarch64.neon.tbl1.v16i8(<16 x i8> <$positive>, <16 x i8> %if_positive)
  %code = call <16 x i8> @llvm.aarch64.neon.tbx1.v16i8(<16 x i8> %positive, <16 x i8> <$negative>, <16 x i8> %if_negative)
  ret <16 x i8> %code
}

define internal <16 x i8> @pack_e3m0(<16 x float> %low, <16 x float> %high) alwaysinline {
  %low_code = call <16 x i8> @code_e3m0(<16 x float> %low)
  %high_code = call <16 x i8> @code_e3m0(<16 x float> %high)
  %low_bits = and <16 x i8> %low_code, splat (i8 15)
  %high_bits = shl <16 x i8> %high_code, splat (i8 4)
  %packed = or disjoint <16 x i8> %low_bits, %high_bits
  ret <16 x i8> %packed
}
""")

# To read a block twice, for its maximum and for its codes, would wait for memory the first time, and for the division in
# between. So the loop over a block's codes also takes the maximum of the block two further on, which is then in the cache when
# its turn comes, and the division of the next block runs in parallel. Past the end it repeats the last block.
_ENCODE: Final = Template("""
; Stores the scale, tells the largest maximum so far, and gives numerator / maximum, or 0 for a block sent as zeros.
define internal float @inverse_$name(<16 x i32> %maxima, ptr %scale_at, ptr %largest_at) alwaysinline {
  %max_bits = call i32 @llvm.vector.reduce.umax.v16i32(<16 x i32> %maxima)
  %largest_before = load i32, ptr %largest_at, align 4
  %largest = call i32 @llvm.umax.i32(i32 %largest_before, i32 %max_bits)
  store i32 %largest, ptr %largest_at, align 4
  %max = bitcast i32 %max_bits to float
  %sent = fcmp ogt float %max, $tiny
  $scale
  store float %scale, ptr %scale_at, align 4
  %divisor = select i1 %sent, float %max, float $infinity
  %inverse = fdiv float $numerator, %divisor
  ret float %inverse
}

define internal <16 x i32> @maxima_$name(ptr %x) alwaysinline {
entry:
  br label %step
step:
  %i = phi i64 [0, %entry], [%i_next, %step]
  %so_far = phi <16 x i32> [zeroinitializer, %entry], [%maxima, %step]
  %at = getelementptr float, ptr %x, i64 %i
  %maxima = call <16 x i32> @larger(<16 x i32> %so_far, ptr %at)
  %i_next = add i64 %i, 16
  %more = icmp ult i64 %i_next, 256
  br i1 %more, label %step, label %end
end:
  ret <16 x i32> %maxima
}

; Gives the bits of the largest magnitude of all: a NaN or Inf anywhere, and it is one.
define i32 @encode_$name(ptr noalias readonly %x, i64 %blocks, ptr noalias %scales, ptr noalias %codes) {
entry:
  %largest_at = alloca i32, align 4
  store i32 0, ptr %largest_at, align 4
  %last = sub i64 %blocks, 1
  %maxima_0 = call <16 x i32> @maxima_$name(ptr %x)
  %inverse_0 = call float @inverse_$name(<16 x i32> %maxima_0, ptr %scales, ptr %largest_at)
  %second = call i64 @llvm.umin.i64(i64 1, i64 %last)
  %second_at = shl i64 %second, 8
  %x_second = getelementptr float, ptr %x, i64 %second_at
  %maxima_1 = call <16 x i32> @maxima_$name(ptr %x_second)
  br label %block
block:
  %b = phi i64 [0, %entry], [%b1, %done]
  %maxima_b1 = phi <16 x i32> [%maxima_1, %entry], [%maxima_b2, %done]
  %inverse_b = phi float [%inverse_0, %entry], [%inverse_b1, %done]
  %b1 = add i64 %b, 1
  %b2 = add i64 %b, 2
  %b1_or_last = call i64 @llvm.umin.i64(i64 %b1, i64 %last)
  %b2_or_last = call i64 @llvm.umin.i64(i64 %b2, i64 %last)
  %scale_b1 = getelementptr float, ptr %scales, i64 %b1_or_last
  %inverse_b1 = call float @inverse_$name(<16 x i32> %maxima_b1, ptr %scale_b1, ptr %largest_at)
  %inverse = call <16 x float> @spread(float %inverse_b)
  %x_b_at = shl i64 %b, 8
  %x_b2_at = shl i64 %b2_or_last, 8
  %codes_b_at = shl i64 %b, 7
  %x_b = getelementptr float, ptr %x, i64 %x_b_at
  %x_b2 = getelementptr float, ptr %x, i64 %x_b2_at
  %codes_b = getelementptr i8, ptr %codes, i64 %codes_b_at
  br label %step
step:
  %i = phi i64 [0, %block], [%i_next, %step]
  %so_far = phi <16 x i32> [zeroinitializer, %block], [%maxima_b2, %step]
  %ahead_low_at = getelementptr float, ptr %x_b2, i64 %i
  %ahead_high_at = getelementptr float, ptr %ahead_low_at, i64 128
  %maxima_half = call <16 x i32> @larger(<16 x i32> %so_far, ptr %ahead_low_at)
  %maxima_b2 = call <16 x i32> @larger(<16 x i32> %maxima_half, ptr %ahead_high_at)
  %low_at = getelementptr float, ptr %x_b, i64 %i
  %high_at = getelementptr float, ptr %low_at, i64 128
  %low_x = load <16 x float>, ptr %low_at, align 4
  %high_x = load <16 x float>, ptr %high_at, align 4
  %low = fmul <16 x float> %low_x, %inverse
  %high = fmul <16 x float> %high_x, %inverse
  %packed = call <16 x i8> @pack_$name(<16 x float> %low, <16 x float> %high)
  %codes_at = getelementptr i8, ptr %codes_b, i64 %i
  store <16 x i8> %packed, ptr %codes_at, align 1
  %i_next = add i64 %i, 16
  %more = icmp ult i64 %i_next, 128
  br i1 %more, label %step, label %done
done:
  %again = icmp ult i64 %b1, %blocks
  br i1 %again, label %block, label %end
end:
  %largest = load i32, ptr %largest_at, align 4
  ret i32 %largest
}
""")
# From the maximum to the scale, as in the codecs' `scales` for finite maxima.
_SCALES: Final[dict[str, str]] = {
    "int4": """%kept = select i1 %sent, float %max, float 0.0
  %step = fdiv float %kept, 7.0
  %too_large = fcmp ogt float %step, LARGEST
  %scale = select i1 %too_large, float LARGEST, float %step""",
    "e3m0": "%scale = select i1 %sent, float %max, float 0.0",
}

_VALUE: Final = Template("""
; 16 codes of four bits to floats. Every value has at most three bits of mantissa, so the float's upper half is all of
; it, and that is two bytes: two lookups, and the bytes interleaved, below zeros.
define internal <16 x float> @value_$name(<16 x i8> %code) alwaysinline {
  %top = call <16 x i8> @llvm.aarch64.neon.tbl1.v16i8(<16 x i8> <$top>, <16 x i8> %code)
  %next = call <16 x i8> @llvm.aarch64.neon.tbl1.v16i8(<16 x i8> <$next>, <16 x i8> %code)
  %bytes = shufflevector <16 x i8> %next, <16 x i8> %top, <32 x i32> <$zip>
  %upper = bitcast <32 x i8> %bytes to <16 x i16>
  %halves = shufflevector <16 x i16> zeroinitializer, <16 x i16> %upper, <32 x i32> <$zip>
  %value = bitcast <32 x i16> %halves to <16 x float>
  ret <16 x float> %value
}
""")

_EXPAND: Final = Template("""
define i32 @${job}_$name(ptr noalias %target, i64 %blocks, ptr noalias readonly %factors, ptr noalias readonly %codes) {
entry:
  br label %block
block:
  %b = phi i64 [0, %entry], [%b1, %done]
  %factor_at = getelementptr float, ptr %factors, i64 %b
  %factor_b = load float, ptr %factor_at, align 4
  %factor = call <16 x float> @spread(float %factor_b)
  %target_b_at = shl i64 %b, 8
  %codes_b_at = shl i64 %b, 7
  %target_b = getelementptr float, ptr %target, i64 %target_b_at
  %codes_b = getelementptr i8, ptr %codes, i64 %codes_b_at
  br label %step
step:
  %i = phi i64 [0, %block], [%i_next, %step]
  %codes_at = getelementptr i8, ptr %codes_b, i64 %i
  %packed = load <16 x i8>, ptr %codes_at, align 1
  %low_code = and <16 x i8> %packed, splat (i8 15)
  %high_code = lshr <16 x i8> %packed, splat (i8 4)
  %low_value = call <16 x float> @value_$name(<16 x i8> %low_code)
  %high_value = call <16 x float> @value_$name(<16 x i8> %high_code)
  %low_at = getelementptr float, ptr %target_b, i64 %i
  %high_at = getelementptr float, ptr %low_at, i64 128
  $low
  $high
  store <16 x float> %low, ptr %low_at, align 4
  store <16 x float> %high, ptr %high_at, align 4
  %i_next = add i64 %i, 16
  %more = icmp ult i64 %i_next, 128
  br i1 %more, label %step, label %done
done:
  %b1 = add i64 %b, 1
  %again = icmp ult i64 %b1, %blocks
  br i1 %again, label %block, label %end
end:
  ret i32 0
}
""")

# From `value` and `factor` to the stored number, for the low and for the high codes.
_PRODUCT: Final = Template("%$part = fmul <16 x float> %${part}_value, %factor")
_PRODUCT_AND_SUM: Final = Template("""%${part}_old = load <16 x float>, ptr %${part}_at, align 4
  %${part}_product = fmul <16 x float> %${part}_value, %factor
  %$part = fadd <16 x float> %${part}_old, %${part}_product""")
# e3m0's values are powers of two from 1 up, so the product is exact even for subnormal factors. Fusing it with the sum changes
# no bit unless it overflows: hence neon.py's FACTOR_LIMIT.
_FUSED: Final = Template("""%${part}_old = load <16 x float>, ptr %${part}_at, align 4
  %$part = call <16 x float> @llvm.fma.v16f32(<16 x float> %${part}_value, <16 x float> %factor, <16 x float> %${part}_old)""")


def _float(value: float) -> str:
    """IR writes an fp32 constant as the bits of the equal fp64 number."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016X}"


def _vector(kind: str, values: list[int] | range) -> str:
    return ", ".join(f"{kind} {value}" for value in values)


def _expand(job: str, name: str, body: Template) -> str:
    return _EXPAND.substitute(job=job, name=name, low=body.substitute(part="low"), high=body.substitute(part="high"))


def module_text() -> str:
    """The whole module's IR."""
    magnitudes = [1, 1, 2, 3, 4, 5, 6, 7]  # by the rounded exponent; |y| in 2..3 and 3..6 are both code 1
    parts = [
        _SHARED.substitute(
            magic=_float(_MAGIC),
            even=_vector("i32", range(0, 32, 2)),
            odd=_vector("i32", range(1, 32, 2)),
            positive=_vector("i8", magnitudes + [0] * 8),
            negative=_vector("i8", [-m for m in magnitudes] + [0] * 8),
        )
    ]
    for name, (numerator, values) in _FACTS.items():
        floats = [struct.pack("<f", value) for value in values]
        zipped = [j for i in range(16) for j in (i, 16 + i)]
        bytes_of = {"top": _vector("i8", [f[3] for f in floats]), "next": _vector("i8", [f[2] for f in floats])}
        constants = {"tiny": _float(TINY), "infinity": _float(float("inf")), "numerator": _float(numerator)}
        parts += [
            _ENCODE.substitute(name=name, scale=_SCALES[name].replace("LARGEST", _float(_INT4_LARGEST_STEP)), **constants),
            _VALUE.substitute(name=name, zip=_vector("i32", zipped), **bytes_of),
            _expand("decode", name, _PRODUCT),
            _expand("accumulate", name, _FUSED if name == "e3m0" else _PRODUCT_AND_SUM),
        ]
    return "".join(parts)
