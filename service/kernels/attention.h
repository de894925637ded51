// Causal attention over a paged cache. Included after matmul.h.
//
// Keys are met in blocks of kBlock positions and segments of kSegment, both counted from position 0 of the sequence. Within a
// segment a row keeps a running maximum, sum and output (https://arxiv.org/abs/2205.14135), block after block; segments are
// then merged in order. A row meets exactly the blocks that hold keys it sees, and of those only the keys it sees. That order
// is the row's own, so its result is the same bits whether it is computed alone, in a chunk, or spread over threads.
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
    static V read(const void* row, int64_t d) { return simd::load_bf16(static_cast<const uint16_t*>(row) + d); }
};
struct F16Rows {
    static V read(const void* row, int64_t d) { return simd::load_f16(static_cast<const uint16_t*>(row) + d); }
};
struct F32Rows {
    static V read(const void* row, int64_t d) { return simd::load(static_cast<const float*>(row) + d); }
};

// values[r] += sum over keys [begin, end) of weights[r][key] * rows[key], for kRows rows and kParts vectors of a head from d on.
template <class Rows, int kRows, int kParts>
void add_values(const float* weights, const void* const* rows, int64_t begin, int64_t end, int64_t d, float* values, int64_t dim) {
    V sums[kRows][kParts];
#pragma GCC unroll 24
    for (int i = 0; i < kRows * kParts; ++i) {
        sums[i / kParts][i % kParts] = simd::load(values + (i / kParts) * dim + d + (i % kParts) * kLanes);
    }
    for (int64_t k = begin; k < end; ++k) {
#pragma GCC unroll 4
        for (int p = 0; p < kParts; ++p) {
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

using ValueFunction = void (*)(const float*, const void* const*, int64_t, int64_t, int64_t, float*, int64_t);

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

inline int64_t own_floats(const numaserve_attention& op) {
    const int64_t dim = padded(op.head_dim), rows = tile_rows(op);
    const int64_t scores = kBlockPanels * kMostRows * kLanes;
    return rows * dim + 3 * kBlock * dim + dim + rows * kBlock + scores + 2 * Softmax::floats(rows, dim);
}

inline numaserve::ScratchSize scratch(const numaserve_attention& op, int threads) {
    const Work work = plan_work(op, threads);
    const int64_t shared = work.split ? work.segments * Softmax::floats(tile_rows(op), padded(op.head_dim)) : 0;
    return {static_cast<size_t>(shared) * sizeof(float), static_cast<size_t>(own_floats(op)) * sizeof(float)};
}

class UnitAttention {
   public:
    UnitAttention(const numaserve_attention& op, unsigned char* own)
        : op_(op), group_(group_of(op)), dim_(padded(op.head_dim)), cache_bytes_(number_bytes(op.cache_dtype)) {
        const int64_t rows = tile_rows(op);
        auto* memory = reinterpret_cast<float*>(own);
        const auto take = [&memory](int64_t floats) {
            float* start = memory;
            memory += floats;
            return start;
        };
        query_ = take(rows * dim_);
        key_panels_ = take(kBlock * dim_);
        wide_keys_ = take(kBlock * dim_);
        wide_values_ = take(kBlock * dim_);
        zero_row_ = take(dim_);
        weights_ = take(rows * kBlock);
        scores_ = take(kBlockPanels * kMostRows * kLanes);
        part_ = Softmax::at(take(Softmax::floats(rows, dim_)), rows);
        sum_ = Softmax::at(take(Softmax::floats(rows, dim_)), rows);
        memset(zero_row_, 0, static_cast<size_t>(dim_) * sizeof(float));
        keys_in_pairs_ = op.cache_dtype == NUMASERVE_BF16 && op.head_dim % 2 == 0;
    }

    void run_whole(const Unit& unit) {
        load_query(unit);
        sum_.clear(rows_of(unit), dim_);
        for (int64_t segment = unit.first_segment(); segment < unit.end_segment(); ++segment) {
            run_segment(unit, segment, part_);
            merge_segment(unit, segment, part_);
        }
        write(unit);
    }

    void run_part(const Unit& unit, int64_t segment, float* memory) {
        load_query(unit);
        run_segment(unit, segment, Softmax::at(memory, tile_rows(op_)));
    }

    // `memory` holds what run_part left for each of the unit's segments.
    void merge_parts(const Unit& unit, float* memory) {
        sum_.clear(rows_of(unit), dim_);
        for (int64_t segment = unit.first_segment(); segment < unit.end_segment(); ++segment) {
            merge_segment(unit, segment, Softmax::at(memory, tile_rows(op_)));
            memory += Softmax::floats(tile_rows(op_), dim_);
        }
        write(unit);
    }

   private:
    int64_t rows_of(const Unit& unit) const { return unit.positions * group_; }

    // The keys in [begin, end) that the query at a position sees.
    Range seen(int64_t position, int64_t begin, int64_t end) const {
        const int64_t first = op_.window > 0 ? position - op_.window + 1 : 0;
        return {most(first, begin), least(position + 1, end)};
    }

    void load_query(const Unit& unit) {
        for (int64_t row = 0; row < rows_of(unit); ++row) {
            const int64_t head = unit.kv_head * group_ + row % group_;
            const int64_t from = (unit.query_row + row / group_) * op_.query.stride + head * op_.head_dim;
            for (int64_t d = 0; d < dim_; d += kLanes) {
                simd::store(query_ + row * dim_ + d, simd::load_some(op_.query.data, op_.query.dtype, from + d, op_.head_dim - d));
            }
        }
    }

    void merge_segment(const Unit& unit, int64_t segment, const Softmax& part) {
        for (int64_t row = 0; row < rows_of(unit); ++row) {
            const Range keys = seen(unit.first_position + row / group_, segment * kSegment, (segment + 1) * kSegment);
            if (keys.begin < keys.end) {
                merge(sum_, part, row, dim_);
            }
        }
    }

    void write(const Unit& unit) const {
        for (int64_t row = 0; row < rows_of(unit); ++row) {
            const int64_t head = unit.kv_head * group_ + row % group_;
            const int64_t to = (unit.query_row + row / group_) * op_.y.stride + head * op_.head_dim;
            for (int64_t d = 0; d < dim_; d += kLanes) {
                const V v = simd::div(simd::load(sum_.values + row * dim_ + d), simd::splat(sum_.total[row]));
                simd::store_some(op_.y.data, op_.y.dtype, to + d, op_.head_dim - d, v);
            }
        }
    }

    void run_segment(const Unit& unit, int64_t segment, const Softmax& part) {
        part.clear(rows_of(unit), dim_);
        const int64_t begin = most(segment * kSegment, unit.first_key) / kBlock;
        const int64_t end = blocks_of(least((segment + 1) * kSegment, unit.end_key), kBlock);
        for (int64_t block = begin; block < end; ++block) {
            run_block(unit, block * kBlock, part);
        }
    }

    void run_block(const Unit& unit, int64_t start, const Softmax& part) {
        const Range keys = {most(unit.first_key, start) - start, least(unit.end_key - start, kBlock)};
        find_rows(unit, start, keys);
        pack_keys(keys);
        prefetch_block(unit, start + kBlock);
        // The first and last positions whose queries see any of these keys.
        const int64_t first = most(start - unit.first_position, 0);
        int64_t end = unit.positions;
        if (op_.window > 0) {
            end = least(end, start + kBlock + op_.window - 1 - unit.first_position);
        }
        weigh_keys(unit, start, first * group_, end * group_, keys, part);
        const bool wide = widen_values((end - first) * group_, keys);
        const ValueFunctions& functions = functions_for(wide ? int64_t{NUMASERVE_F32} : op_.cache_dtype);
        for (int64_t position = first; position < end;) {
            const Range own = seen(unit.first_position + position, start, start + kBlock);
            int64_t same = position + 1;
            while (same < end && own.end - own.begin == kBlock && sees_all(unit.first_position + same, start)) {
                ++same;
            }
            add_rows(functions, position * group_, same * group_, own.begin - start, own.end - start, part);
            position = same;
        }
    }

    bool sees_all(int64_t position, int64_t start) const {
        const Range own = seen(position, start, start + kBlock);
        return own.end - own.begin == kBlock;
    }

    // Where successive positions of a sequence lie in the cache, for one key-value head.
    class Places {
       public:
        Places(const numaserve_attention& op, const Unit& unit, int64_t position, int64_t cache_bytes)
            : block_(op.block_tables + unit.sequence * op.table_stride + position / op.block_size),
              offset_(position % op.block_size),
              block_size_(op.block_size),
              row_bytes_(op.kv_heads * op.head_dim * cache_bytes),
              head_bytes_(unit.kv_head * op.head_dim * cache_bytes) {}

        int64_t next() {
            const int64_t at = (*block_ * block_size_ + offset_) * row_bytes_ + head_bytes_;
            if (++offset_ == block_size_) {
                offset_ = 0;
                ++block_;
            }
            return at;
        }

       private:
        const int64_t* block_;
        int64_t offset_;
        int64_t block_size_;
        int64_t row_bytes_;
        int64_t head_bytes_;
    };

    void find_rows(const Unit& unit, int64_t start, Range keys) {
        const auto* key_cache = static_cast<const unsigned char*>(op_.keys);
        const auto* value_cache = static_cast<const unsigned char*>(op_.values);
        for (int64_t k = 0; k < kBlock; ++k) {
            if (k < keys.begin || k >= keys.end) {
                keys_[k] = zero_row_;
                values_[k] = zero_row_;
            }
        }
        Places places(op_, unit, start + keys.begin, cache_bytes_);
        for (int64_t k = keys.begin; k < keys.end; ++k) {
            const int64_t at = places.next();
            keys_[k] = key_cache + at;
            values_[k] = value_cache + at;
        }
    }

    void prefetch_block(const Unit& unit, int64_t start) const {
        const int64_t bytes = op_.head_dim * cache_bytes_;
        const auto* key_cache = static_cast<const unsigned char*>(op_.keys);
        const auto* value_cache = static_cast<const unsigned char*>(op_.values);
        const int64_t end = least(start + kBlock, unit.end_key);
        if (start >= end) {
            return;
        }
        Places places(op_, unit, start, cache_bytes_);
        for (int64_t k = start; k < end; ++k) {
            const int64_t at = places.next();
            for (int64_t line = 0; line < bytes; line += 64) {
                simd::prefetch(key_cache + at + line);
                simd::prefetch(value_cache + at + line);
            }
        }
    }

    // Keys as panels of sixteen, like packed weights: an element of a head is a column, a key an output.
    void pack_keys(Range keys) {
        const int64_t words = keys_in_pairs_ ? op_.head_dim / 2 : (op_.head_dim + 1) / 2 * 2;
        const void* rows[kBlock];
        for (int64_t k = 0; k < kBlock; ++k) {
            rows[k] = keys_[k];
            if (!keys_in_pairs_ && keys_[k] != zero_row_ && (op_.cache_dtype != NUMASERVE_F32 || op_.head_dim % 2 != 0)) {
                widen_row(keys_[k], wide_keys_ + k * dim_);
                rows[k] = wide_keys_ + k * dim_;
            }
        }
        for (int64_t panel = keys.begin / kLanes; panel < blocks_of(keys.end, kLanes); ++panel) {
            auto* target = reinterpret_cast<uint32_t*>(key_panels_ + panel * kLanes * dim_);
            simd::transpose_words(rows + panel * kLanes, words, target);
        }
    }

    void widen_row(const void* row, float* target) const {
        for (int64_t d = 0; d < dim_; d += kLanes) {
            simd::store(target + d, simd::load_some(row, op_.cache_dtype, d, op_.head_dim - d));
        }
    }

    // Values in fp32 where several tiles of rows read them, or where a head does not fill its last vector.
    bool widen_values(int64_t rows, Range keys) {
        if (op_.head_dim % kLanes == 0 && (op_.cache_dtype == NUMASERVE_F32 || rows <= kMostRows)) {
            return false;
        }
        for (int64_t k = keys.begin; k < keys.end; ++k) {
            widen_row(values_[k], wide_values_ + k * dim_);
            values_[k] = wide_values_ + k * dim_;
        }
        return true;
    }

    // Scores of rows [begin, end), their softmax weights, and the rescaling of what the rows have summed so far.
    void weigh_keys(const Unit& unit, int64_t start, int64_t begin, int64_t end, Range keys, const Softmax& part) {
        const matmul::TileFunctions& functions = matmul::functions_for(keys_in_pairs_ ? NUMASERVE_BF16 : NUMASERVE_F32, false);
        const int64_t first_panel = keys.begin / kLanes, end_panel = blocks_of(keys.end, kLanes);
        const int64_t tiles = blocks_of(end - begin, kMostRows);
        for (int64_t t = 0; t < tiles; ++t) {
            const Range tile_range = numaserve::share(end - begin, static_cast<int>(t), static_cast<int>(tiles));
            const int64_t rows = tile_range.end - tile_range.begin, first_row = begin + tile_range.begin;
            matmul::Tile tile{};
            tile.a = query_ + first_row * dim_;
            tile.a_stride = dim_;
            tile.pairs = (op_.head_dim + 1) / 2;
            tile.first = true;
            for (int64_t panel = first_panel; panel < end_panel;) {
                const int fit = functions.panels[rows - 1];
                const int panels = panel + fit <= end_panel ? fit : 1;
                for (int p = 0; p < panels; ++p) {
                    tile.weights[p] = reinterpret_cast<const unsigned char*>(key_panels_ + (panel + p) * kLanes * dim_);
                    tile.ahead[p] = tile.weights[p];
                }
                tile.sums = scores_ + panel * kMostRows * kLanes;
                (panels == fit ? functions.many : functions.one)[rows - 1](tile);
                panel += panels;
            }
            for (int64_t r = 0; r < rows; ++r) {
                const int64_t row = first_row + r;
                const Range own = seen(unit.first_position + row / group_, start, start + kBlock);
                weigh_row(scores_ + r * kLanes, row, own.begin - start, own.end - start, part);
            }
        }
    }

    void weigh_row(const float* scores, int64_t row, int64_t begin, int64_t end, const Softmax& part) {
        V v[kBlockPanels];
        V top = simd::splat(kMinusInfinity);
        for (int64_t p = begin / kLanes; p < blocks_of(end, kLanes); ++p) {
            v[p] = simd::mul(simd::load(scores + p * kMostRows * kLanes), simd::splat(op_.scale));
            if (op_.softcap != 0.0F) {
                v[p] = simd::softcap(v[p], op_.softcap);
            }
            v[p] = where_seen(p, begin, end, v[p], simd::splat(kMinusInfinity));
            top = simd::maximum(top, v[p]);
        }
        const float before = part.largest[row], here = simd::largest(top);
        const float largest = before > here ? before : here;
        V total = simd::zero();
        for (int64_t p = begin / kLanes; p < blocks_of(end, kLanes); ++p) {
            const V weight = simd::exp(simd::sub(v[p], simd::splat(largest)));
            const V seen_weight = where_seen(p, begin, end, weight, simd::zero());
            simd::store(weights_ + row * kBlock + p * kLanes, seen_weight);
            total = simd::add(total, seen_weight);
        }
        const float keep = exp_of(before - largest);
        part.largest[row] = largest;
        part.total[row] = part.total[row] * keep + simd::sum(total);
        if (keep != 1.0F) {
            for (int64_t d = row * dim_; d < (row + 1) * dim_; d += kLanes) {
                simd::store(part.values + d, simd::mul(simd::load(part.values + d), simd::splat(keep)));
            }
        }
    }

    // `v` in the lanes of keys [begin, end), `other` in the rest.
    static V where_seen(int64_t panel, int64_t begin, int64_t end, V v, V other) {
        const int64_t first = panel * kLanes;
        if (begin <= first && end >= first + kLanes) {
            return v;
        }
        alignas(64) static constexpr float kNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const V lanes = simd::load(kNumbers);
        const V below_end = simd::select(simd::less(lanes, simd::splat(static_cast<float>(end - first))), v, other);
        return simd::select(simd::less(lanes, simd::splat(static_cast<float>(begin - first))), other, below_end);
    }

    void add_rows(const ValueFunctions& functions, int64_t begin, int64_t end, int64_t first_key, int64_t end_key,
                  const Softmax& part) {
        const int64_t tiles = blocks_of(end - begin, kMostRows);
        for (int64_t t = 0; t < tiles; ++t) {
            const Range tile = numaserve::share(end - begin, static_cast<int>(t), static_cast<int>(tiles));
            const int64_t rows = tile.end - tile.begin, row = begin + tile.begin;
            for (int64_t d = 0; d < dim_;) {
                const int fit = functions.parts[rows - 1];
                const int parts = d + fit * kLanes <= dim_ ? fit : 1;
                const ValueFunction function = (parts == fit ? functions.many : functions.one)[rows - 1];
                function(weights_ + row * kBlock, values_, first_key, end_key, d, part.values + row * dim_, dim_);
                d += parts * kLanes;
            }
        }
    }

    const numaserve_attention& op_;
    int64_t group_;
    int64_t dim_;
    int64_t cache_bytes_;
    bool keys_in_pairs_;
    float* query_;
    float* key_panels_;
    float* wide_keys_;
    float* wide_values_;
    float* zero_row_;
    float* weights_;
    float* scores_;
    Softmax part_;
    Softmax sum_;
    const void* keys_[kBlock];
    const void* values_[kBlock];
};

// Hands each thread a contiguous part of the units with about the same work; packing a key costs as much as some rows' use of it.
class Shares {
   public:
    explicit Shares(const Team& team) : team_(team) {}

    static int64_t cost(int64_t rows, int64_t keys) { return (rows + 6) * (keys + kBlock); }
    void count(int64_t cost) { total_ += cost; }
    bool is_mine(int64_t cost) {
        const int64_t owner = (passed_ + cost / 2) * team_.size / total_;
        passed_ += cost;
        return owner == team_.index;
    }

   private:
    const Team& team_;
    int64_t total_ = 0;
    int64_t passed_ = 0;
};

inline void run(const Team& team, const numaserve_attention& op) {
    UnitAttention attention(op, team.own);
    const int64_t group = group_of(op);
    Shares shares(team);
    const auto unit_cost = [group](const Unit& unit) {
        return Shares::cost(unit.positions * group, unit.end_key - unit.first_key);
    };
    if (!plan_work(op, team.size).split) {
        for_each_unit(op, [&](const Unit& unit) { shares.count(unit_cost(unit)); });
        for_each_unit(op, [&](const Unit& unit) {
            if (shares.is_mine(unit_cost(unit))) {
                attention.run_whole(unit);
            }
        });
        return;
    }
    const auto segment_cost = [group](const Unit& unit, int64_t segment) {
        const int64_t begin = most(segment * kSegment, unit.first_key);
        return Shares::cost(unit.positions * group, least((segment + 1) * kSegment, unit.end_key) - begin);
    };
    const int64_t floats = Softmax::floats(tile_rows(op), padded(op.head_dim));
    auto* memory = reinterpret_cast<float*>(team.shared);
    for_each_unit(op, [&](const Unit& unit) {
        for (int64_t segment = unit.first_segment(); segment < unit.end_segment(); ++segment) {
            shares.count(segment_cost(unit, segment));
        }
    });
    int64_t part = 0;
    for_each_unit(op, [&](const Unit& unit) {
        for (int64_t segment = unit.first_segment(); segment < unit.end_segment(); ++segment, ++part) {
            if (shares.is_mine(segment_cost(unit, segment))) {
                attention.run_part(unit, segment, memory + part * floats);
            }
        }
    });
    team.barrier();
    int64_t index = 0;
    part = 0;
    for_each_unit(op, [&](const Unit& unit) {
        if (index++ % team.size == team.index) {
            attention.merge_parts(unit, memory + part * floats);
        }
        part += unit.end_segment() - unit.first_segment();
    });
}

}  // namespace attention
}  // namespace
