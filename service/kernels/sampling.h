// Picks a token from each row of logits: softmax, filters and draw, over integer weights. And what log probabilities are made of.
#pragma once

#include "dispatch.h"
#include "sampling_border.h"

namespace {
namespace sampling {

using numaserve::ScratchSize;
using numaserve::Team;

constexpr double kLog2E = 1.4426950408889634;
constexpr float kPowerUnit = 1 << 20;

__extension__ typedef unsigned __int128 Wide;

// What top_p keeps of the tokens that are left: the fewest likeliest ones that reach the share.
Kept likeliest_share(const Row& row, double share, int32_t least) {
    const uint64_t key = border(row, ByScore{row}, share, 0.0);
    return {ByScore::score(key), ByScore::token(key) + 1, least};
}

// What is to be expected of -log2(probability / the likeliest one's), over the tokens that are left.
double expected_surprise(const Row& row) {
    Wide sum = 0;
    for (int64_t c = 0; c < row.chunks; ++c) {
        if (row.sums[c] == 0) {
            continue;
        }
        const float* p = row.chunk(c);
        const int32_t* weights = row.weights + c * kChunk;
        int32_t units[kChunk];
        for (int64_t i = 0; i < kChunk; i += kLanes) {
            store_truncated(units + i, mul(row.powers(load(p + i)), splat(-kPowerUnit)));
        }
        uint64_t in_chunk = 0;
        for (int64_t i = 0; i < kChunk; ++i) {
            in_chunk += static_cast<uint64_t>(static_cast<uint32_t>(units[i])) * static_cast<uint32_t>(weights[i]);
        }
        sum += in_chunk;
    }
    return static_cast<double>(sum) / static_cast<double>(total(row)) / static_cast<double>(kPowerUnit);
}

// Drops what typical_p does not keep: of tokens by distance of their surprise from the expected one the fewest that reach the
// share, and all that are as near as the last. Meister et al. 2022 (arXiv:2202.00666).
void keep_typical(Row& row, double share) {
    const double expected = expected_surprise(row);
    const ByDistance order{row, -static_cast<float>(expected)};
    // As far below the expected power as the likeliest token's is above it: from there on distances fall with powers.
    const float farthest = bits_to_float(static_cast<uint32_t>(border(row, order, share, -2 * expected - kMargin)));
    const float lowest = score_of(row, static_cast<double>(order.from) - static_cast<double>(farthest) - kMargin);
    for (int64_t c = 0; c < row.chunks; ++c) {
        if (row.chunk_largest[c] < lowest) {
            row.sums[c] = 0;
        }
        if (row.sums[c] == 0) {
            continue;
        }
        int32_t* weights = row.weights + c * kChunk;
        float distances[kChunk];
        order.distances(row.chunk(c), distances);
        for (int64_t i = 0; i < kChunk; ++i) {
            weights[i] = distances[i] <= farthest ? weights[i] : 0;
        }
        row.sums[c] = sum_of(weights);
    }
}

// The token at uniform / 2^64 of the sum of weights, by rising token.
int64_t draw(const Row& row, uint64_t uniform) {
    auto point = static_cast<int64_t>(static_cast<Wide>(uniform) * static_cast<Wide>(total(row)) >> 64);
    int64_t c = 0;
    while (point >= row.sums[c]) {
        point -= row.sums[c++];
    }
    int64_t token = c * kChunk;
    while (point >= row.weights[token]) {
        point -= row.weights[token++];
    }
    return token;
}

// Makes one token the only one that is left.
void choose(Row& row, int64_t token) {
    memset(row.sums, 0, static_cast<size_t>(row.chunks) * sizeof *row.sums);
    const int64_t c = token / kChunk;
    memset(row.weights + c * kChunk, 0, kChunk * sizeof *row.weights);
    row.weights[token] = 1 << kWeightBits;
    row.sums[c] = row.weights[token];
}

void show_weights(const Row& row, bool usable, int32_t* weights) {
    for (int64_t c = 0; c < row.chunks; ++c) {
        const int64_t width = c + 1 < row.chunks ? kChunk : row.columns - c * kChunk;
        const auto bytes = static_cast<size_t>(width) * sizeof *weights;
        if (usable && row.sums[c] != 0) {
            memcpy(weights + c * kChunk, row.weights + c * kChunk, bytes);
        } else {
            memset(weights + c * kChunk, 0, bytes);
        }
    }
}

int64_t pick(Row& row, const numaserve_choice& choice) {
    if (choice.temperature == 0) {
        choose(row, row.first_largest);
        return row.first_largest;
    }
    // Finite, so that the largest score has power 0 in any case.
    row.factor = static_cast<float>(std::fmin(kLog2E / choice.temperature, static_cast<double>(FLT_MAX)));
    Kept kept;
    if (choice.top_k > 0 && choice.top_k < row.columns) {
        kept.lowest = likeliest(row, choice.top_k);
    }
    const auto least = static_cast<int32_t>(std::fmax(1.0, std::ceil(choice.min_p * kLargestWeight)));
    if (choice.top_p < 1) {
        weigh(row, kept);
        narrow(row, likeliest_share(row, choice.top_p, least));
    } else {
        kept.least = least;
        weigh(row, kept);
    }
    if (choice.typical_p < 1) {
        keep_typical(row, choice.typical_p);
    }
    return draw(row, choice.uniform);
}

// The rank of a token, from 1 on.
int64_t rank_of(const Row& row, int64_t token) {
    const float score = row.scores[token];
    int64_t before = 0;
    for (int64_t c = 0; c < row.chunks; ++c) {
        if (row.chunk_largest[c] < score) {
            continue;
        }
        const float* p = row.chunk(c);
        // Where equals rank before the token: in none, some or all places of the chunk.
        const int64_t place = token - c * kChunk;
        const auto earlier = static_cast<int32_t>(place < 0 ? 0 : place > kChunk ? kChunk : place);
        int32_t higher = 0, equal = 0;
        for (int32_t i = 0; i < kChunk; ++i) {
            higher += p[i] > score;
            equal += (p[i] == score) & (i < earlier);
        }
        before += higher + equal;
    }
    return before + 1;
}

// The `count` likeliest tokens in the order of their ranks.
void rank(Row& row, int64_t count, int64_t* tokens) {
    const float lowest = likeliest(row, count);
    const ByScore order{row};
    int64_t reached = 0;
    for (int64_t token = 0; token < row.columns; ++token) {
        if (token % kChunk == 0 && row.chunk_largest[token / kChunk] < lowest) {
            token += kChunk - 1;
        } else if (row.scores[token] >= lowest) {
            row.entries[reached++] = {order.key(token), 0};
        }
    }
    numaserve::sort_first(row.entries, reached, count);
    for (int64_t i = 0; i < count; ++i) {
        tokens[i] = ByScore::token(row.entries[i].key);
    }
}

int64_t chunks_of(int64_t columns) { return (columns + kChunk - 1) / kChunk; }

ScratchSize scratch(int64_t columns) { return {0, static_cast<size_t>(Memory::bytes(chunks_of(columns)))}; }

// Calls work(row, its number) for the rows of this thread. Neighbours tend to be alike, so that every team-size-th row is a fair
// share.
template <class Work>
void each_row(const Team& team, const numaserve_array& logits, int64_t rows, int64_t columns, Work work) {
    const Memory memory(team.own, chunks_of(columns));
    for (int64_t r = team.index; r < rows; r += team.size) {
        Row row(memory, static_cast<const float*>(logits.data) + r * logits.stride, columns);
        work(row, r);
    }
}

void sample(const Team& team, const numaserve_sample& op) {
    each_row(team, op.logits, op.rows, op.columns, [&](Row& row, int64_t r) {
        const bool usable = survey(row);
        op.tokens[r] = usable ? pick(row, op.choices[r]) : -1;
        op.largest[r] = row.largest;
        if (op.weights != nullptr) {
            show_weights(row, usable, op.weights + r * op.columns);
        }
    });
}

void ranking(const Team& team, const numaserve_ranking& op) {
    each_row(team, op.logits, op.rows, op.columns, [&](Row& row, int64_t r) {
        const bool usable = survey(row);
        const int64_t count = !usable ? 0 : op.top[r] < op.columns ? op.top[r] : op.columns;
        op.largest[r] = row.largest;
        op.sums[r] = op.ranks[r] = 0;
        if (usable) {
            row.factor = static_cast<float>(kLog2E);
            weigh(row, {});
            op.sums[r] = total(row);
            op.ranks[r] = rank_of(row, op.tokens[r]);
        }
        if (count > 0) {
            rank(row, count, op.likeliest + r * op.most);
        }
        for (int64_t i = count; i < op.most; ++i) {
            op.likeliest[r * op.most + i] = -1;
        }
    });
}

}  // namespace sampling
}  // namespace
