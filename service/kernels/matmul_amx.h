// Matrix products of bf16 by bf16 on tile registers (Intel SDM, chapter 18 of volume 1). Included after matmul.h.
//
// An output is one chain over k, 32 columns to a step, whose order the instruction fixes for each row of a tile alone; other types
// go the common way. Which of the two ways a product goes is decided by its types, never by its number of rows.
#pragma once

#include "matmul.h"

namespace {
namespace matmul_amx {

using matmul::blocks_of;
using matmul::least;
using numaserve::Range;
using numaserve::Team;

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileColumns = 32;
constexpr int64_t kTileBytes = 1024;
// Rows of inputs that are laid out for the tiles at a time.
constexpr int64_t kChunkRows = 512;

struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

inline bool applies(const numaserve_matmul& m) { return m.x.dtype == NUMASERVE_BF16 && m.weight.format == NUMASERVE_BF16; }

inline int64_t padded_columns(const numaserve_matmul& m) { return blocks_of(m.weight.columns, kTileColumns) * kTileColumns; }

inline numaserve::ScratchSize scratch(const numaserve_matmul& m) {
    if (!applies(m)) {
        return numaserve::avx512_kernels().matmul_scratch(m);
    }
    const int64_t rows = blocks_of(least(m.rows, kChunkRows), kTileRows) * kTileRows;
    return {static_cast<size_t>(rows * padded_columns(m) * 2), static_cast<size_t>(6 * kTileBytes)};
}

// Inputs as tiles [row block][column block][16][32], zeros where the matrix ends.
inline void lay_out(const numaserve_matmul& m, int64_t first, int64_t rows, Range blocks, unsigned char* target) {
    const int64_t columns = padded_columns(m);
    for (int64_t r = blocks.begin * kTileRows; r < blocks.end * kTileRows; ++r) {
        const auto* row = static_cast<const uint16_t*>(m.x.data) + (first + r) * m.x.stride;
        for (int64_t k = 0; k < columns; k += kTileColumns) {
            const int64_t tile = r / kTileRows * (columns / kTileColumns) + k / kTileColumns;
            unsigned char* to = target + tile * kTileBytes + r % kTileRows * 64;
            const int64_t count = r < rows ? least(m.weight.columns - k, kTileColumns) : 0;
            if (count < kTileColumns) {
                memset(to, 0, 64);
            }
            if (count > 0) {
                memcpy(to, row + k, static_cast<size_t>(count * 2));
            }
        }
    }
}

// Two blocks of rows by two panels; `second_block` and `second_panel` say which of them are there.
class Product {
   public:
    Product(const numaserve_matmul& m, const packed::Layout& layout, unsigned char* own)
        : m_(m), layout_(layout), sums_(reinterpret_cast<float*>(own)), edge_(own + 4 * kTileBytes) {}

    void run(const unsigned char* a, int64_t first_row, int64_t rows, int64_t panel, bool second_panel) {
        const bool second_block = rows > kTileRows;
        const int64_t steps = padded_columns(m_) / kTileColumns;
        const unsigned char* a1 = a + steps * kTileBytes;
        const auto* b = static_cast<const unsigned char*>(m_.weight.data) + panel * layout_.panel_bytes;
        const unsigned char* b1 = b + layout_.panel_bytes;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t step = 0; step < steps; ++step) {
            _tile_loadd(4, a + step * kTileBytes, 64);
            _tile_loadd(6, weights_at(b, step, 0), 64);
            _tile_dpbf16ps(0, 4, 6);
            if (second_panel) {
                _tile_loadd(7, weights_at(b1, step, 1), 64);
                _tile_dpbf16ps(1, 4, 7);
            }
            if (second_block) {
                _tile_loadd(5, a1 + step * kTileBytes, 64);
                _tile_dpbf16ps(2, 5, 6);
                if (second_panel) {
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
        }
        _tile_stored(0, sums_, 64);
        _tile_stored(1, sums_ + 256, 64);
        _tile_stored(2, sums_ + 512, 64);
        _tile_stored(3, sums_ + 768, 64);
        for (int64_t r = 0; r < rows; ++r) {
            const float* row = sums_ + r / kTileRows * 512 + r % kTileRows * 16;
            matmul::finish(m_, simd::load(row), nullptr, first_row + r, panel);
            if (second_panel) {
                matmul::finish(m_, simd::load(row + 256), nullptr, first_row + r, panel + 1);
            }
        }
    }

   private:
    // Sixteen pairs of columns of a panel; where it has fewer left, a copy that is filled up with zeros.
    const unsigned char* weights_at(const unsigned char* panel, int64_t step, int64_t copy) {
        const unsigned char* from = panel + step * kTileBytes;
        const int64_t pairs = layout_.pairs - step * 16;
        if (pairs >= 16) {
            simd::prefetch(from + 4 * kTileBytes);
            return from;
        }
        unsigned char* edge = edge_ + copy * kTileBytes;
        memset(edge, 0, kTileBytes);
        memcpy(edge, from, static_cast<size_t>(pairs * 64));
        return edge;
    }

    const numaserve_matmul& m_;
    const packed::Layout& layout_;
    float* sums_;
    unsigned char* edge_;
};

inline void run(const Team& team, const numaserve_matmul& m) {
    if (!applies(m)) {
        return numaserve::avx512_kernels().matmul(team, m);
    }
    const packed::Layout layout = packed::layout_of(m.weight);
    const TileConfig config;
    _tile_loadconfig(&config);
    Product product(m, layout, team.own);
    const int64_t pairs_of_panels = blocks_of(layout.panels, 2);
    for (int64_t first = 0; first < m.rows; first += kChunkRows) {
        const int64_t rows = least(kChunkRows, m.rows - first);
        const int64_t blocks = blocks_of(rows, kTileRows);
        if (first > 0) {
            team.barrier();
        }
        lay_out(m, first, rows, numaserve::share(blocks, team.index, team.size), team.shared);
        team.barrier();
        // A pair of panels stays in cache while all rows pass over it.
        const int64_t pairs_of_blocks = blocks_of(blocks, 2);
        const Range mine = numaserve::share(pairs_of_panels * pairs_of_blocks, team.index, team.size);
        for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
            const int64_t panel = 2 * (unit / pairs_of_blocks);
            const int64_t row = 2 * kTileRows * (unit % pairs_of_blocks);
            const unsigned char* a = team.shared + row * padded_columns(m) * 2;
            product.run(a, first + row, least(2 * kTileRows, rows - row), panel, panel + 1 < layout.panels);
        }
    }
    _tile_release();
}

}  // namespace matmul_amx
}  // namespace
