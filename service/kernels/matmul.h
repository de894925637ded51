// Matrix products with packed weights. Included after one of the simd headers.
//
// How many rows or panels are computed side by side, how columns are cut into blocks and which thread does it changes nothing of how
// an output comes about, so neither does it change a bit of the result.
#pragma once

#include "matmul_floats.h"
#if defined(NUMASERVE_PAIR_PRODUCTS)
#include "matmul_integers.h"
#endif

namespace {
namespace matmul {

inline numaserve::ScratchSize float_scratch(const numaserve_matmul& m) {
    const packed::Layout layout = packed::layout_of(m.weight);
    const int64_t rows = least(rows_per_chunk(m, layout), m.rows);
    const int64_t shared = needs_widening(m) ? rows * layout.pairs * 8 : 0;
    const int64_t own = BlockProduct::bytes(rows_per_block(most(2 * layout.pairs, 1)) + kMostRows);
    return {static_cast<size_t>(shared), static_cast<size_t>(own)};
}

// About so many operations are taken at a time: enough to be worth the taking, little to wait for at the end.
constexpr int64_t kTakenOperations = 1'000'000;

// A multiple of how many panels few rows are multiplied with side by side.
inline int64_t panels_to_take(const packed::Layout& layout, int64_t rows) {
    constexpr int64_t kTogether = 12;
    const int64_t panels = most(kTakenOperations / most(4 * kPanel * layout.pairs * rows, 1), 1);
    return panels >= kTogether ? panels / kTogether * kTogether : panels;
}

// Calls function(first row, rows, first panel, end) for what this thread gets of blocks of `block` rows by all panels.
template <class Function>
inline void for_each_share(const Team& team, const packed::Layout& layout, int64_t rows, int64_t block, Function function) {
    const int64_t units = blocks_of(rows, block) * layout.panels;
    const auto work = [&](Range range) {
        for (int64_t unit = range.begin; unit < range.end;) {
            const int64_t row = unit / layout.panels * block, panel = unit % layout.panels;
            const int64_t panels = least(layout.panels - panel, range.end - unit);
            function(row, least(block, rows - row), panel, panel + panels);
            unit += panels;
        }
    };
    if (rows <= 1 || units > numaserve::Shares::kMostUnits) {
        // A single row reads the whole share at several places at once.
        return work(numaserve::share(units, team.index, team.size));
    }
    numaserve::Shares shares(team, units);
    const int64_t at_once = panels_to_take(layout, least(block, rows));
    for (Range range{}; shares.take(at_once, range);) {
        work(range);
    }
}

inline void run_floats(const Team& team, const numaserve_matmul& m) {
    const packed::Layout layout = packed::layout_of(m.weight);
    const bool widen = needs_widening(m);
    const int64_t chunk = rows_per_chunk(m, layout);
    BlockProduct product(m, layout, team.own);
    for (int64_t first = 0; first < m.rows; first += chunk) {
        const int64_t rows = least(chunk, m.rows - first);
        const auto* a = static_cast<const float*>(m.x.data) + first * m.x.stride;
        int64_t a_stride = m.x.stride;
        if (widen) {
            auto* widened = reinterpret_cast<float*>(team.shared);
            a_stride = 2 * layout.pairs;
            if (first > 0) {
                team.barrier();
            }
            widen_rows(m.x, first, numaserve::share(rows, team.index, team.size), m.weight.columns, a_stride, widened);
            team.barrier();
            a = widened;
        }
        const int64_t block = even_block(rows, most(2 * layout.pairs, 1));
        for_each_share(team, layout, rows, block, [&](int64_t row, int64_t count, int64_t panel, int64_t end) {
            product.run(a + row * a_stride, a_stride, first + row, count, panel, end);
        });
    }
}

#if defined(NUMASERVE_PAIR_PRODUCTS)
inline bool goes_in_integers(const numaserve_matmul& m, const packed::Layout& layout) { return m.rows > 0 && layout.groups > 0; }

// For each thread: a row in fp32 and what its product needs, then a block of rounded rows.
struct IntegerScratch {
    int64_t row;
    int64_t product;
    int64_t block_rows;
    int64_t integers;

    explicit IntegerScratch(const numaserve_matmul& m, const packed::Layout& layout)
        : row(blocks_of(2 * layout.pairs, kPanel) * kPanel * 4),
          product(BlockProduct::bytes(1)),
          block_rows(least(even_block(m.rows, most(2 * layout.pairs, 1)), m.rows)),
          integers(IntegerProduct::bytes(layout, m.weight.group != 0, block_rows)) {}
};

inline void run_integers(const Team& team, const numaserve_matmul& m, const packed::Layout& layout) {
    const IntegerScratch scratch(m, layout);
    auto* row = reinterpret_cast<float*>(team.own);
    BlockProduct floats(m, layout, team.own + scratch.row);
    IntegerProduct product(m, layout, team.own + scratch.row + scratch.product);
    int64_t taken = -1;
    for_each_share(team, layout, m.rows, scratch.block_rows, [&](int64_t first, int64_t rows, int64_t panel, int64_t end) {
        if (first != taken) {
            product.take_rows(first, rows);
            taken = first;
        }
        product.run(panel, end);
        for (int64_t r = 0; r < rows && !product.all_finite(); ++r) {
            if (!product.is_finite(r)) {
                widen_rows(m.x, first + r, {0, 1}, m.weight.columns, 2 * layout.pairs, row);
                floats.run(row, 2 * layout.pairs, first + r, 1, panel, end);
            }
        }
    });
}
#endif

inline numaserve::ScratchSize scratch(const numaserve_matmul& m) {
#if defined(NUMASERVE_PAIR_PRODUCTS)
    const packed::Layout layout = packed::layout_of(m.weight);
    if (goes_in_integers(m, layout)) {
        const IntegerScratch bytes(m, layout);
        return {0, static_cast<size_t>(bytes.row + bytes.product + bytes.integers)};
    }
#endif
    return float_scratch(m);
}

inline void run(const Team& team, const numaserve_matmul& m) {
#if defined(NUMASERVE_PAIR_PRODUCTS)
    const packed::Layout layout = packed::layout_of(m.weight);
    if (goes_in_integers(m, layout)) {
        return run_integers(team, m, layout);
    }
#endif
    run_floats(team, m);
}

}  // namespace matmul
}  // namespace
