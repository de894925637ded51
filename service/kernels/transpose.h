// Turns sixteen rows of 32-bit words into one panel [words][16]. Included after one of the simd headers.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {
namespace simd {

#if defined(__AVX2__)
inline __m256i load_words(const void* row, int64_t word) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const unsigned char*>(row) + 4 * word));
}

// Eight rows by eight words.
inline void transpose_eight(const void* const* rows, int64_t word, uint32_t* panel) {
    __m256i low[4], high[4];
    for (int i = 0; i < 4; ++i) {
        const __m256i a = load_words(rows[2 * i], word), b = load_words(rows[2 * i + 1], word);
        low[i] = _mm256_unpacklo_epi32(a, b);
        high[i] = _mm256_unpackhi_epi32(a, b);
    }
    const __m256i* pairs[2] = {low, high};
    for (int h = 0; h < 2; ++h) {
        const __m256i a = _mm256_unpacklo_epi64(pairs[h][0], pairs[h][1]), b = _mm256_unpackhi_epi64(pairs[h][0], pairs[h][1]);
        const __m256i c = _mm256_unpacklo_epi64(pairs[h][2], pairs[h][3]), d = _mm256_unpackhi_epi64(pairs[h][2], pairs[h][3]);
        uint32_t* target = panel + 2 * h * 16;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm256_permute2x128_si256(a, c, 0x20));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + 16), _mm256_permute2x128_si256(b, d, 0x20));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + 4 * 16), _mm256_permute2x128_si256(a, c, 0x31));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + 5 * 16), _mm256_permute2x128_si256(b, d, 0x31));
    }
}
#endif

inline void transpose_words(const void* const* rows, int64_t words, uint32_t* panel) {
    int64_t word = 0;
#if defined(__AVX2__)
    for (; word + 8 <= words; word += 8) {
        transpose_eight(rows, word, panel + word * 16);
        transpose_eight(rows + 8, word, panel + word * 16 + 8);
    }
#endif
    for (; word < words; ++word) {
        for (int64_t i = 0; i < 16; ++i) {
            memcpy(panel + word * 16 + i, static_cast<const unsigned char*>(rows[i]) + 4 * word, 4);
        }
    }
}

}  // namespace simd
}  // namespace
