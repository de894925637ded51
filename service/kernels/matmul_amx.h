// Matrix products of bf16 by bf16, and by integers with a scale for each output, which bf16 holds exactly, on tile registers
// (Intel SDM, chapter 18 of volume 1). Included after matmul.h.
//
// An output is one chain over steps of 32 columns; within a step the even and the odd columns are chains of their own, begun at zero
// and added up at the end. The instruction fixes that for each row of a tile alone, and vectors repeat it for one row of integers,
// which need not be written down for tiles then. Other types go the common way: types decide that, never the number of rows.
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
// How far ahead weights are asked for that nobody has read yet.
constexpr int64_t kTilesAhead = 2;

// Tiles 0 to 3 hold sums, 4 and 5 inputs, 6 and 7 weights; sums and inputs may have fewer rows than 16.
struct alignas(64) TileConfig {
    explicit TileConfig(int64_t count) {
        const auto few = static_cast<uint8_t>(count);
        for (int i = 0; i < 6; ++i) {
            rows[i] = few;
        }
    }
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Columns of a tile of weights, two by two.
constexpr int64_t kTilePairs = kTileColumns / 2;

inline bool has_integers(const numaserve_matmul& m) { return m.weight.format == NUMASERVE_INT8; }

inline bool applies(const numaserve_matmul& m) {
    return m.x.dtype == NUMASERVE_BF16 && (m.weight.format == NUMASERVE_BF16 || (has_integers(m) && m.weight.group == 0));
}

// Rows of whole tiles are read where they lie.
inline bool in_place(const numaserve_matmul& m) { return m.weight.columns % kTileColumns == 0; }

inline int64_t padded_columns(const numaserve_matmul& m) { return blocks_of(m.weight.columns, kTileColumns) * kTileColumns; }

inline numaserve::ScratchSize scratch(const numaserve_matmul& m) {
    if (!applies(m)) {
        return numaserve::avx512_kernels().matmul_scratch(m);
    }
    const int64_t rows = in_place(m) ? 0 : least(m.rows, kChunkRows);
    const int64_t copies = has_integers(m) ? padded_columns(m) / kTileColumns : 1;
    return {static_cast<size_t>(rows * padded_columns(m) * 2), static_cast<size_t>((4 + 2 * copies) * kTileBytes)};
}

// Inputs in rows of whole tiles, zeros where the matrix ends.
inline void lay_out(const numaserve_matmul& m, int64_t first, Range rows, uint16_t* target) {
    const int64_t columns = padded_columns(m);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const auto* row = static_cast<const uint16_t*>(m.x.data) + (first + r) * m.x.stride;
        memcpy(target + r * columns, row, static_cast<size_t>(m.weight.columns * 2));
        memset(target + r * columns + m.weight.columns, 0, static_cast<size_t>((columns - m.weight.columns) * 2));
    }
}

// Rows of inputs, whose columns are whole tiles.
struct Inputs {
    const uint16_t* data;
    int64_t stride;
    // Of the first of them in the matrix.
    int64_t first_row;
};

// Sixteen pairs of integers, the first ones and the second ones, as sixteen pairs of bf16.
inline void widen_pairs(const unsigned char* from, unsigned char* to) {
    const auto* halves = reinterpret_cast<const __m128i*>(from);
    const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(halves)));
    const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(halves + 1)));
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first), 16);
    _mm512_store_si512(to, _mm512_mask_blend_epi16(0xaaaaaaaaU, low, _mm512_castps_si512(second)));
}

// One or two blocks of rows, and one or two panels; `meets_memory` says that this thread did not read these weights just before.
struct Unit {
    int64_t row;
    int64_t block_rows;
    int64_t blocks;
    int64_t panel;
    int64_t panels;
    bool meets_memory;
};

// The tiles are configured for the rows of a block.
class Product {
   public:
    Product(const numaserve_matmul& m, const packed::Layout& layout, unsigned char* own)
        : m_(m),
          layout_(layout),
          integers_(has_integers(m)),
          steps_(padded_columns(m) / kTileColumns),
          step_bytes_(kTilePairs * layout.pair_bytes),
          sums_(reinterpret_cast<float*>(own)),
          copies_(own + 4 * kTileBytes) {}

    const numaserve_matmul& operation() const { return m_; }

    void run(const Inputs& inputs, const Unit& unit) {
        const bool second_block = unit.blocks > 1, second_panel = unit.panels > 1;
        const int64_t stride = inputs.stride * 2;
        const uint16_t* a = inputs.data + unit.row * inputs.stride;
        const uint16_t* a1 = a + kTileRows * inputs.stride;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        prepare(unit, 0);
        for (int64_t step = 0; step < steps_; ++step) {
            // A step ahead, so that what was written has left the store buffer, which tiles cannot be loaded from.
            prepare(unit, step + 1);
            _tile_loadd(4, a + step * kTileColumns, stride);
            _tile_loadd(6, weights_at(unit.panel, step, 0), 64);
            _tile_dpbf16ps(0, 4, 6);
            if (second_panel) {
                _tile_loadd(7, weights_at(unit.panel + 1, step, 1), 64);
                _tile_dpbf16ps(1, 4, 7);
            }
            if (second_block) {
                _tile_loadd(5, a1 + step * kTileColumns, stride);
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
        for (int64_t block = 0; block < unit.blocks; ++block) {
            finish_block(inputs.first_row + unit.row + block * kTileRows, unit, block);
        }
    }

   private:
    // What a step's weights need before they can be loaded, where nobody saw to it before.
    void prepare(const Unit& unit, int64_t step) {
        if (!unit.meets_memory || step >= steps_) {
            return;
        }
        for (int64_t copy = 0; copy < unit.panels; ++copy) {
            const unsigned char* tile = panel_at(unit.panel + copy) + step * step_bytes_;
            for (int64_t line = 0; line < step_bytes_; line += 64) {
                simd::prefetch(tile + kTilesAhead * step_bytes_ + line);
            }
            const int64_t pairs = least(layout_.pairs - step * kTilePairs, kTilePairs);
            if (integers_) {
                unsigned char* target = copy_at(step, copy);
                for (int64_t i = 0; i < pairs; ++i) {
                    widen_pairs(tile + i * layout_.pair_bytes, target + i * 64);
                }
                if (pairs < kTilePairs) {
                    memset(target + pairs * 64, 0, static_cast<size_t>((kTilePairs - pairs) * 64));
                }
            }
        }
    }

    const unsigned char* panel_at(int64_t panel) const {
        return static_cast<const unsigned char*>(m_.weight.data) + panel * layout_.panel_bytes;
    }

    // Of integers each step of both panels has a place, of bf16 only the last step, which may have to be filled up.
    unsigned char* copy_at(int64_t step, int64_t copy) const {
        return copies_ + (integers_ ? copy * steps_ + step : copy) * kTileBytes;
    }

    // Sixteen pairs of columns of a panel; where it has fewer left, a copy that is filled up with zeros.
    const unsigned char* weights_at(int64_t panel, int64_t step, int64_t copy) {
        if (integers_) {
            return copy_at(step, copy);
        }
        const unsigned char* from = panel_at(panel) + step * kTileBytes;
        const int64_t pairs = layout_.pairs - step * kTilePairs;
        if (pairs >= kTilePairs) {
            return from;
        }
        unsigned char* edge = copy_at(step, copy);
        memset(edge, 0, kTileBytes);
        memcpy(edge, from, static_cast<size_t>(pairs * 64));
        return edge;
    }

    void finish_block(int64_t row, const Unit& unit, int64_t block) const {
        for (int64_t copy = 0; copy < unit.panels; ++copy) {
            const float* scales = integers_ ? packed::panel_scales(m_.weight, layout_, unit.panel + copy) : nullptr;
            const float* sums = sums_ + (2 * block + copy) * 256;
            for (int64_t r = 0; r < unit.block_rows; ++r) {
                matmul::finish(m_, simd::load(sums + r * 16), scales, row + r, unit.panel + copy);
            }
        }
    }

    const numaserve_matmul& m_;
    const packed::Layout& layout_;
    const bool integers_;
    const int64_t steps_;
    const int64_t step_bytes_;
    float* sums_;
    unsigned char* copies_;
};

// Whole blocks of rows, two by two, by all panels. A pair of panels stays in cache while all rows pass over it.
inline void run_whole_blocks(const Team& team, Product& product, const Inputs& inputs, int64_t blocks, int64_t panels) {
    const int64_t pairs_of_blocks = blocks_of(blocks, 2);
    const Range mine = numaserve::share(blocks_of(panels, 2) * pairs_of_blocks, team.index, team.size);
    for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
        const int64_t panel = 2 * (unit / pairs_of_blocks), block = 2 * (unit % pairs_of_blocks);
        const bool is_first = block == 0 || unit == mine.begin;
        product.run(inputs, {block * kTileRows, kTileRows, least(2, blocks - block), panel, least(2, panels - panel), is_first});
    }
}

// The rows after the last whole block. Panels are shared out one by one, since few rows mean little work for each.
inline void run_last_rows(const Team& team, Product& product, const Inputs& inputs, Range rows, int64_t panels) {
    const bool is_first = rows.begin == 0 || has_integers(product.operation());
    const Range mine = numaserve::share(panels, team.index, team.size);
    for (int64_t panel = mine.begin; panel < mine.end; panel += 2) {
        product.run(inputs, {rows.begin, rows.end - rows.begin, 1, panel, least(2, mine.end - panel), is_first});
    }
}

// Tiles take and give numbers too small for their exponents as zero.
class FlushToZero {
   public:
    FlushToZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040U); }
    ~FlushToZero() { _mm_setcsr(before_); }

   private:
    unsigned before_;
};

// One row, fp32 and padded to whole steps, times kPanels panels of integers, `apart` bytes from each other.
template <int kPanels>
inline void multiply_row(const float* row, const unsigned char* weights, const packed::Layout& layout, int64_t apart,
                         simd::V (&totals)[kPanels]) {
    const FlushToZero flush;
    for (int p = 0; p < kPanels; ++p) {
        totals[p] = simd::zero();
    }
    for (int64_t begin = 0; begin < layout.pairs; begin += kTilePairs) {
        simd::V even[kPanels], odd[kPanels];
        for (int p = 0; p < kPanels; ++p) {
            even[p] = odd[p] = simd::zero();
        }
        const int64_t end = least(begin + kTilePairs, layout.pairs);
        for (int64_t pair = begin; pair < end; ++pair) {
            const simd::V first = simd::splat(row[2 * pair]), second = simd::splat(row[2 * pair + 1]);
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) {
                const unsigned char* at = weights + p * apart + pair * layout.pair_bytes;
                simd::prefetch(at + matmul::kPrefetchBytes / kPanels);
                even[p] = simd::fma(first, simd::load_i8(at), even[p]);
                odd[p] = simd::fma(second, simd::load_i8(at + layout.pair_bytes / 2), odd[p]);
            }
        }
        for (int p = 0; p < kPanels; ++p) {
            totals[p] = simd::add(totals[p], simd::add(even[p], odd[p]));
        }
    }
}

template <int kPanels>
inline void finish_row(const numaserve_matmul& m, const packed::Layout& layout, const float* row, int64_t panel, int64_t apart) {
    simd::V totals[kPanels];
    const auto* data = static_cast<const unsigned char*>(m.weight.data);
    multiply_row(row, data + panel * layout.panel_bytes, layout, apart * layout.panel_bytes, totals);
    for (int p = 0; p < kPanels; ++p) {
        const int64_t at = panel + p * apart;
        matmul::finish(m, totals[p], packed::panel_scales(m.weight, layout, at), 0, at);
    }
}

inline void run_single_row(const Team& team, const numaserve_matmul& m, const packed::Layout& layout) {
    auto* row = reinterpret_cast<float*>(team.own);
    matmul::widen_rows(m.x, 0, {0, 1}, m.weight.columns, 2 * layout.pairs, row);
    const Range mine = numaserve::share(layout.panels, team.index, team.size);
    // Long streams from memory, as in the products of other numbers.
    const int64_t apart = (mine.end - mine.begin) / 4;
    for (int64_t i = 0; i < apart; ++i) {
        finish_row<4>(m, layout, row, mine.begin + i, apart);
    }
    for (int64_t panel = mine.begin + 4 * apart; panel < mine.end; ++panel) {
        finish_row<1>(m, layout, row, panel, 1);
    }
}

inline void run(const Team& team, const numaserve_matmul& m) {
    if (!applies(m)) {
        return numaserve::avx512_kernels().matmul(team, m);
    }
    const packed::Layout layout = packed::layout_of(m.weight);
    if (has_integers(m) && m.rows == 1) {
        return run_single_row(team, m, layout);
    }
    Product product(m, layout, team.own);
    const int64_t chunk = in_place(m) ? m.rows : kChunkRows;
    for (int64_t first = 0; first < m.rows; first += chunk) {
        const int64_t rows = least(chunk, m.rows - first);
        Inputs inputs{static_cast<const uint16_t*>(m.x.data) + first * m.x.stride, m.x.stride, first};
        if (!in_place(m)) {
            auto* laid_out = reinterpret_cast<uint16_t*>(team.shared);
            if (first > 0) {
                team.barrier();
            }
            lay_out(m, first, numaserve::share(rows, team.index, team.size), laid_out);
            team.barrier();
            inputs = {laid_out, padded_columns(m), first};
        }
        const int64_t blocks = rows / kTileRows;
        if (blocks > 0) {
            const TileConfig whole(kTileRows);
            _tile_loadconfig(&whole);
            run_whole_blocks(team, product, inputs, blocks, layout.panels);
        }
        if (rows % kTileRows != 0) {
            const TileConfig few(rows % kTileRows);
            _tile_loadconfig(&few);
            run_last_rows(team, product, inputs, {blocks * kTileRows, rows}, layout.panels);
        }
    }
    _tile_release();
}

}  // namespace matmul_amx
}  // namespace
