// Causal attention over a paged cache. Included after matmul.h.
//
// Keys are met in blocks of kBlock positions and segments of kSegment, both counted from position 0 of the sequence. Within a
// segment a row keeps a running maximum, sum and output (https://arxiv.org/abs/2205.14135), block after block; segments are
// then merged in order. A row meets exactly the blocks that hold keys it sees, and of those only the keys it sees. That order
// is the row's own, so its result is the same bits whether it is computed alone, in a chunk, or spread over threads.
#pragma once

#include "attention_parts.h"
#include "cache.h"
#include "transpose.h"

namespace {
namespace attention {

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

// Where the keys of a block of positions lie, or its panels of keys, and their values. What is not there points to where something was.
struct BlockRows {
    int64_t sequence = -1;
    int64_t kv_head = -1;
    int64_t start = -1;
    Range keys{};
    const void* key[kBlock];
    const void* value[kBlock];

    bool is_of(const Unit& unit, int64_t position) const {
        return sequence == unit.sequence && kv_head == unit.kv_head && start == position;
    }
};

class UnitAttention {
   public:
    UnitAttention(const numaserve_attention& op, unsigned char* own)
        : op_(op),
          group_(group_of(op)),
          dim_(padded(op.head_dim)),
          cache_{op.cache_dtype, op.block_size, op.kv_heads, op.head_dim},
          in_panels_(cache_.in_panels()) {
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
        for (int64_t k = 0; k < kBlock; ++k) {
            here_.key[k] = here_.value[k] = ahead_.key[k] = ahead_.value[k] = zero_row_;
        }
        keys_in_pairs_ = op.cache_dtype == NUMASERVE_BF16 && op.head_dim % 2 == 0;
    }

    // `next` is what comes after it, if anything.
    void run_whole(const Unit& unit, const Unit* next) {
        load_query(unit);
        sum_.clear(rows_of(unit), dim_);
        for (int64_t segment = unit.first_segment(); segment < unit.end_segment(); ++segment) {
            run_segment(unit, segment, next, part_);
            merge_segment(unit, segment, part_);
        }
        write(unit);
    }

    void run_part(const Unit& unit, int64_t segment, float* memory) {
        load_query(unit);
        run_segment(unit, segment, nullptr, Softmax::at(memory, tile_rows(op_)));
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

    void run_segment(const Unit& unit, int64_t segment, const Unit* next, const Softmax& part) {
        part.clear(rows_of(unit), dim_);
        const int64_t begin = most(segment * kSegment, unit.first_key) / kBlock;
        const int64_t end = blocks_of(least((segment + 1) * kSegment, unit.end_key), kBlock);
        for (int64_t block = begin; block < end; ++block) {
            const int64_t start = block * kBlock;
            if (ahead_.is_of(unit, start)) {
                here_ = ahead_;
            } else {
                find_rows(unit, start, here_);
            }
            if (start + kBlock < unit.end_key) {
                find_rows(unit, start + kBlock, ahead_);
            } else if (next != nullptr) {
                find_rows(*next, next->first_key / kBlock * kBlock, ahead_);
            } else {
                ahead_.sequence = -1;
                ahead_.keys = {};
            }
            run_block(unit, start, part);
        }
    }

    void run_block(const Unit& unit, int64_t start, const Softmax& part) {
        const Range keys = here_.keys;
        // The first and last positions whose queries see any of these keys.
        const int64_t first = most(start - unit.first_position, 0);
        int64_t end = unit.positions;
        if (op_.window > 0) {
            end = least(end, start + kBlock + op_.window - 1 - unit.first_position);
        }
        // A few rows leave memory as busy as themselves when they ask for the next block bit by bit.
        const bool bit_by_bit = in_panels_ && (end - first) * group_ <= kMostRows;
        ask_for_ahead(bit_by_bit ? keys.end : 0);
        if (!in_panels_) {
            pack_keys(keys);
        }
        weigh_keys(unit, start, first * group_, end * group_, bit_by_bit, part);
        const bool wide = widen_values((end - first) * group_, keys);
        const ValueFunctions& functions = functions_for(wide ? int64_t{NUMASERVE_F32} : op_.cache_dtype);
        const void* const* ahead = bit_by_bit && !wide ? ahead_.value : here_.value;
        for (int64_t position = first; position < end;) {
            const Range own = seen(unit.first_position + position, start, start + kBlock);
            int64_t same = position + 1;
            while (same < end && own.end - own.begin == kBlock && sees_all(unit.first_position + same, start)) {
                ++same;
            }
            add_rows(functions, position * group_, same * group_, own.begin - start, own.end - start, ahead, part);
            position = same;
        }
    }

    bool sees_all(int64_t position, int64_t start) const {
        const Range own = seen(position, start, start + kBlock);
        return own.end - own.begin == kBlock;
    }

    void find_rows(const Unit& unit, int64_t start, BlockRows& rows) const {
        const auto* key_cache = static_cast<const unsigned char*>(op_.keys);
        const auto* value_cache = static_cast<const unsigned char*>(op_.values);
        const int64_t run = cache_.run(), stride = cache_.stride();
        rows.sequence = unit.sequence;
        rows.kv_head = unit.kv_head;
        rows.start = start;
        rows.keys = {most(unit.first_key, start) - start, least(unit.end_key - start, kBlock)};
        const int64_t begin = rows.keys.begin / run * run;
        const int64_t* table = op_.block_tables + unit.sequence * op_.table_stride;
        cache::Places places(cache_, table, unit.kv_head, start + begin);
        for (int64_t k = begin; k < rows.keys.end; k += run) {
            const int64_t at = places.next();
            rows.key[k / run] = key_cache + at;
            for (int64_t i = 0; i < run; ++i) {
                rows.value[k + i] = value_cache + at + i * stride;
            }
        }
    }

    // Asks for the next block's keys and values from `begin` on.
    void ask_for_ahead(int64_t begin) const {
        const int64_t run = cache_.run(), bytes = run * cache_.head_bytes();
        for (int64_t k = most(begin, ahead_.keys.begin) / run * run; k < ahead_.keys.end; k += run) {
            const auto* keys = static_cast<const unsigned char*>(ahead_.key[k / run]);
            const auto* values = static_cast<const unsigned char*>(ahead_.value[k]);
            for (int64_t line = 0; line < bytes; line += kLine) {
                simd::prefetch(keys + line);
                simd::prefetch(values + line);
            }
        }
    }

    // Keys as panels of sixteen, like packed weights: an element of a head is a column, a key an output.
    void pack_keys(Range keys) {
        const int64_t words = keys_in_pairs_ ? op_.head_dim / 2 : (op_.head_dim + 1) / 2 * 2;
        const bool widen = !keys_in_pairs_ && (op_.cache_dtype != NUMASERVE_F32 || op_.head_dim % 2 != 0);
        const void* rows[kBlock];
        for (int64_t k = 0; k < kBlock; ++k) {
            const bool is_there = k >= keys.begin && k < keys.end;
            rows[k] = is_there ? here_.key[k] : zero_row_;
            if (widen && is_there) {
                widen_row(here_.key[k], wide_keys_ + k * dim_);
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
            widen_row(here_.value[k], wide_values_ + k * dim_);
            here_.value[k] = wide_values_ + k * dim_;
        }
        return true;
    }

    // Scores of rows [begin, end), their softmax weights, and the rescaling of what the rows have summed so far.
    // With `ask_ahead` the next block's keys are asked for meanwhile.
    void weigh_keys(const Unit& unit, int64_t start, int64_t begin, int64_t end, bool ask_ahead, const Softmax& part) {
        const Range keys = here_.keys;
        const int64_t widened = keys_in_pairs_ ? int64_t{NUMASERVE_BF16} : int64_t{NUMASERVE_F32};
        const int64_t format = in_panels_ ? op_.cache_dtype : widened;
        const matmul::TileFunctions& functions = matmul::functions_for(format, false);
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
                    tile.weights[p] = key_panel(panel + p);
                    tile.ahead[p] = static_cast<const unsigned char*>(ask_ahead ? ahead_.key[panel + p] : tile.weights[p]);
                }
                tile.ahead_bytes = ask_ahead ? packed::pair_bytes_of(format) : 0;
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

    const unsigned char* key_panel(int64_t panel) const {
        return in_panels_ ? static_cast<const unsigned char*>(here_.key[panel])
                          : reinterpret_cast<const unsigned char*>(key_panels_ + panel * kLanes * dim_);
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
                  const void* const* ahead, const Softmax& part) {
        const int64_t tiles = blocks_of(end - begin, kMostRows);
        for (int64_t t = 0; t < tiles; ++t) {
            const Range tile = numaserve::share(end - begin, static_cast<int>(t), static_cast<int>(tiles));
            const int64_t rows = tile.end - tile.begin, row = begin + tile.begin;
            for (int64_t d = 0; d < dim_;) {
                const int fit = functions.parts[rows - 1];
                const int parts = d + fit * kLanes <= dim_ ? fit : 1;
                const ValueFunction function = (parts == fit ? functions.many : functions.one)[rows - 1];
                function(weights_ + row * kBlock, here_.value, ahead, first_key, end_key, d, part.values + row * dim_, dim_);
                d += parts * kLanes;
            }
        }
    }

    const numaserve_attention& op_;
    int64_t group_;
    int64_t dim_;
    cache::Layout cache_;
    bool in_panels_;
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
    BlockRows here_;
    BlockRows ahead_;
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
        Unit pending{};
        bool has_pending = false;
        for_each_unit(op, [&](const Unit& unit) {
            if (!shares.is_mine(unit_cost(unit))) {
                return;
            }
            if (has_pending) {
                attention.run_whole(pending, &unit);
            }
            pending = unit;
            has_pending = true;
        });
        if (has_pending) {
            attention.run_whole(pending, nullptr);
        }
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
