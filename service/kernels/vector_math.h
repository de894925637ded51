// What the kernels share beyond arithmetic: reading and writing any element type, and exp, tanh and erf.
// Included after one of the simd headers.
#pragma once

#include "floats.h"

namespace {
namespace simd {

constexpr int64_t kLanes = 16;

inline V load_any(const void* data, int64_t dtype, int64_t index) {
    switch (dtype) {
        case NUMASERVE_BF16:
            return load_bf16(static_cast<const uint16_t*>(data) + index);
        case NUMASERVE_F16:
            return load_f16(static_cast<const uint16_t*>(data) + index);
        default:
            return load(static_cast<const float*>(data) + index);
    }
}

inline void store_any(void* data, int64_t dtype, int64_t index, V v) {
    switch (dtype) {
        case NUMASERVE_BF16:
            return store_bf16(static_cast<uint16_t*>(data) + index, v);
        case NUMASERVE_F16:
            return store_f16(static_cast<uint16_t*>(data) + index, v);
        default:
            return store(static_cast<float*>(data) + index, v);
    }
}

// `count` numbers, the other lanes zero.
inline V load_some(const void* data, int64_t dtype, int64_t index, int64_t count) {
    if (count >= kLanes) {
        return load_any(data, dtype, index);
    }
    float numbers[kLanes] = {};
    for (int64_t i = 0; i < count; ++i) {
        numbers[i] = load_number(data, dtype, index + i);
    }
    return load(numbers);
}

inline void store_some(void* data, int64_t dtype, int64_t index, int64_t count, V v) {
    if (count >= kLanes) {
        return store_any(data, dtype, index, v);
    }
    // Through the vector conversion, so that a number is rounded the same wherever it lies.
    unsigned char converted[64];
    store_any(converted, dtype, 0, v);
    const int64_t bytes = number_bytes(dtype);
    memcpy(static_cast<unsigned char*>(data) + index * bytes, converted, static_cast<size_t>(count * bytes));
}

// e^x within 2 units in the last place: 2^n * e^r with |r| <= ln(2) / 2, e^r by its Taylor series to the seventh power.
inline V exp(V x) {
    const V n = nearest(mul(minimum(splat(88.8F), maximum(splat(-104.0F), x)), splat(1.44269504F)));
    const V r = fma(n, splat(1.42860677e-6F), fma(n, splat(-0.693148613F), x));
    V p = splat(1.98412698e-4F);
    p = fma(p, r, splat(1.38888889e-3F));
    p = fma(p, r, splat(8.33333333e-3F));
    p = fma(p, r, splat(4.16666667e-2F));
    p = fma(p, r, splat(1.66666667e-1F));
    p = fma(p, r, splat(0.5F));
    p = fma(p, r, splat(1.0F));
    p = fma(p, r, splat(1.0F));
    // In two steps, since 2^n alone may be too large or too small for a float.
    const V half = nearest(mul(n, splat(0.5F)));
    const V y = mul(mul(p, power_of_two(half)), power_of_two(sub(n, half)));
    return select(less(splat(88.8F), x), splat(bits_to_float(0x7f800000U)), select(less(x, splat(-104.0F)), zero(), y));
}

// tanh(x) = 1 - 2 / (e^2x + 1), and its Taylor series to the seventh power near zero.
inline V tanh(V x) {
    const V a = magnitude(x);
    const V far = sub(splat(1.0F), div(splat(2.0F), add(exp(add(a, a)), splat(1.0F))));
    const V s = mul(x, x);
    V p = fma(s, splat(-0.053968254F), splat(0.133333333F));
    p = fma(p, s, splat(-0.333333333F));
    const V near = fma(mul(p, s), x, x);
    return select(less(a, splat(0.2F)), near, with_sign_of(far, x));
}

// erf by formula 7.1.26 of Abramowitz and Stegun, absolute error 1.5e-7, and its Taylor series near zero.
inline V erf(V x) {
    const V a = magnitude(x);
    const V t = div(splat(1.0F), fma(a, splat(0.3275911F), splat(1.0F)));
    V p = splat(1.061405429F);
    p = fma(p, t, splat(-1.453152027F));
    p = fma(p, t, splat(1.421413741F));
    p = fma(p, t, splat(-0.284496736F));
    p = fma(p, t, splat(0.254829592F));
    const V far = sub(splat(1.0F), mul(mul(p, t), exp(sub(zero(), mul(a, a)))));
    const V s = mul(x, x);
    V q = fma(s, splat(-0.026866170645F), splat(0.112837916710F));
    q = fma(q, s, splat(-0.376126389032F));
    q = fma(q, s, splat(1.128379167096F));
    return select(less(a, splat(0.3F)), mul(q, x), with_sign_of(far, x));
}

inline V softcap(V x, float cap) { return mul(splat(cap), tanh(div(x, splat(cap)))); }

}  // namespace simd
}  // namespace
