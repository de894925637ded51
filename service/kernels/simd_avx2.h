// Sixteen floats as two AVX registers. For AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {
namespace simd {

struct V {
    __m256 lo, hi;
};

struct Mask {
    __m256 lo, hi;
};

inline V splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
}

inline V add(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline V sub(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline V mul(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline V div(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
// sum += a * b. As assembly so that sums stay where they are: left to itself GCC lets them wander between registers, and
// the largest tile, which needs all of them, would keep some in memory.
inline void add_product(V& sum, V a, V b) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum.lo) : "x"(a.lo), "x"(b.lo));
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum.hi) : "x"(a.hi), "x"(b.hi));
}
// The second where either is NaN.
inline V maximum(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline V minimum(V a, V b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }

inline Mask less(V a, V b) { return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)}; }
// Where either is NaN.
inline Mask unordered(V a, V b) { return {_mm256_cmp_ps(a.lo, b.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, b.hi, _CMP_UNORD_Q)}; }
inline Mask either(Mask a, Mask b) { return {_mm256_or_ps(a.lo, b.lo), _mm256_or_ps(a.hi, b.hi)}; }
// Bit i for number i.
inline uint32_t bits(Mask m) {
    return static_cast<uint32_t>(_mm256_movemask_ps(m.lo)) | static_cast<uint32_t>(_mm256_movemask_ps(m.hi)) << 8;
}
inline V select(Mask m, V yes, V no) { return {_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi)}; }
inline V magnitude(V a) {
    const __m256 sign = _mm256_set1_ps(-0.0F);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline V with_sign_of(V a, V s) {
    const __m256 sign = _mm256_set1_ps(-0.0F);
    return {_mm256_or_ps(_mm256_andnot_ps(sign, a.lo), _mm256_and_ps(sign, s.lo)),
            _mm256_or_ps(_mm256_andnot_ps(sign, a.hi), _mm256_and_ps(sign, s.hi))};
}
inline V nearest(V a) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
// 2^n for whole n from -126 to 127.
inline V power_of_two(V n) {
    const __m256i bias = _mm256_set1_epi32(127);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.lo), bias), 23)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.hi), bias), 23))};
}
// The number whose exponent and sign are the lowest nine bits of v, its mantissa zero.
inline V low_bits_as_exponent(V v) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v.lo), 23)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v.hi), 23))};
}
// Whole numbers toward zero, for numbers that fit.
inline void store_truncated(int32_t* p, V v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_cvttps_epi32(v.lo));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), _mm256_cvttps_epi32(v.hi));
}

inline float sum(V v) {
    const __m256 s = _mm256_add_ps(v.lo, v.hi);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
inline float largest(V v) {
    const __m256 s = _mm256_max_ps(v.lo, v.hi);
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

inline __m256 widen_bf16(const uint16_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline V load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
inline V load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline __m256i round_bf16(__m256 v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
}
inline void store_bf16(uint16_t* p, V v) {
    const __m256i packed = _mm256_packus_epi32(round_bf16(v.lo), round_bf16(v.hi));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline void store_f16(uint16_t* p, V v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(v.hi, _MM_FROUND_TO_NEAREST_INT));
}

inline __m256i load_bits(const unsigned char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
// Sixteen pairs of bf16: the first of each, and the second of each.
inline V load_bf16_first(const unsigned char* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(load_bits(p), 16)), _mm256_castsi256_ps(_mm256_slli_epi32(load_bits(p + 32), 16))};
}
inline V load_bf16_second(const unsigned char* p) {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000U));
    return {_mm256_castsi256_ps(_mm256_and_si256(load_bits(p), high)), _mm256_castsi256_ps(_mm256_and_si256(load_bits(p + 32), high))};
}
inline __m256i widen_bytes(const unsigned char* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline V load_u8(const unsigned char* p) { return {_mm256_cvtepi32_ps(widen_bytes(p)), _mm256_cvtepi32_ps(widen_bytes(p + 8))}; }
inline V load_i8(const unsigned char* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8))))};
}

// Products of 16-bit integers, summed two by two (vpmaddwd).
#define NUMASERVE_PAIR_PRODUCTS
// Sixteen integers of 32 bits, or sixteen pairs of 16 bits.
struct Integers {
    __m256i lo, hi;
};
inline Integers no_integers() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Integers load_integers(const unsigned char* p) { return {load_bits(p), load_bits(p + 32)}; }
inline V to_floats(const Integers& a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
// Pairs of the bytes at p and p + 16.
inline Integers load_pairs_i8(const unsigned char* p) {
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16));
    return {_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(first, second)), _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(first, second))};
}
// The j-th four bits of each number of 16 bits.
inline Integers nibbles(const Integers& a, int j) {
    const __m256i mask = _mm256_set1_epi16(15);
    return {_mm256_and_si256(_mm256_srli_epi16(a.lo, 4 * j), mask), _mm256_and_si256(_mm256_srli_epi16(a.hi, 4 * j), mask)};
}
// sum += the pair at p times each of the weights. As assembly for the reason that add_product is.
inline void add_pair_products(Integers& sum, const int16_t* p, const Integers& weights) {
    __m256i input, product;
    asm("vpbroadcastd %[pair], %[input]\n\t"
        "vpmaddwd %[low], %[input], %[product]\n\t"
        "vpaddd %[product], %[sum_low], %[sum_low]\n\t"
        "vpmaddwd %[high], %[input], %[input]\n\t"
        "vpaddd %[input], %[sum_high], %[sum_high]"
        : [sum_low] "+x"(sum.lo), [sum_high] "+x"(sum.hi), [input] "=&x"(input), [product] "=&x"(product)
        : [low] "x"(weights.lo), [high] "x"(weights.hi), [pair] "m"(*reinterpret_cast<const int32_t(*)[1]>(p)));
}
// The first `count` of whole numbers, which fit.
inline void store_int16(int16_t* p, V v, int64_t count) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(v.lo), _mm256_cvtps_epi32(v.hi)), 0xd8);
    if (count >= 16) {
        return _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
    }
    int16_t numbers[16];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(numbers), packed);
    memcpy(p, numbers, static_cast<size_t>(count) * sizeof *p);
}

// Forced inline: as a function of its own it has no effect that GCC sees, and its calls would be dropped.
inline __attribute__((always_inline)) void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

// Accumulators of the matrix product: rows at once, and how many vectors fit beside the operands.
constexpr int kMostRows = 6;
constexpr int kAccumulators = 6;

}  // namespace simd
}  // namespace
