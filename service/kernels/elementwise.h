// Operations that treat rows one by one: norms, rotation and cache writes, activations, sums, look-ups. Included after a simd header.
#pragma once

#include <cmath>

#include "cache.h"
#include "dispatch.h"
#include "packed.h"
#include "pool.h"
#include "vector_math.h"

namespace {
namespace elementwise {

using numaserve::Range;
using numaserve::Team;
using simd::kLanes;
using simd::V;

// The scale 1 / sqrt(mean(x^2) + eps); lane by lane, then the lanes in one order.
inline float inverse_root_mean_square(const numaserve_array& x, int64_t at, int64_t columns, float eps) {
    V squares = simd::zero();
    for (int64_t c = 0; c < columns; c += kLanes) {
        const V v = simd::load_some(x.data, x.dtype, at + c, columns - c);
        squares = simd::fma(v, v, squares);
    }
    return 1.0F / std::sqrt(simd::sum(squares) / static_cast<float>(columns) + eps);
}

inline void rms_norm(const Team& team, const numaserve_rms_norm& op) {
    const Range rows = numaserve::share(op.rows, team.index, team.size);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const int64_t from = (op.row_index != nullptr ? op.row_index[r] : r) * op.x.stride;
        const V inverse = simd::splat(inverse_root_mean_square(op.x, from, op.columns, op.eps));
        for (int64_t c = 0; c < op.columns; c += kLanes) {
            const int64_t count = op.columns - c;
            const V weight = simd::add(simd::load_some(op.weight.data, op.weight.dtype, c, count), simd::splat(op.offset));
            V v = simd::mul(simd::mul(simd::load_some(op.x.data, op.x.dtype, from + c, count), inverse), weight);
            v = simd::mul(v, simd::splat(op.scale));
            if (op.residual.data != nullptr) {
                v = simd::add(simd::load_some(op.residual.data, op.residual.dtype, r * op.residual.stride + c, count), v);
            }
            simd::store_some(op.y.data, op.y.dtype, r * op.y.stride + c, count, v);
        }
    }
}

inline void load_head(const numaserve_rope& op, int64_t from, float* head) {
    for (int64_t d = 0; d < op.head_dim; d += kLanes) {
        const V v = simd::load_some(op.qkv.data, op.qkv.dtype, from + d, op.head_dim - d);
        simd::store_some(head, NUMASERVE_F32, d, op.head_dim - d, v);
    }
}

// One head of one row, from `from` in qkv, normed with `norm` (if any) and rotated.
inline void rotate_head(const numaserve_rope& op, const numaserve_array& norm, int64_t row, int64_t from, float* head) {
    const int64_t dim = op.head_dim;
    load_head(op, from, head);
    if (norm.data != nullptr) {
        const V inverse = simd::splat(inverse_root_mean_square(op.qkv, from, dim, op.eps));
        for (int64_t d = 0; d < dim; d += kLanes) {
            const V weight = simd::add(simd::load_some(norm.data, norm.dtype, d, dim - d), simd::splat(op.norm_offset));
            const V v = simd::load_some(head, NUMASERVE_F32, d, dim - d);
            simd::store_some(head, NUMASERVE_F32, d, dim - d, simd::mul(simd::mul(v, inverse), weight));
        }
    }
    if (op.cosine != nullptr) {
        const int64_t half = op.rotary_dim / 2;
        const int64_t position = op.positions != nullptr ? op.positions[row] : row;
        const float* cosine = op.cosine + position * half;
        const float* sine = op.sine + position * half;
        const int64_t second = op.interleaved != 0 ? 1 : half;
        const int64_t step = op.interleaved != 0 ? 2 : 1;
        for (int64_t i = 0; i < half; ++i) {
            float& a = head[i * step];
            float& b = head[i * step + second];
            const float x = a, y = b;
            a = x * cosine[i] - y * sine[i];
            b = y * cosine[i] + x * sine[i];
        }
    }
}

inline void rope(const Team& team, const numaserve_rope& op) {
    const Range rows = numaserve::share(op.rows, team.index, team.size);
    const cache::Layout layout{op.cache_dtype, op.block_size, op.kv_heads, op.head_dim};
    const int64_t dim = op.head_dim;
    float head[cache::Layout::kMostDim];
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const int64_t row = r * op.qkv.stride;
        for (int64_t h = 0; h < op.heads; ++h) {
            const int64_t at = r * op.query.stride + h * dim;
            rotate_head(op, op.query_norm, r, row + h * dim, head);
            for (int64_t d = 0; d < dim; d += kLanes) {
                const V v = simd::load_some(head, NUMASERVE_F32, d, dim - d);
                simd::store_some(op.query.data, op.query.dtype, at + d, dim - d, v);
            }
        }
        const int64_t slot = op.slots[r];
        for (int64_t h = 0; slot >= 0 && h < op.kv_heads; ++h) {
            const int64_t key = row + (op.heads + h) * dim;
            rotate_head(op, op.key_norm, r, key, head);
            layout.put_key(op.keys, slot, h, head);
            load_head(op, key + op.kv_heads * dim, head);
            layout.put_value(op.values, slot, h, head);
        }
    }
}

inline V activate(V x, int64_t kind) {
    const V one = simd::splat(1.0F), half = simd::splat(0.5F);
    switch (kind) {
        case NUMASERVE_GELU:
            return simd::mul(simd::mul(half, x), simd::add(one, simd::erf(simd::mul(x, simd::splat(0.70710678F)))));
        case NUMASERVE_GELU_TANH: {
            const V cubic = simd::mul(simd::mul(x, x), x);
            const V inner = simd::mul(simd::splat(0.79788456F), simd::fma(cubic, simd::splat(0.044715F), x));
            return simd::mul(simd::mul(half, x), simd::add(one, simd::tanh(inner)));
        }
        case NUMASERVE_RELU:
            return simd::maximum(simd::zero(), x);
        default:
            return simd::div(x, simd::add(one, simd::exp(simd::sub(simd::zero(), x))));
    }
}

// Rows are cut into spans of this many columns, so that one row alone still keeps all threads busy.
constexpr int64_t kSpan = 512;

template <class Function>
inline void for_each_span(const Team& team, int64_t rows, int64_t columns, Function function) {
    const int64_t spans = (columns + kSpan - 1) / kSpan;
    const Range mine = numaserve::share(rows * spans, team.index, team.size);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
        const int64_t begin = i % spans * kSpan;
        const int64_t end = begin + kSpan < columns ? begin + kSpan : columns;
        for (int64_t c = begin; c < end; c += kLanes) {
            function(i / spans, c, end - c);
        }
    }
}

inline void activation(const Team& team, const numaserve_activation& op) {
    for_each_span(team, op.rows, op.columns, [&](int64_t r, int64_t c, int64_t count) {
        const int64_t from = r * op.x.stride + c;
        V v = activate(simd::load_some(op.x.data, op.x.dtype, from, count), op.kind);
        if (op.gated != 0) {
            v = simd::mul(v, simd::load_some(op.x.data, op.x.dtype, from + op.columns, count));
        }
        simd::store_some(op.y.data, op.y.dtype, r * op.y.stride + c, count, v);
    });
}

inline void add(const Team& team, const numaserve_add& op) {
    for_each_span(team, op.rows, op.columns, [&](int64_t r, int64_t c, int64_t count) {
        const V x = simd::load_some(op.x.data, op.x.dtype, r * op.x.stride + c, count);
        const V residual = simd::load_some(op.residual.data, op.residual.dtype, r * op.residual.stride + c, count);
        const V v = simd::add(residual, simd::mul(x, simd::splat(op.scale)));
        simd::store_some(op.y.data, op.y.dtype, r * op.y.stride + c, count, v);
    });
}

inline void embedding(const Team& team, const numaserve_embedding& op) {
    const Range rows = numaserve::share(op.rows, team.index, team.size);
    const bool is_packed = op.weight.data != nullptr;
    const packed::Layout layout = is_packed ? packed::layout_of(op.weight) : packed::Layout{};
    const int64_t columns = op.weight.columns;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        for (int64_t c = 0; c < columns; c += kLanes) {
            const int64_t count = columns - c < kLanes ? columns - c : kLanes;
            float numbers[kLanes] = {};
            for (int64_t i = 0; is_packed && i < count; ++i) {
                numbers[i] = packed::weight_at(op.weight, layout, op.ids[r], c + i);
            }
            V v = is_packed ? simd::load(numbers)
                            : simd::load_some(op.table.data, op.table.dtype, op.ids[r] * op.table.stride + c, count);
            v = simd::mul(v, simd::splat(op.scale));
            simd::store_some(op.y.data, op.y.dtype, r * op.y.stride + c, count, v);
        }
    }
}

}  // namespace elementwise
}  // namespace
