// The innermost loops of matrix products in fp32: some rows times some panels over some columns. Included by matmul_floats.h.
#pragma once

#include "dispatch.h"
#include "packed.h"
#include "pool.h"
#include "vector_math.h"

namespace {
namespace matmul {

using numaserve::Range;
using numaserve::Team;
using packed::kPanel;
using simd::kMostRows;
using simd::V;

constexpr int kMostPanels = 4;
// How far ahead the only tile of rows asks for weights. With several tiles only the first of them would meet memory, and it
// would wait while the others leave memory idle: there each asks for its part of the next block of columns.
constexpr int64_t kPrefetchBytes = 4096;

// A source reads the weights of a pair of columns, the first and the second, for sixteen outputs.
struct F32Source {
    static constexpr int64_t kPairBytes = 128;
    static constexpr int kPanels = kMostPanels;
    static V first(const unsigned char* p) { return simd::load(reinterpret_cast<const float*>(p)); }
    static V second(const unsigned char* p) { return simd::load(reinterpret_cast<const float*>(p) + kPanel); }
};

struct Bf16Source {
    static constexpr int64_t kPairBytes = 64;
    static constexpr int kPanels = kMostPanels;
    static V first(const unsigned char* p) { return simd::load_bf16_first(p); }
    static V second(const unsigned char* p) { return simd::load_bf16_second(p); }
};

struct F16Source {
    static constexpr int64_t kPairBytes = 64;
    static constexpr int kPanels = kMostPanels;
    static V first(const unsigned char* p) { return simd::load_f16(reinterpret_cast<const uint16_t*>(p)); }
    static V second(const unsigned char* p) { return simd::load_f16(reinterpret_cast<const uint16_t*>(p) + kPanel); }
};

struct Int8Source {
    static constexpr int64_t kPairBytes = 32;
    static constexpr int kPanels = kMostPanels;
    static V first(const unsigned char* p) { return simd::load_i8(p); }
    static V second(const unsigned char* p) { return simd::load_i8(p + kPanel); }
};

// Some rows times some panels over some columns. All pointers are at the first of those columns.
struct Tile {
    const float* a;
    int64_t a_stride;
    const unsigned char* weights[kMostPanels];
    const float* scales[kMostPanels];
    const uint8_t* zeros[kMostPanels];
    // Weights to be asked for, and how many bytes of them with each pair of columns.
    const unsigned char* ahead[kMostPanels];
    int64_t ahead_bytes;
    int64_t pairs;
    int64_t group_pairs;
    // The sums, [panel][kMostRows][16]; begun anew where `first` is set, else carried on.
    float* sums;
    bool first;
};

inline float* sums_at(const Tile& tile, int panel, int row) { return tile.sums + (panel * kMostRows + row) * kPanel; }

template <class Source, int kRows, int kPanels>
inline __attribute__((always_inline)) void accumulate(V (&sums)[kRows][kPanels], const Tile& tile, int64_t begin, int64_t end) {
    constexpr int kBases = (kRows + 2) / 3;
    const int64_t stride = tile.a_stride;
    const float* base[kBases];
    for (int i = 0; i < kBases; ++i) {
        base[i] = tile.a + 3 * i * stride + 2 * begin;
    }
    const unsigned char* weights[kPanels];
    const unsigned char* ahead[kPanels];
    const int64_t ahead_bytes = tile.ahead_bytes;
    for (int p = 0; p < kPanels; ++p) {
        weights[p] = tile.weights[p] + begin * Source::kPairBytes;
        ahead[p] = tile.ahead[p] + begin * ahead_bytes;
    }
    for (int64_t i = begin; i < end; ++i) {
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) {
            simd::prefetch(ahead[p]);
            ahead[p] += ahead_bytes;
            const V first = Source::first(weights[p]);
#pragma GCC unroll 12
            for (int r = 0; r < kRows; ++r) {
                simd::add_product(sums[r][p], simd::splat(base[r / 3][(r % 3) * stride]), first);
            }
            if constexpr (kRows > 4) {
                // Keeps the second read behind the first sums: with both at once the registers would not suffice.
                asm volatile("" ::: "memory");
            }
            const V second = Source::second(weights[p]);
#pragma GCC unroll 12
            for (int r = 0; r < kRows; ++r) {
                simd::add_product(sums[r][p], simd::splat(base[r / 3][(r % 3) * stride + 1]), second);
            }
            weights[p] += Source::kPairBytes;
        }
        for (int b = 0; b < kBases; ++b) {
            base[b] += 2;
        }
    }
}

template <class Source, bool kGrouped, int kRows, int kPanels>
void compute_tile(const Tile& tile) {
    V sums[kRows][kPanels];
    if constexpr (!kGrouped) {
#pragma GCC unroll 24
        for (int i = 0; i < kRows * kPanels; ++i) {
            const int r = i / kPanels, p = i % kPanels;
            sums[r][p] = tile.first ? simd::zero() : simd::load(sums_at(tile, p, r));
        }
        accumulate<Source>(sums, tile, 0, tile.pairs);
#pragma GCC unroll 24
        for (int i = 0; i < kRows * kPanels; ++i) {
            simd::store(sums_at(tile, i % kPanels, i / kPanels), sums[i / kPanels][i % kPanels]);
        }
    } else {
        int64_t group = 0;
        for (int64_t begin = 0; begin < tile.pairs; begin += tile.group_pairs, ++group) {
            const int64_t end = begin + tile.group_pairs < tile.pairs ? begin + tile.group_pairs : tile.pairs;
#pragma GCC unroll 24
            for (int i = 0; i < kRows * kPanels; ++i) {
                sums[i / kPanels][i % kPanels] = simd::zero();
            }
            accumulate<Source>(sums, tile, begin, end);
#pragma GCC unroll 24
            for (int i = 0; i < kRows * kPanels; ++i) {
                const int r = i / kPanels, p = i % kPanels;
                float* total = sums_at(tile, p, r);
                const V before = tile.first && begin == 0 ? simd::zero() : simd::load(total);
                simd::store(total, simd::fma(sums[r][p], simd::load(tile.scales[p] + group * kPanel), before));
            }
        }
    }
}

// As many panels side by side as there are accumulators for, so that few rows too keep the multipliers busy.
template <class Source>
constexpr int panels_for(int rows) {
    const int fit = simd::kAccumulators / rows;
    return fit < 1 ? 1 : fit < Source::kPanels ? fit : Source::kPanels;
}

using TileFunction = void (*)(const Tile&);

// The functions for 1 ... kMostRows rows: for panels_for(rows) panels, and for one.
struct TileFunctions {
    TileFunction many[kMostRows];
    TileFunction one[kMostRows];
    int panels[kMostRows];
};

template <class Source, bool kGrouped, int kRows = kMostRows>
constexpr void fill_functions(TileFunctions& table) {
    constexpr int kPanels = panels_for<Source>(kRows);
    table.many[kRows - 1] = compute_tile<Source, kGrouped, kRows, kPanels>;
    table.one[kRows - 1] = compute_tile<Source, kGrouped, kRows, 1>;
    table.panels[kRows - 1] = kPanels;
    if constexpr (kRows > 1) {
        fill_functions<Source, kGrouped, kRows - 1>(table);
    }
}

template <class Source, bool kGrouped>
constexpr TileFunctions make_functions() {
    TileFunctions table{};
    fill_functions<Source, kGrouped>(table);
    return table;
}

template <class Source, bool kGrouped>
constexpr TileFunctions functions_of = make_functions<Source, kGrouped>();

inline const TileFunctions& functions_for(int64_t format, bool grouped) {
    switch (format) {
        case NUMASERVE_BF16:
            return functions_of<Bf16Source, false>;
        case NUMASERVE_F16:
            return functions_of<F16Source, false>;
        case NUMASERVE_INT8:
            return grouped ? functions_of<Int8Source, true> : functions_of<Int8Source, false>;
        default:  // fp32, and what is widened to it
            return grouped ? functions_of<F32Source, true> : functions_of<F32Source, false>;
    }
}

// Widens the integers of a panel to floats [pairs][2][16].
inline void widen_int8(const Tile& tile, int panel, float* target) {
    for (int64_t i = 0; i < tile.pairs; ++i) {
        const unsigned char* pair = tile.weights[panel] + i * Int8Source::kPairBytes;
        simd::store(target + i * 2 * kPanel, Int8Source::first(pair));
        simd::store(target + i * 2 * kPanel + kPanel, Int8Source::second(pair));
    }
}

// The same, less their zero points.
inline void widen_int4(const Tile& tile, int panel, float* target) {
    for (int64_t i = 0; i < tile.pairs; ++i) {
        const unsigned char* words = tile.weights[panel] + i / packed::kInt4Pairs * packed::kInt4Bytes;
        const uint8_t* zeros = tile.zeros[panel] + i / tile.group_pairs * kPanel;
        const int64_t shift = 4 * (i % packed::kInt4Pairs);
        for (int64_t lane = 0; lane < kPanel; ++lane) {
            uint16_t word[2];
            memcpy(word, words + lane * sizeof word, sizeof word);
            for (int64_t second = 0; second < 2; ++second) {
                target[(2 * i + second) * kPanel + lane] = static_cast<float>((word[second] >> shift & 15) - zeros[lane]);
            }
        }
    }
}

}  // namespace matmul
}  // namespace
