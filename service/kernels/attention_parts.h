// The parts that attention is made of: units of work, running softmax, and sums of values. Included by attention.h.
#pragma once

#include "matmul.h"

namespace {
namespace attention {

using matmul::blocks_of;
using matmul::least;
using matmul::most;
using numaserve::Range;
using numaserve::Team;
using simd::kLanes;
using simd::kMostRows;
using simd::V;

constexpr int64_t kBlock = 64;
constexpr int64_t kBlockPanels = kBlock / kLanes;
constexpr int64_t kSegment = 512;
constexpr int64_t kTileRows = 64;
constexpr int64_t kLine = 64;
constexpr float kMinusInfinity = -__builtin_inff();

inline int64_t padded(int64_t dim) { return blocks_of(dim, kLanes) * kLanes; }
inline int64_t group_of(const numaserve_attention& op) { return op.heads / op.kv_heads; }
inline int64_t tile_positions(const numaserve_attention& op) { return most(kTileRows / group_of(op), 1); }
inline int64_t tile_rows(const numaserve_attention& op) { return tile_positions(op) * group_of(op); }

// Some successive positions of one sequence and the query heads of one key-value head: rows [position][head].
struct Unit {
    int64_t sequence;
    int64_t kv_head;
    int64_t first_position;
    int64_t positions;
    // Where its first query lies in the batch.
    int64_t query_row;
    int64_t first_key;
    int64_t end_key;

    int64_t first_segment() const { return first_key / kSegment; }
    int64_t end_segment() const { return blocks_of(end_key, kSegment); }
};

template <class Function>
inline void for_each_unit(const numaserve_attention& op, Function function) {
    const int64_t step = tile_positions(op);
    for (int64_t s = 0; s < op.sequence_count; ++s) {
        const numaserve_sequence& sequence = op.sequences[s];
        const int64_t start = sequence.context_length - sequence.query_length;
        for (int64_t done = 0; done < sequence.query_length; done += step) {
            Unit unit{};
            unit.sequence = s;
            unit.first_position = start + done;
            unit.positions = least(step, sequence.query_length - done);
            unit.query_row = sequence.query_start + done;
            unit.first_key = op.window > 0 ? most(unit.first_position - op.window + 1, 0) : 0;
            unit.end_key = unit.first_position + unit.positions;
            for (unit.kv_head = 0; unit.kv_head < op.kv_heads; ++unit.kv_head) {
                function(unit);
            }
        }
    }
}

// Units where there are enough of them; else each segment of each unit is work of its own, merged by a second pass.
struct Work {
    bool split;
    int64_t segments;
};

inline Work plan_work(const numaserve_attention& op, int threads) {
    int64_t units = 0, segments = 0;
    for_each_unit(op, [&](const Unit& unit) {
        ++units;
        segments += unit.end_segment() - unit.first_segment();
    });
    return {threads > 1 && units < 4 * threads && segments > units, segments};
}

// Running softmax of some rows: largest score, sum of weights, and weighted values [row][padded(head_dim)].
struct Softmax {
    float* largest;
    float* total;
    float* values;

    static int64_t floats(int64_t rows, int64_t dim) { return rows * (dim + 2); }
    static Softmax at(float* memory, int64_t rows) { return {memory, memory + rows, memory + 2 * rows}; }

    void clear(int64_t rows, int64_t dim) const {
        for (int64_t r = 0; r < rows; ++r) {
            largest[r] = kMinusInfinity;
            total[r] = 0.0F;
        }
        memset(values, 0, static_cast<size_t>(rows * dim) * sizeof(float));
    }
};

// The exponential of a running maximum less the new one, most often 0 or minus infinity.
inline float exp_of(float x) {
    if (x == 0.0F || x == kMinusInfinity) {
        return x == 0.0F ? 1.0F : 0.0F;
    }
    float numbers[kLanes];
    simd::store(numbers, simd::exp(simd::splat(x)));
    return numbers[0];
}

inline void merge(const Softmax& sum, const Softmax& part, int64_t row, int64_t dim) {
    const float before = sum.largest[row], other = part.largest[row];
    const float top = before > other ? before : other;
    const float keep = exp_of(before - top), take = exp_of(other - top);
    sum.largest[row] = top;
    sum.total[row] = sum.total[row] * keep + part.total[row] * take;
    for (int64_t d = row * dim; d < (row + 1) * dim; d += kLanes) {
        const V kept = simd::mul(simd::load(sum.values + d), simd::splat(keep));
        simd::store(sum.values + d, simd::fma(simd::load(part.values + d), simd::splat(take), kept));
    }
}

struct Bf16Rows {
    static constexpr int64_t kBytes = 2;
    static V read(const void* row, int64_t d) { return simd::load_bf16(static_cast<const uint16_t*>(row) + d); }
};
struct F16Rows {
    static constexpr int64_t kBytes = 2;
    static V read(const void* row, int64_t d) { return simd::load_f16(static_cast<const uint16_t*>(row) + d); }
};
struct F32Rows {
    static constexpr int64_t kBytes = 4;
    static V read(const void* row, int64_t d) { return simd::load(static_cast<const float*>(row) + d); }
};

// values[r] += sum over keys [begin, end) of weights[r][key] * rows[key], for kRows rows and kParts vectors of a head from d on.
// Meanwhile the same numbers of ahead[key] are asked for.
template <class Rows, int kRows, int kParts>
void add_values(const float* weights, const void* const* rows, const void* const* ahead, int64_t begin, int64_t end, int64_t d,
                float* values, int64_t dim) {
    V sums[kRows][kParts];
#pragma GCC unroll 24
    for (int i = 0; i < kRows * kParts; ++i) {
        sums[i / kParts][i % kParts] = simd::load(values + (i / kParts) * dim + d + (i % kParts) * kLanes);
    }
    for (int64_t k = begin; k < end; ++k) {
#pragma GCC unroll 4
        for (int p = 0; p < kParts; ++p) {
            if (p * kLanes * Rows::kBytes % kLine == 0) {
                simd::prefetch(static_cast<const unsigned char*>(ahead[k]) + (d + p * kLanes) * Rows::kBytes);
            }
            const V value = Rows::read(rows[k], d + p * kLanes);
#pragma GCC unroll 12
            for (int r = 0; r < kRows; ++r) {
                simd::add_product(sums[r][p], simd::splat(weights[r * kBlock + k]), value);
            }
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < kRows * kParts; ++i) {
        simd::store(values + (i / kParts) * dim + d + (i % kParts) * kLanes, sums[i / kParts][i % kParts]);
    }
}

using ValueFunction = void (*)(const float*, const void* const*, const void* const*, int64_t, int64_t, int64_t, float*, int64_t);

struct ValueFunctions {
    ValueFunction many[kMostRows];
    ValueFunction one[kMostRows];
    int parts[kMostRows];
};

template <class Rows, int kRows = kMostRows>
constexpr void fill_functions(ValueFunctions& table) {
    constexpr int kFit = simd::kAccumulators / kRows;
    constexpr int kParts = kFit > 4 ? 4 : kFit < 1 ? 1 : kFit;
    table.many[kRows - 1] = add_values<Rows, kRows, kParts>;
    table.one[kRows - 1] = add_values<Rows, kRows, 1>;
    table.parts[kRows - 1] = kParts;
    if constexpr (kRows > 1) {
        fill_functions<Rows, kRows - 1>(table);
    }
}

template <class Rows>
constexpr ValueFunctions make_functions() {
    ValueFunctions table{};
    fill_functions<Rows>(table);
    return table;
}

template <class Rows>
constexpr ValueFunctions functions_of = make_functions<Rows>();

inline const ValueFunctions& functions_for(int64_t dtype) {
    switch (dtype) {
        case NUMASERVE_BF16:
            return functions_of<Bf16Rows>;
        case NUMASERVE_F16:
            return functions_of<F16Rows>;
        default:
            return functions_of<F32Rows>;
    }
}

}  // namespace attention
}  // namespace
