// Matrix products with integer weights where an instruction sums pairs of products of 16-bit integers. Included by matmul.h.
//
// Inputs are rounded to 16-bit integers, in blocks of columns that have a scale of their own: a weight's group, or kInputPairs pairs.
// Within a block sums are exact; blocks are chained in fp32, first to last. A row's integers and scales come of that row alone, and a
// row with a number that is not finite goes the common way, so that other rows never bear on a result.
#pragma once

#include <cfloat>

#include "matmul_floats.h"

namespace {
namespace matmul {

// At most 256: the products of 512 columns of the largest integers still fit 32 bits.
constexpr int64_t kInputPairs = 64;
// Columns of a panel that several tiles of rows pass over while they are in the first-level cache, in pairs.
constexpr int64_t kIntegerBlockPairs = 256;
constexpr float kLargestInput = 32767.0F;
// How far ahead one row asks for weights, by panels that are read side by side, and for the scales of so many blocks.
constexpr int64_t kStreamPrefetchBytes = 1024;
constexpr int64_t kScalesAhead = 16;

inline int64_t input_pairs(const packed::Layout& layout, bool grouped) { return grouped ? layout.group_pairs : kInputPairs; }
inline int64_t padded_pairs(const packed::Layout& layout) { return blocks_of(layout.pairs, packed::kInt4Pairs) * packed::kInt4Pairs; }

// Rows of inputs, rounded. A block's sum counts for weights with zero points.
struct IntegerRows {
    int16_t* numbers;   // [rows][2 * padded_pairs]
    float* scales;      // [rows][blocks]
    float* sums;        // [rows][blocks], times the scale
    int64_t stride;
    int64_t blocks;

    static int64_t bytes(const packed::Layout& layout, bool grouped, int64_t rows) {
        return rows * (padded_pairs(layout) * 4 + blocks_of(layout.pairs, input_pairs(layout, grouped)) * 8) + 64;
    }
};

// False where a number is not finite.
inline bool round_row(const numaserve_array& x, int64_t from, int64_t columns, int64_t block_columns, const IntegerRows& rows,
                      int64_t row) {
    int16_t* to = rows.numbers + row * rows.stride;
    V poison = simd::zero();
    for (int64_t block = 0; block < rows.blocks; ++block) {
        const int64_t begin = block * block_columns, end = least(begin + block_columns, columns);
        V largest = simd::zero();
        for (int64_t k = begin; k < end; k += kPanel) {
            const V v = simd::load_some(x.data, x.dtype, from + k, end - k);
            largest = simd::maximum(simd::magnitude(v), largest);
            poison = simd::fma(v, simd::zero(), poison);
        }
        const float top = simd::largest(largest);
        // Smaller numbers than these count for nothing beside any weight.
        const float inverse = top > 1e-30F && top <= FLT_MAX ? kLargestInput / top : 0.0F;
        V sum = simd::zero();
        for (int64_t k = begin; k < end; k += kPanel) {
            const V v = simd::nearest(simd::mul(simd::load_some(x.data, x.dtype, from + k, end - k), simd::splat(inverse)));
            sum = simd::add(sum, v);
            simd::store_int16(to + k, v, end - k);
        }
        const float scale = inverse != 0.0F ? top / kLargestInput : 0.0F;
        rows.scales[row * rows.blocks + block] = scale;
        rows.sums[row * rows.blocks + block] = simd::sum(sum) * scale;
    }
    memset(to + columns, 0, static_cast<size_t>(rows.stride - columns) * sizeof *to);
    return simd::sum(poison) == 0.0F;
}

// kStreams: panels that one row passes over side by side, each of which memory is read from on its own.
struct Int8Pairs {
    static constexpr int kPairs = 1;
    static constexpr int kStreams = 4;
    static constexpr int64_t kBytes = Int8Source::kPairBytes;
    static constexpr bool kHasZeros = false;
    static simd::Integers pair(const unsigned char* p, int) { return simd::load_pairs_i8(p); }
};

struct Int4Pairs {
    static constexpr int kPairs = packed::kInt4Pairs;
    static constexpr int kStreams = 2;
    static constexpr int64_t kBytes = packed::kInt4Bytes;
    static constexpr bool kHasZeros = true;
    static simd::Integers pair(const unsigned char* p, int j) { return simd::nibbles(simd::load_integers(p), j); }
};

// Some rows times one panel over some blocks of columns. All pointers are at the first of those columns.
struct IntegerTile {
    const int16_t* a;
    const float* a_scales;
    const float* a_sums;
    int64_t a_stride;
    int64_t a_blocks;
    const unsigned char* weights;
    const float* scales;  // of each block, null where outputs have one each
    const uint8_t* zeros;
    int64_t pairs;
    int64_t block_pairs;
    const unsigned char* ahead;
    int64_t ahead_bytes;
    float* sums;  // [kMostRows][16]
    bool first;
};

template <class Source, int kRows>
inline __attribute__((always_inline)) void add_block(const IntegerTile& tile, int64_t begin, int64_t end, simd::Integers (&sums)[kRows]) {
    constexpr int kBases = (kRows + 2) / 3;
    const int64_t stride = tile.a_stride;
    const int16_t* base[kBases];
    for (int i = 0; i < kBases; ++i) {
        base[i] = tile.a + 3 * i * stride + 2 * begin;
    }
    const unsigned char* weights = tile.weights + begin / Source::kPairs * Source::kBytes;
    const unsigned char* ahead = tile.ahead + begin / Source::kPairs * tile.ahead_bytes;
    for (int64_t pair = begin; pair < end; pair += Source::kPairs) {
        simd::prefetch(ahead);
#pragma GCC unroll 4
        for (int j = 0; j < Source::kPairs; ++j) {
            const simd::Integers weight = Source::pair(weights, j);
#pragma GCC unroll 12
            for (int r = 0; r < kRows; ++r) {
                simd::add_pair_products(sums[r], base[r / 3] + (r % 3) * stride + 2 * j, weight);
            }
            if constexpr (kRows > 3) {
                // Weights are read again for the next pair: registers would not suffice to keep them.
                asm volatile("" ::: "memory");
            }
        }
        weights += Source::kBytes;
        ahead += tile.ahead_bytes;
        for (int b = 0; b < kBases; ++b) {
            base[b] += 2 * Source::kPairs;
        }
    }
}

// What the integers of a block of columns stand for, of sixteen outputs.
struct Scaling {
    V scale;
    V shift;
};

template <class Source>
inline Scaling scaling_of(const IntegerTile& tile, int64_t block, int64_t from) {
    if (tile.scales == nullptr) {
        return {simd::splat(1.0F), Source::kHasZeros ? simd::load_u8(tile.zeros + from) : simd::zero()};
    }
    const float* scales = tile.scales + block * kPanel + from;
    const V scale = simd::load(scales);
    simd::prefetch(scales + kScalesAhead * kPanel);
    if constexpr (Source::kHasZeros) {
        const uint8_t* zeros = tile.zeros + block * kPanel + from;
        simd::prefetch(zeros + kScalesAhead * kPanel);
        return {scale, simd::mul(simd::load_u8(zeros), scale)};
    }
    return {scale, simd::zero()};
}

template <class Source>
inline V add_scaled(V total, const simd::Integers& sum, const Scaling& scaling, float a_scale, float a_sum) {
    total = simd::fma(simd::to_floats(sum), simd::mul(scaling.scale, simd::splat(a_scale)), total);
    return Source::kHasZeros ? simd::fma(scaling.shift, simd::splat(-a_sum), total) : total;
}

template <class Source, int kRows>
void compute_integers(const IntegerTile& tile) {
    int64_t block = 0;
    for (int64_t begin = 0; begin < tile.pairs; begin += tile.block_pairs, ++block) {
        const int64_t end = least(begin + tile.block_pairs, tile.pairs);
        simd::Integers sums[kRows];
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
            sums[r] = simd::no_integers();
        }
        add_block<Source, kRows>(tile, begin, end, sums);
        const Scaling scaling = scaling_of<Source>(tile, block, 0);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
            float* total = tile.sums + r * kPanel;
            const int64_t at = r * tile.a_blocks + block;
            const V before = tile.first && begin == 0 ? simd::zero() : simd::load(total);
            simd::store(total, add_scaled<Source>(before, sums[r], scaling, tile.a_scales[at], tile.a_sums[at]));
        }
    }
}

// One row times Source::kStreams panels, `apart` panels from each other: the tile is that of the first. Their sums are the ones that
// each of them alone has; sums [kStreams][16].
template <class Source>
void compute_streams(const IntegerTile& tile, const packed::Layout& layout, int64_t apart) {
    constexpr int kStreams = Source::kStreams;
    const unsigned char* weights[kStreams];
    for (int s = 0; s < kStreams; ++s) {
        weights[s] = tile.weights + s * apart * layout.panel_bytes;
    }
    int64_t block = 0;
    for (int64_t begin = 0; begin < tile.pairs; begin += tile.block_pairs, ++block) {
        const int64_t end = least(begin + tile.block_pairs, tile.pairs);
        simd::Integers sums[kStreams];
#pragma GCC unroll 4
        for (int s = 0; s < kStreams; ++s) {
            sums[s] = simd::no_integers();
        }
        const int16_t* a = tile.a + 2 * begin;
        for (int64_t pair = begin; pair < end; pair += Source::kPairs) {
#pragma GCC unroll 4
            for (int s = 0; s < kStreams; ++s) {
                simd::prefetch(weights[s] + kStreamPrefetchBytes);
#pragma GCC unroll 4
                for (int j = 0; j < Source::kPairs; ++j) {
                    simd::add_pair_products(sums[s], a + 2 * j, Source::pair(weights[s], j));
                }
                weights[s] += Source::kBytes;
            }
            a += 2 * Source::kPairs;
        }
#pragma GCC unroll 4
        for (int s = 0; s < kStreams; ++s) {
            float* total = tile.sums + s * kPanel;
            const V before = begin == 0 ? simd::zero() : simd::load(total);
            const Scaling scaling = scaling_of<Source>(tile, block, s * apart * layout.groups * kPanel);
            simd::store(total, add_scaled<Source>(before, sums[s], scaling, tile.a_scales[block], tile.a_sums[block]));
        }
    }
}

using IntegerFunction = void (*)(const IntegerTile&);

struct IntegerFunctions {
    IntegerFunction of_rows[kMostRows];
};

template <class Source, int kRows = kMostRows>
constexpr void fill_integer_functions(IntegerFunctions& table) {
    table.of_rows[kRows - 1] = compute_integers<Source, kRows>;
    if constexpr (kRows > 1) {
        fill_integer_functions<Source, kRows - 1>(table);
    }
}

template <class Source>
constexpr IntegerFunctions make_integer_functions() {
    IntegerFunctions table{};
    fill_integer_functions<Source>(table);
    return table;
}

template <class Source>
constexpr IntegerFunctions integer_functions_of = make_integer_functions<Source>();

// One block of rows times panels, in integers.
class IntegerProduct {
   public:
    IntegerProduct(const numaserve_matmul& m, const packed::Layout& layout, unsigned char* own)
        : m_(m),
          layout_(layout),
          grouped_(m.weight.group != 0),
          block_pairs_(input_pairs(layout, grouped_)),
          functions_(m.weight.format == NUMASERVE_INT8 ? integer_functions_of<Int8Pairs> : integer_functions_of<Int4Pairs>),
          own_(own) {}

    // Memory for each thread.
    static int64_t bytes(const packed::Layout& layout, bool grouped, int64_t rows) {
        return sums_bytes(rows) + blocks_of(rows, 64) * 64 + IntegerRows::bytes(layout, grouped, rows);
    }

    // Rounds rows [first, first + rows) of the inputs; from then on they are what `run` multiplies.
    void take_rows(int64_t first, int64_t rows) {
        first_row_ = first;
        rows_ = rows;
        sums_ = reinterpret_cast<float*>(own_);
        is_finite_ = own_ + sums_bytes(rows);
        unsigned char* memory = is_finite_ + blocks_of(rows, 64) * 64;
        const int64_t blocks = blocks_of(layout_.pairs, block_pairs_), stride = 2 * padded_pairs(layout_);
        a_.numbers = reinterpret_cast<int16_t*>(memory);
        a_.scales = reinterpret_cast<float*>(memory + rows * stride * 2);
        a_.sums = a_.scales + rows * blocks;
        a_.stride = stride;
        a_.blocks = blocks;
        all_finite_ = true;
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t from = (first + r) * m_.x.stride;
            is_finite_[r] = round_row(m_.x, from, m_.weight.columns, 2 * block_pairs_, a_, r);
            all_finite_ = all_finite_ && is_finite_[r] != 0;
        }
    }

    bool all_finite() const { return all_finite_; }
    bool is_finite(int64_t row) const { return is_finite_[row] != 0; }

    void run(int64_t begin, int64_t end) {
        if (rows_ == 1) {
            begin = m_.weight.format == NUMASERVE_INT8 ? run_streams<Int8Pairs>(begin, end) : run_streams<Int4Pairs>(begin, end);
        }
        const int64_t tiles = blocks_of(rows_, kMostRows);
        const int64_t step = tiles == 1 ? layout_.pairs : most(kIntegerBlockPairs / block_pairs_, 1) * block_pairs_;
        for (int64_t panel = begin; panel < end; ++panel) {
            for (int64_t pair = 0; pair < layout_.pairs; pair += step) {
                run_columns(panel, pair, least(step, layout_.pairs - pair), tiles);
            }
            finish_panel(panel, tiles);
        }
    }

   private:
    static int64_t sums_bytes(int64_t rows) { return blocks_of(rows, kMostRows) * kMostRows * kPanel * 4; }

    // All panels but a few, as far as one row passes over several of them at once; returns the first one that is left.
    template <class Source>
    int64_t run_streams(int64_t begin, int64_t end) {
        constexpr int kStreams = Source::kStreams;
        const int64_t apart = (end - begin) / kStreams;
        for (int64_t panel = begin; panel < begin + apart; ++panel) {
            IntegerTile tile = tile_at(panel, 0, layout_.pairs);
            tile.a = a_.numbers;
            tile.a_scales = a_.scales;
            tile.a_sums = a_.sums;
            tile.sums = sums_;
            compute_streams<Source>(tile, layout_, apart);
            for (int s = 0; s < kStreams; ++s) {
                finish_rows(panel + s * apart, {0, 1}, sums_ + s * kPanel);
            }
        }
        return begin + apart * kStreams;
    }

    IntegerTile tile_at(int64_t panel, int64_t pair, int64_t pairs) const {
        const int64_t block = pair / block_pairs_;
        IntegerTile tile{};
        tile.a_stride = a_.stride;
        tile.a_blocks = a_.blocks;
        tile.weights = static_cast<const unsigned char*>(m_.weight.data) + panel * layout_.panel_bytes + pair * layout_.pair_bytes;
        tile.scales = grouped_ ? packed::panel_scales(m_.weight, layout_, panel) + block * kPanel : nullptr;
        tile.zeros = packed::panel_zeros(m_.weight, layout_, panel) + (grouped_ ? block * kPanel : 0);
        tile.pairs = pairs;
        tile.block_pairs = block_pairs_;
        tile.first = pair == 0;
        return tile;
    }

    void run_columns(int64_t panel, int64_t pair, int64_t pairs, int64_t tiles) {
        const int64_t chunk_pairs = m_.weight.format == NUMASERVE_INT4 ? packed::kInt4Pairs : 1, block = pair / block_pairs_;
        IntegerTile tile = tile_at(panel, pair, pairs);
        const int64_t bytes = pairs * layout_.pair_bytes, chunk_bytes = chunk_pairs * layout_.pair_bytes;
        const bool is_last = pair + pairs == layout_.pairs;
        const int64_t next = tiles == 1 ? kPrefetchBytes : is_last ? layout_.panel_bytes - pair * layout_.pair_bytes : bytes;
        tile.ahead_bytes = blocks_of(chunk_bytes, tiles);
        for (int64_t t = 0; t < tiles; ++t) {
            const Range part = numaserve::share(rows_, static_cast<int>(t), static_cast<int>(tiles));
            tile.a = a_.numbers + part.begin * a_.stride + 2 * pair;
            tile.a_scales = a_.scales + part.begin * a_.blocks + block;
            tile.a_sums = a_.sums + part.begin * a_.blocks + block;
            tile.ahead = tile.weights + next + t * (bytes / tiles);
            tile.sums = sums_ + t * kMostRows * kPanel;
            functions_.of_rows[part.end - part.begin - 1](tile);
        }
    }

    void finish_panel(int64_t panel, int64_t tiles) const {
        for (int64_t t = 0; t < tiles; ++t) {
            const Range part = numaserve::share(rows_, static_cast<int>(t), static_cast<int>(tiles));
            finish_rows(panel, part, sums_ + t * kMostRows * kPanel);
        }
    }

    void finish_rows(int64_t panel, Range rows, const float* sums) const {
        const float* scales = grouped_ ? nullptr : packed::panel_scales(m_.weight, layout_, panel);
        for (int64_t r = rows.begin; r < rows.end; ++r) {
            if (is_finite(r)) {
                finish(m_, simd::load(sums + (r - rows.begin) * kPanel), scales, first_row_ + r, panel);
            }
        }
    }

    const numaserve_matmul& m_;
    const packed::Layout& layout_;
    bool grouped_;
    int64_t block_pairs_;
    const IntegerFunctions& functions_;
    unsigned char* own_;
    int64_t first_row_ = 0;
    int64_t rows_ = 0;
    float* sums_ = nullptr;
    unsigned char* is_finite_ = nullptr;
    bool all_finite_ = true;
    IntegerRows a_{};
};

}  // namespace matmul
}  // namespace
