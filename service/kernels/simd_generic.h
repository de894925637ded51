// Sixteen floats as four vectors of four, in the compiler's own vector types: SSE2, NEON, or whatever the target has.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "floats.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {
namespace simd {

typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16)));

struct V {
    F4 part[4];
};

struct Mask {
    I4 part[4];
};

template <class Function>
inline V each(Function function) {
    V v;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        v.part[i] = function(i);
    }
    return v;
}

inline F4 load4(const float* p) {
    F4 v;
    memcpy(&v, p, 16);
    return v;
}

inline V splat(float x) {
    return each([&](int) { return F4{x, x, x, x}; });
}
inline V zero() { return splat(0.0F); }
inline V load(const float* p) {
    return each([&](int i) { return load4(p + 4 * i); });
}
inline void store(float* p, V v) { memcpy(p, &v, 64); }

inline V add(V a, V b) {
    return each([&](int i) { return a.part[i] + b.part[i]; });
}
inline V sub(V a, V b) {
    return each([&](int i) { return a.part[i] - b.part[i]; });
}
inline V mul(V a, V b) {
    return each([&](int i) { return a.part[i] * b.part[i]; });
}
inline V div(V a, V b) {
    return each([&](int i) { return a.part[i] / b.part[i]; });
}
inline V fma(V a, V b, V c) {
#if defined(__aarch64__)
    return each([&](int i) { return (F4)vfmaq_f32((float32x4_t)c.part[i], (float32x4_t)a.part[i], (float32x4_t)b.part[i]); });
#else
    return each([&](int i) { return a.part[i] * b.part[i] + c.part[i]; });
#endif
}

// sum += a * b.
inline void add_product(V& sum, V a, V b) { sum = fma(a, b, sum); }

inline F4 select4(I4 m, F4 yes, F4 no) { return (F4)((m & (I4)yes) | (~m & (I4)no)); }
// The second where either is NaN.
inline V maximum(V a, V b) {
    return each([&](int i) { return select4(a.part[i] > b.part[i], a.part[i], b.part[i]); });
}
inline V minimum(V a, V b) {
    return each([&](int i) { return select4(a.part[i] < b.part[i], a.part[i], b.part[i]); });
}
inline Mask less(V a, V b) {
    Mask m;
    for (int i = 0; i < 4; ++i) {
        m.part[i] = a.part[i] < b.part[i];
    }
    return m;
}
// Where either is NaN.
inline Mask unordered(V a, V b) {
    Mask m;
    for (int i = 0; i < 4; ++i) {
        m.part[i] = (a.part[i] != a.part[i]) | (b.part[i] != b.part[i]);
    }
    return m;
}
inline Mask either(Mask a, Mask b) {
    for (int i = 0; i < 4; ++i) {
        a.part[i] |= b.part[i];
    }
    return a;
}
// Bit i for number i.
inline uint32_t bits(Mask m) {
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
        const I4 weighed = m.part[i] & I4{1, 2, 4, 8};
        result |= static_cast<uint32_t>((weighed[0] | weighed[1]) | (weighed[2] | weighed[3])) << 4 * i;
    }
    return result;
}
inline V select(Mask m, V yes, V no) {
    return each([&](int i) { return select4(m.part[i], yes.part[i], no.part[i]); });
}
inline V magnitude(V a) {
    return each([&](int i) { return (F4)((I4)a.part[i] & 0x7fffffff); });
}
inline V with_sign_of(V a, V s) {
    return each([&](int i) { return (F4)(((U4)a.part[i] & 0x7fffffffU) | ((U4)s.part[i] & 0x80000000U)); });
}
inline V nearest(V a) {
    V v;
    for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) {
            v.part[i][j] = std::nearbyintf(a.part[i][j]);
        }
    }
    return v;
}
// 2^n for whole n from -126 to 127.
inline V power_of_two(V n) {
    return each([&](int i) { return (F4)((__builtin_convertvector(n.part[i], I4) + 127) << 23); });
}
// The number whose exponent and sign are the lowest nine bits of v, its mantissa zero.
inline V low_bits_as_exponent(V v) {
    return each([&](int i) { return (F4)((U4)v.part[i] << 23); });
}
// Whole numbers toward zero, for numbers that fit.
inline void store_truncated(int32_t* p, V v) {
    for (int i = 0; i < 4; ++i) {
        const I4 whole = __builtin_convertvector(v.part[i], I4);
        memcpy(p + 4 * i, &whole, 16);
    }
}

inline float sum(V v) {
    const F4 q = (v.part[0] + v.part[2]) + (v.part[1] + v.part[3]);
    return (q[0] + q[2]) + (q[1] + q[3]);
}
inline float largest(V v) {
    float most = v.part[0][0];
    for (int i = 0; i < 16; ++i) {
        const float x = v.part[i / 4][i % 4];
        most = most > x ? most : x;
    }
    return most;
}

template <class Function>
inline V from_numbers(Function function) {
    float numbers[16];
    for (int i = 0; i < 16; ++i) {
        numbers[i] = function(i);
    }
    return load(numbers);
}

inline V load_bf16(const uint16_t* p) {
    return from_numbers([&](int i) { return bf16_to_float(p[i]); });
}
inline V load_f16(const uint16_t* p) {
#if defined(__aarch64__)
    return each([&](int i) { return (F4)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
#else
    return from_numbers([&](int i) { return f16_to_float(p[i]); });
#endif
}
inline void store_bf16(uint16_t* p, V v) {
    float numbers[16];
    store(numbers, v);
    for (int i = 0; i < 16; ++i) {
        p[i] = float_to_bf16(numbers[i]);
    }
}
inline void store_f16(uint16_t* p, V v) {
    float numbers[16];
    store(numbers, v);
    for (int i = 0; i < 16; ++i) {
        p[i] = float_to_f16(numbers[i]);
    }
}

inline U4 load_pairs(const unsigned char* p) {
    U4 pairs;
    memcpy(&pairs, p, 16);
    return pairs;
}
// Sixteen pairs of bf16: the first of each, which lies in the low half of a little-endian word, and the second of each.
inline V load_bf16_first(const unsigned char* p) {
    return each([&](int i) { return (F4)(load_pairs(p + 16 * i) << 16); });
}
inline V load_bf16_second(const unsigned char* p) {
    return each([&](int i) { return (F4)(load_pairs(p + 16 * i) & 0xffff0000U); });
}
inline V load_u8(const unsigned char* p) {
    return from_numbers([&](int i) { return static_cast<float>(p[i]); });
}
inline V load_i8(const unsigned char* p) {
    return from_numbers([&](int i) { return static_cast<float>(static_cast<int8_t>(p[i])); });
}

// Forced inline: as a function of its own it has no effect that GCC sees, and its calls would be dropped.
inline __attribute__((always_inline)) void prefetch(const void* p) { __builtin_prefetch(p); }

// Accumulators of the matrix product: rows at once, and how many vectors fit beside the operands.
#if defined(__aarch64__)
constexpr int kMostRows = 5;
constexpr int kAccumulators = 5;
#else
constexpr int kMostRows = 3;
constexpr int kAccumulators = 3;
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "packed weights are read as little-endian");

}  // namespace simd
}  // namespace
