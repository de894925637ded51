// Sixteen floats as one AVX-512 register. For AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {
namespace simd {

struct V {
    __m512 v;
};

using Mask = __mmask16;

inline V splat(float x) { return {_mm512_set1_ps(x)}; }
inline V zero() { return {_mm512_setzero_ps()}; }
inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, V v) { _mm512_storeu_ps(p, v.v); }

inline V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V sub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V div(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// sum += a * b.
inline void add_product(V& sum, V a, V b) { sum = fma(a, b, sum); }
// The second where either is NaN.
inline V maximum(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
inline V minimum(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }

inline Mask less(V a, V b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
// Where either is NaN.
inline Mask unordered(V a, V b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q); }
inline Mask either(Mask a, Mask b) { return static_cast<Mask>(a | b); }
// Bit i for number i.
inline uint32_t bits(Mask m) { return m; }
inline V select(Mask m, V yes, V no) { return {_mm512_mask_blend_ps(m, no.v, yes.v)}; }
inline V magnitude(V a) { return {_mm512_abs_ps(a.v)}; }
inline V with_sign_of(V a, V s) {
    const __m512 sign = _mm512_set1_ps(-0.0F);
    return {_mm512_or_ps(_mm512_andnot_ps(sign, a.v), _mm512_and_ps(sign, s.v))};
}
inline V nearest(V a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^n for whole n from -126 to 127.
inline V power_of_two(V n) {
    const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23))};
}
// The number whose exponent and sign are the lowest nine bits of v, its mantissa zero.
inline V low_bits_as_exponent(V v) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(v.v), 23))}; }
// Whole numbers toward zero, for numbers that fit.
inline void store_truncated(int32_t* p, V v) { _mm512_storeu_si512(p, _mm512_cvttps_epi32(v.v)); }

inline float sum(V v) {
    const __m256 s = _mm256_add_ps(_mm512_castps512_ps256(v.v), _mm512_extractf32x8_ps(v.v, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
inline float largest(V v) {
    const __m256 s = _mm256_max_ps(_mm512_castps512_ps256(v.v), _mm512_extractf32x8_ps(v.v, 1));
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

inline V load_bf16(const uint16_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline V load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline void store_bf16(uint16_t* p, V v) {
    const __m512i bits = _mm512_castps_si512(v.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    const __mmask16 nan = _mm512_cmp_ps_mask(v.v, v.v, _CMP_UNORD_Q);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, quiet)));
}
inline void store_f16(uint16_t* p, V v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v.v, _MM_FROUND_TO_NEAREST_INT));
}

// Sixteen pairs of bf16: the first of each, and the second of each.
inline V load_bf16_first(const unsigned char* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
inline V load_bf16_second(const unsigned char* p) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), high))};
}
inline V load_u8(const unsigned char* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline V load_i8(const unsigned char* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}

// Products of 16-bit integers, summed two by two (vpmaddwd).
#define NUMASERVE_PAIR_PRODUCTS
// Sixteen integers of 32 bits, or sixteen pairs of 16 bits.
struct Integers {
    __m512i v;
};
inline Integers no_integers() { return {_mm512_setzero_si512()}; }
inline Integers load_integers(const unsigned char* p) { return {_mm512_loadu_si512(p)}; }
inline V to_floats(const Integers& a) { return {_mm512_cvtepi32_ps(a.v)}; }
// Pairs of the bytes at p and p + 16.
inline Integers load_pairs_i8(const unsigned char* p) {
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16));
    const __m128i low = _mm_unpacklo_epi8(first, second), high = _mm_unpackhi_epi8(first, second);
    return {_mm512_cvtepi8_epi16(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1))};
}
// The j-th four bits of each number of 16 bits.
inline Integers nibbles(const Integers& a, int j) {
    return {_mm512_and_si512(_mm512_srli_epi16(a.v, static_cast<unsigned>(4 * j)), _mm512_set1_epi16(15))};
}
// sum += the pair at p times each of the weights.
inline void add_pair_products(Integers& sum, const int16_t* p, const Integers& weights) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    sum.v = _mm512_add_epi32(sum.v, _mm512_madd_epi16(_mm512_set1_epi32(pair), weights.v));
}
// The first `count` of whole numbers, which fit.
inline void store_int16(int16_t* p, V v, int64_t count) {
    const __mmask16 mask = count >= 16 ? 0xffff : static_cast<__mmask16>((1U << count) - 1);
    _mm256_mask_storeu_epi16(p, mask, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(v.v)));
}

// Forced inline: as a function of its own it has no effect that GCC sees, and its calls would be dropped.
inline __attribute__((always_inline)) void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

// Accumulators of the matrix product: rows at once, and how many vectors fit beside the operands.
constexpr int kMostRows = 12;
constexpr int kAccumulators = 24;

}  // namespace simd
}  // namespace
