// Where top_p and typical_p end: the token with which those before it, in some order, reach a share of the weights.
#pragma once

#include "weighed_row.h"

namespace {
namespace sampling {

// So many tokens are put in order as they are; of more, those in a small range of powers of two.
constexpr int64_t kFew = 1024;
constexpr float kSlice = 0.125F;

// The orders that top_p and typical_p go by: distances and keys rise with them, and keys tell apart tokens of one distance.
struct ByScore {
    const Row& row;
    float from = 0.0F;

    V distances(V score) const { return sub(zero(), row.powers(score)); }
    void distances(const float* scores, float* results) const {
        for (int64_t i = 0; i < kChunk; i += kLanes) {
            store(results + i, distances(load(scores + i)));
        }
    }
    // A falling score, of zeros whatever their sign, then a rising token.
    uint64_t key(int64_t token) const {
        const uint32_t falling = ~(rising(float_to_bits(row.scores[token] + 0.0F)) ^ 0x80000000U);
        return static_cast<uint64_t>(falling) << 32 | static_cast<uint64_t>(token);
    }
    static float score(uint64_t key) { return bits_to_float(rising(~static_cast<uint32_t>(key >> 32) ^ 0x80000000U)); }
    static int64_t token(uint64_t key) { return static_cast<int64_t>(key & 0xffffffffU); }

    // Integers, signed, in the order of scores; from these the same function leads back.
    static uint32_t rising(uint32_t bits) {
        return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) & 0x7fffffffU);
    }
};

struct ByDistance {
    const Row& row;
    float from;

    V distances(V score) const { return magnitude(sub(row.powers(score), splat(from))); }
    void distances(const float* scores, float* results) const {
        for (int64_t i = 0; i < kChunk; i += kLanes) {
            store(results + i, distances(load(scores + i)));
        }
    }
    uint64_t key(int64_t token) const {
        // The same operations as on vectors, so that both come out alike.
        float power = (row.scores[token] - row.largest) * row.factor;
        power = power > kLeastPower ? power : kLeastPower;
        return float_to_bits(std::fabs(power - from));
    }
};

// Calls visit(first token of kLanes, their scores, bits of those that reach `lowest`) where there are such, in chunks of which
// something is left.
template <class Visit>
void visit_from(const Row& row, float lowest, Visit visit) {
    for (int64_t c = 0; c < row.chunks; ++c) {
        if (row.sums[c] == 0 || row.chunk_largest[c] < lowest) {
            continue;
        }
        const float* p = row.chunk(c);
        for (int64_t i = 0; i < kChunk; i += kLanes) {
            const V score = load(p + i);
            const uint32_t reached = ~bits(less(score, splat(lowest))) & 0xffffU;
            if (reached != 0) {
                visit(c * kChunk + i, score, reached);
            }
        }
    }
}

// The key of the token, by rising key, with which the sum of weights reaches `wanted`, looking at scores from `lowest` on; false
// where it is not reached or these are more than a few.
template <class Order>
bool border_among_few(const Row& row, const Order& order, float lowest, int64_t wanted, uint64_t& key) {
    int64_t count = 0, sum = 0;
    visit_from(row, lowest, [&](int64_t first, V, uint32_t lanes) {
        for (; lanes != 0 && count <= kFew; lanes &= lanes - 1) {
            const int64_t token = first + __builtin_ctz(lanes);
            if (row.weights[token] != 0) {
                row.entries[count++] = {order.key(token), row.weights[token]};
                sum += row.weights[token];
            }
        }
    });
    if (count > kFew || sum < wanted) {
        return false;
    }
    key = numaserve::key_reaching(row.entries, count, wanted);
    return true;
}

// The sum of the weights of tokens up to a distance.
template <class Order>
int64_t weight_within(const Row& row, const Order& order, float lowest, float farthest) {
    uint64_t sum = 0;
    for (int64_t c = 0; c < row.chunks; ++c) {
        if (row.sums[c] == 0 || row.chunk_largest[c] < lowest) {
            continue;
        }
        const auto* weights = reinterpret_cast<const uint32_t*>(row.weights + c * kChunk);
        float distances[kChunk];
        order.distances(row.chunk(c), distances);
        for (int64_t i = 0; i < kChunk; ++i) {
            sum += distances[i] <= farthest ? weights[i] : 0;
        }
    }
    return static_cast<int64_t>(sum);
}

// The same among many, where it is reached before distance `far`: by halving distances until few tokens are left as a rule.
template <class Order>
uint64_t border_among_many(const Row& row, const Order& order, float lowest, float far, int64_t wanted) {
    float near = -1.0F;
    int64_t before = 0;
    while (far - near > kSlice) {
        const float middle = 0.5F * (near + far);
        const int64_t within = weight_within(row, order, lowest, middle);
        if (within >= wanted) {
            far = middle;
        } else {
            near = middle;
            before = within;
        }
    }
    int64_t count = 0;
    visit_from(row, lowest, [&](int64_t first, V score, uint32_t lanes) {
        const V distances = order.distances(score);
        for (lanes &= bits(less(splat(near), distances)) & ~bits(less(splat(far), distances)); lanes != 0; lanes &= lanes - 1) {
            const int64_t token = first + __builtin_ctz(lanes);
            if (row.weights[token] != 0) {
                row.entries[count++] = {order.key(token), row.weights[token]};
            }
        }
    });
    return numaserve::key_reaching(row.entries, count, wanted - before);
}

// The border of those tokens, nearest first, that reach a share of the sum of weights. Below the power of two `falling` a token
// is the farther the smaller its power is.
template <class Order>
uint64_t border(const Row& row, const Order& order, double share, double falling) {
    const auto sum = static_cast<double>(total(row)), spare = (1 - share) * sum;
    const auto wanted = static_cast<int64_t>(std::fmax(1.0, std::ceil(share * sum)));
    // Few tokens are enough as a rule.
    uint64_t key;
    const double few = std::fmin(power_below(spare / static_cast<double>(kFew)), falling);
    if (border_among_few(row, order, score_of(row, few), wanted, key)) {
        return key;
    }
    // All below this one together weigh less than may be left out.
    const double enough = std::fmin(power_below(spare / static_cast<double>(row.columns)), falling);
    const auto far = static_cast<float>(static_cast<double>(order.from) - enough);
    return border_among_many(row, order, score_of(row, enough), far, wanted);
}

}  // namespace sampling
}  // namespace
