// Matrix products with packed weights in fp32. Included by matmul.h.
//
// Every output is one chain of fused multiply-adds over k, from the first column to the last, held by one lane of one
// accumulator; group-wise integers sum each group in such a chain and chain the scaled sums. How many rows or panels are
// computed side by side, how k is cut into blocks and which thread does it changes nothing of that, so neither does it change
// a bit of the result.
#pragma once

#include "matmul_tiles.h"

namespace {
namespace matmul {

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t blocks_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Rows whose fp32 inputs take half of a usual second-level cache, in whole tiles.
inline int64_t rows_per_block(int64_t columns) {
    constexpr int64_t kCacheBytes = 256 * 1024;
    const int64_t rows = least(most(kCacheBytes / (4 * columns), 24), 192);
    return most(rows / kMostRows, 1) * kMostRows;
}

// Rows in blocks of about one size, since threads get equal numbers of blocks, and in whole tiles.
inline int64_t even_block(int64_t rows, int64_t columns) {
    const int64_t blocks = blocks_of(rows, rows_per_block(columns));
    return blocks_of(blocks_of(rows, blocks), kMostRows) * kMostRows;
}

// Inputs that are not fp32 are widened this many bytes at a time.
constexpr int64_t kWidenedBytes = 8 * 1024 * 1024;
// Columns of a panel that stay in the first-level cache, beside the next ones, while all rows of a block pass over them.
constexpr int64_t kBlockPairs = 192;
constexpr int64_t kWidenedPairs = 128;
// Tiles of rows from which on integers are widened once instead of by each tile.
constexpr int64_t kTilesToWiden = 3;

inline bool needs_widening(const numaserve_matmul& m) {
    return m.x.dtype != NUMASERVE_F32 || m.weight.columns % 2 != 0;
}

inline int64_t rows_per_chunk(const numaserve_matmul& m, const packed::Layout& layout) {
    if (!needs_widening(m)) {
        return m.rows;
    }
    const int64_t block = rows_per_block(2 * layout.pairs);
    return most(kWidenedBytes / (8 * layout.pairs) / block, 1) * block;
}

inline void widen_rows(const numaserve_array& x, int64_t first, Range rows, int64_t columns, int64_t stride, float* target) {
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const int64_t from = (first + r) * x.stride;
        float* to = target + r * stride;
        int64_t k = 0;
        for (; k + kPanel <= columns; k += kPanel) {
            simd::store(to + k, simd::load_any(x.data, x.dtype, from + k));
        }
        for (; k < stride; ++k) {
            to[k] = k < columns ? load_number(x.data, x.dtype, from + k) : 0.0F;
        }
    }
}

// What becomes of the finished sums of one row and panel.
inline void finish(const numaserve_matmul& m, V v, const float* channel_scales, int64_t row, int64_t panel) {
    const int64_t column = panel * kPanel;
    const int64_t count = least(kPanel, m.weight.rows - column);
    if (channel_scales != nullptr) {
        v = simd::mul(v, simd::load(channel_scales));
    }
    if (m.bias.data != nullptr) {
        v = simd::add(v, simd::load_some(m.bias.data, m.bias.dtype, column, count));
    }
    v = simd::mul(v, simd::splat(m.scale));
    if (m.softcap != 0.0F) {
        v = simd::softcap(v, m.softcap);
    }
    if (m.residual.data != nullptr) {
        v = simd::add(simd::load_some(m.residual.data, m.residual.dtype, row * m.residual.stride + column, count), v);
    }
    simd::store_some(m.y.data, m.y.dtype, row * m.y.stride + column, count, v);
}

// One block of rows times panels [begin, end).
class BlockProduct {
   public:
    BlockProduct(const numaserve_matmul& m, const packed::Layout& layout, unsigned char* own)
        : m_(m),
          layout_(layout),
          grouped_(m.weight.group != 0 && layout.groups > 0),
          integers_(layout.groups > 0),
          own_functions_(functions_for(m.weight.format, grouped_)),
          widened_functions_(functions_for(NUMASERVE_F32, grouped_)),
          widened_(reinterpret_cast<float*>(own)),
          sums_(widened_ + kMostPanels * kWidenedPairs * 32) {}

    // Memory for each thread, for blocks of so many rows.
    static int64_t bytes(int64_t rows) {
        const int64_t sums = blocks_of(rows, kMostRows) * kMostRows * kMostPanels * kPanel;
        return (sums + kMostPanels * kWidenedPairs * 32) * 4;
    }

    // a: the block's rows in fp32; first_row: the first of them in the matrix.
    void run(const float* a, int64_t a_stride, int64_t first_row, int64_t rows, int64_t begin, int64_t end) {
        const int64_t tiles = blocks_of(rows, kMostRows);
        const bool widen = integers_ && (tiles >= kTilesToWiden || m_.weight.format == NUMASERVE_INT4);
        const TileFunctions& functions = widen ? widened_functions_ : own_functions_;
        const int64_t most_rows = blocks_of(rows, tiles);
        // A tile of the block may have one row less; the count of panels is that of the largest.
        const int at_once = functions.panels[most_rows - 1];
        const Block block{a, a_stride, first_row, rows, tiles, widen, functions};
        // Panels that one row passes over side by side lie far apart: each of them is a long stream from memory, which is what
        // prefetching hardware follows.
        int64_t panel = begin;
        if (rows == 1) {
            apart_ = (end - begin) / at_once;
            for (; panel < begin + apart_; ++panel) {
                run_panels(block, panel, at_once);
            }
            panel = begin + at_once * apart_;
            apart_ = 1;
        }
        while (panel < end) {
            const int panels = panel + at_once <= end ? at_once : 1;
            run_panels(block, panel, panels);
            panel += panels;
        }
    }

   private:
    struct Block {
        const float* a;
        int64_t a_stride;
        int64_t first_row;
        int64_t rows;
        int64_t tiles;
        bool widen;
        const TileFunctions& functions;
    };

    void run_panels(const Block& block, int64_t panel, int panels) {
        const int64_t tiles = block.tiles;
        const int64_t step = tiles == 1 && !block.widen ? layout_.pairs : block_pairs(block.widen ? kWidenedPairs : kBlockPairs);
        for (int64_t pair = 0; pair < layout_.pairs; pair += step) {
            Tile tile = tile_at(panel, panels, pair, least(step, layout_.pairs - pair));
            const Ahead ahead = ahead_of(tile, panels, pair, tiles);
            if (block.widen) {
                widen_panels(tile, panels);
            }
            for (int64_t t = 0; t < tiles; ++t) {
                const Range part = numaserve::share(block.rows, static_cast<int>(t), static_cast<int>(tiles));
                tile.a = block.a + part.begin * block.a_stride + 2 * pair;
                tile.a_stride = block.a_stride;
                tile.sums = sums_of(t);
                for (int p = 0; p < panels; ++p) {
                    tile.ahead[p] = ahead.start[p] + t * ahead.tile_bytes;
                }
                tile.ahead_bytes = ahead.pair_bytes;
                const int64_t row = part.end - part.begin - 1;
                if (panels == block.functions.panels[row]) {
                    block.functions.many[row](tile);
                } else {
                    run_single(block.functions.one[row], tile, panels);
                }
            }
        }
        finish_panels(panel, panels, block.first_row, block.rows, tiles);
    }

    float* sums_of(int64_t tile) const { return sums_ + tile * kMostRows * kMostPanels * kPanel; }

    Tile tile_at(int64_t panel, int panels, int64_t pair, int64_t pairs) const {
        Tile tile{};
        tile.pairs = pairs;
        tile.group_pairs = layout_.group_pairs;
        tile.first = pair == 0;
        for (int p = 0; p < panels; ++p) {
            const auto* data = static_cast<const unsigned char*>(m_.weight.data);
            tile.weights[p] = data + (panel + p * apart_) * layout_.panel_bytes + pair * layout_.pair_bytes;
            if (integers_) {
                const int64_t group = pair / layout_.group_pairs;
                tile.scales[p] = packed::panel_scales(m_.weight, layout_, panel + p * apart_) + group * kPanel;
                tile.zeros[p] = packed::panel_zeros(m_.weight, layout_, panel + p * apart_) + group * kPanel;
            }
        }
        return tile;
    }

    // Blocks of columns of about one size, at most about `most_pairs`, in whole groups.
    int64_t block_pairs(int64_t most_pairs) const {
        const int64_t whole = grouped_ ? layout_.group_pairs : packed::kInt4Pairs;
        most_pairs = most(most_pairs / whole, 1) * whole;
        const int64_t even = blocks_of(layout_.pairs, blocks_of(layout_.pairs, most_pairs));
        return blocks_of(even, whole) * whole;
    }

    struct Ahead {
        const unsigned char* start[kMostPanels];
        int64_t tile_bytes;
        int64_t pair_bytes;
    };

    // What the tiles of a block of columns ask memory for.
    Ahead ahead_of(const Tile& tile, int panels, int64_t pair, int64_t tiles) const {
        Ahead ahead{};
        const int64_t block_bytes = tile.pairs * layout_.pair_bytes;
        const bool is_last = pair + tile.pairs == layout_.pairs;
        for (int p = 0; p < panels; ++p) {
            const int64_t next = tiles == 1 ? kPrefetchBytes / panels : is_last ? panels * layout_.panel_bytes - pair * layout_.pair_bytes
                                                                       : block_bytes;
            ahead.start[p] = tile.weights[p] + next;
        }
        ahead.tile_bytes = block_bytes / tiles;
        ahead.pair_bytes = blocks_of(layout_.pair_bytes, tiles);
        return ahead;
    }

    void widen_panels(Tile& tile, int panels) const {
        for (int p = 0; p < panels; ++p) {
            float* target = widened_ + p * kWidenedPairs * 32;
            if (m_.weight.format == NUMASERVE_INT8) {
                widen_int8(tile, p, target);
            } else {
                widen_int4(tile, p, target);
            }
            tile.weights[p] = reinterpret_cast<const unsigned char*>(target);
        }
    }

    static void run_single(TileFunction function, const Tile& tile, int panels) {
        for (int p = 0; p < panels; ++p) {
            Tile single = tile;
            single.weights[0] = tile.weights[p];
            single.scales[0] = tile.scales[p];
            single.zeros[0] = tile.zeros[p];
            single.ahead[0] = tile.ahead[p];
            single.sums = sums_at(tile, p, 0);
            function(single);
        }
    }

    void finish_panels(int64_t panel, int panels, int64_t first_row, int64_t rows, int64_t tiles) const {
        for (int64_t t = 0; t < tiles; ++t) {
            const Range part = numaserve::share(rows, static_cast<int>(t), static_cast<int>(tiles));
            for (int p = 0; p < panels; ++p) {
                const bool by_channel = integers_ && !grouped_;
                const float* scales = by_channel ? packed::panel_scales(m_.weight, layout_, panel + p * apart_) : nullptr;
                const float* sums = sums_of(t) + p * kMostRows * kPanel;
                for (int64_t r = part.begin; r < part.end; ++r) {
                    finish(m_, simd::load(sums + (r - part.begin) * kPanel), scales, first_row + r, panel + p * apart_);
                }
            }
        }
    }

    const numaserve_matmul& m_;
    const packed::Layout& layout_;
    bool grouped_;
    bool integers_;
    const TileFunctions& own_functions_;
    const TileFunctions& widened_functions_;
    float* widened_;
    float* sums_;
    int64_t apart_ = 1;  // panels that are computed side by side, from each other
};

}  // namespace matmul
}  // namespace
