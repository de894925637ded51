// Picks a token from each row of logits: softmax, filters and draw, over integer weights. And what log probabilities are made of.
//
// A row is worked on by one thread alone, in chunks of neighbouring tokens, and nothing but its own numbers goes into the outcome.
// Weights are integers, so that their sums have no order; what is computed in fp32 is computed by single additions and products,
// which every instruction set rounds alike. A token that is dropped has weight 0 from then on.
#pragma once

#include <cfloat>
#include <cmath>

#include "dispatch.h"
#include "floats.h"
#include "selection.h"
#include "vector_math.h"

namespace {
namespace sampling {

using namespace simd;
using numaserve::Ordered;
using numaserve::ScratchSize;
using numaserve::Team;

constexpr int64_t kChunk = 256;
constexpr double kLog2E = 1.4426950408889634;
constexpr float kInfinity = __builtin_inff();
constexpr int kWeightBits = 30;
constexpr double kLargestWeight = 1 << kWeightBits;
// Powers of two below which a weight is surely 0.
constexpr float kLeastPower = -40.0F;
// More than rounding makes of a power, in powers of two.
constexpr double kMargin = 1e-3;
// The range of powers of two in which tokens are looked at one by one.
constexpr float kSlice = 0.125F;
constexpr float kPowerUnit = 1 << 20;
constexpr int64_t kFew = 1024;

__extension__ typedef unsigned __int128 Wide;

// Memory of one thread, used for one row after the other.
struct Memory {
    float* lane_largest;   // [chunks * kLanes]: of every kLanes-th token of a chunk
    float* chunk_largest;  // [chunks]
    int64_t* sums;         // [chunks]: of the weights
    int32_t* weights;      // [chunks * kChunk]; those of a chunk whose sum is 0 may hold anything
    float* tail;           // [kChunk]: the last chunk, filled up
    Ordered* entries;      // [chunks * kChunk]

    Memory(unsigned char* data, int64_t chunks) {
        const auto take = [&data](int64_t bytes) {
            unsigned char* taken = data;
            data += (bytes + 63) / 64 * 64;
            return taken;
        };
        lane_largest = reinterpret_cast<float*>(take(chunks * kLanes * 4));
        chunk_largest = reinterpret_cast<float*>(take(chunks * 4));
        sums = reinterpret_cast<int64_t*>(take(chunks * 8));
        weights = reinterpret_cast<int32_t*>(take(chunks * kChunk * 4));
        tail = reinterpret_cast<float*>(take(kChunk * 4));
        entries = reinterpret_cast<Ordered*>(take(0));
    }

    static int64_t bytes(int64_t chunks) {
        return chunks * (kLanes * 4 + 4 + 8 + kChunk * 4 + kChunk * static_cast<int64_t>(sizeof(Ordered))) + kChunk * 4 + 5 * 64;
    }
};

struct Row : Memory {
    const float* scores;
    int64_t columns;
    int64_t chunks;
    float largest = -kInfinity;
    int64_t first_largest = -1;
    float factor = 0.0F;

    Row(const Memory& memory, const float* row, int64_t width)
        : Memory(memory), scores(row), columns(width), chunks((width + kChunk - 1) / kChunk) {
        const int64_t last = (chunks - 1) * kChunk;
        for (int64_t i = 0; i < kChunk; ++i) {
            tail[i] = last + i < columns ? scores[last + i] : -kInfinity;
        }
    }

    const float* chunk(int64_t c) const { return c + 1 < chunks ? scores + c * kChunk : tail; }

    // Exponents of two of tokens' probabilities relative to the likeliest: (score - largest) * log2(e) / temperature.
    V powers(V score) const {
        return maximum(mul(sub(score, splat(largest)), splat(factor)), splat(kLeastPower));
    }
};

// Finds the largest scores; false where there is NaN or no finite one.
bool survey(Row& row) {
    Mask nan = unordered(zero(), zero());
    for (int64_t c = 0; c < row.chunks; ++c) {
        const float* p = row.chunk(c);
        V even = load(p), odd = load(p + kLanes);
        nan = either(nan, unordered(even, odd));
        for (int64_t i = 2 * kLanes; i < kChunk; i += 2 * kLanes) {
            const V a = load(p + i), b = load(p + i + kLanes);
            nan = either(nan, unordered(a, b));
            even = maximum(a, even);
            odd = maximum(b, odd);
        }
        even = maximum(even, odd);
        store(row.lane_largest + c * kLanes, even);
        row.chunk_largest[c] = largest(even);
        row.largest = row.chunk_largest[c] > row.largest ? row.chunk_largest[c] : row.largest;
    }
    if (bits(nan) != 0) {
        row.largest = __builtin_nanf("");
    }
    if (!(std::fabs(row.largest) <= FLT_MAX)) {
        return false;
    }
    int64_t c = 0;
    while (row.chunk_largest[c] != row.largest) {
        ++c;
    }
    int64_t i = 0;
    while (row.chunk(c)[i] != row.largest) {
        ++i;
    }
    row.first_largest = c * kChunk + i;
    // Of two zeros, the sign of the one that is named.
    row.largest = row.chunk(c)[i];
    return true;
}

// The score of the place-th likeliest token, counted from 1.
float likeliest(Row& row, int64_t place) {
    auto* numbers = reinterpret_cast<float*>(row.entries);
    float bound = -kInfinity;
    // `place` groups of tokens reach the bound, so at least as many tokens do. Larger groups are quicker to select among.
    int64_t vectors = row.chunks;
    if (place <= vectors * kLanes) {
        memcpy(numbers, row.lane_largest, static_cast<size_t>(vectors * kLanes * 4));
        while (vectors > 1 && vectors > place) {
            for (int64_t i = 0; i < vectors / 2; ++i) {
                store(numbers + i * kLanes, maximum(load(numbers + 2 * i * kLanes), load(numbers + (2 * i + 1) * kLanes)));
            }
            if (vectors % 2 != 0) {
                store(numbers + vectors / 2 * kLanes, load(numbers + (vectors - 1) * kLanes));
            }
            vectors = (vectors + 1) / 2;
        }
        bound = numaserve::largest_but(numbers, vectors * kLanes, place - 1);
    }
    int64_t count = 0;
    for (int64_t c = 0; c < row.chunks; ++c) {
        if (row.chunk_largest[c] < bound) {
            continue;
        }
        const float* p = row.chunk(c);
        const int64_t width = c + 1 < row.chunks ? kChunk : row.columns - c * kChunk;
        for (int64_t i = 0; i < width; i += kLanes) {
            uint32_t reached = ~bits(less(load(p + i), splat(bound))) & 0xffffU;
            if (width - i < kLanes) {
                reached &= (1U << (width - i)) - 1;
            }
            for (; reached != 0; reached &= reached - 1) {
                numbers[count++] = p[i + __builtin_ctz(reached)];
            }
        }
    }
    return numaserve::largest_but(numbers, count, place - 1);
}

// The weights of tokens from their powers of two. 2^f for |f| <= 1/2 is 1 + f * q(f), q fitted to the least relative error, 4e-9;
// with what rounding adds the error is below 1.1 units in the last place of fp32.
V weights_of(V powers) {
    // Adding it leaves a power's nearest whole number, raised by the bias of exponents and by kWeightBits, in the lowest bits.
    const V shifter = splat(0x1.8p23F + 127 + kWeightBits);
    const V shifted = add(powers, shifter);
    const V f = sub(powers, sub(shifted, shifter));
    V q = splat(0.00015196693F);
    q = add(mul(q, f), splat(0.0013391305F));
    q = add(mul(q, f), splat(0.009619002F));
    q = add(mul(q, f), splat(0.05550359F));
    q = add(mul(q, f), splat(0.24022643F));
    q = add(mul(q, f), splat(0.6931472F));
    const V power = add(mul(q, f), splat(1.0F));
    return add(mul(power, low_bits_as_exponent(shifted)), splat(0.5F));
}

// A power of two such that all tokens of smaller powers weigh less than `weight`.
double power_below(double weight) { return std::log2(std::fmax(weight - 0.5, 0.5) / kLargestWeight) - kMargin; }

// A score such that tokens of smaller ones have smaller powers of two.
float score_of(const Row& row, double power) {
    const double score = static_cast<double>(row.largest) + power / static_cast<double>(row.factor);
    return static_cast<float>(std::fmax(score, -static_cast<double>(FLT_MAX)));
}

int64_t sum_of(const int32_t* weights) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < kChunk; ++i) {
        sum += static_cast<uint32_t>(weights[i]);
    }
    return static_cast<int64_t>(sum);
}

int64_t total(const Row& row) {
    int64_t sum = 0;
    for (int64_t c = 0; c < row.chunks; ++c) {
        sum += row.sums[c];
    }
    return sum;
}

// Tokens from a score on, of those with just that score the ones before token `until`, whose weight is at least `least`.
struct Kept {
    float lowest = -kInfinity;
    int64_t until = INT64_MAX;
    int32_t least = 1;
};

void keep_in_chunk(const float* scores, int32_t* weights, int64_t first, const Kept& kept) {
    const float lowest = kept.lowest;
    const int32_t least = kept.least;
    if (first + kChunk <= kept.until) {
        for (int64_t i = 0; i < kChunk; ++i) {
            weights[i] = (scores[i] >= lowest) & (weights[i] >= least) ? weights[i] : 0;
        }
        return;
    }
    for (int64_t i = 0; i < kChunk; ++i) {
        weights[i] = (scores[i] > lowest) | ((scores[i] == lowest) & (first + i < kept.until)) ? weights[i] : 0;
        weights[i] = weights[i] >= least ? weights[i] : 0;
    }
}

// Weighs all tokens, and drops those that are not kept.
void weigh(Row& row, const Kept& kept) {
    const float weightless = score_of(row, power_below(kept.least)), skipped = kept.lowest > weightless ? kept.lowest : weightless;
    const bool all = kept.lowest == -kInfinity && kept.least <= 1;
    for (int64_t c = 0; c < row.chunks; ++c) {
        row.sums[c] = 0;
        if (row.chunk_largest[c] < skipped) {
            continue;
        }
        const float* p = row.chunk(c);
        int32_t* weights = row.weights + c * kChunk;
        for (int64_t i = 0; i < kChunk; i += kLanes) {
            store_truncated(weights + i, weights_of(row.powers(load(p + i))));
        }
        if (!all) {
            keep_in_chunk(p, weights, c * kChunk, kept);
        }
        row.sums[c] = sum_of(weights);
    }
}

// Drops tokens that are not kept from those that are left.
void narrow(Row& row, const Kept& kept) {
    for (int64_t c = 0; c < row.chunks; ++c) {
        if (row.chunk_largest[c] < kept.lowest) {
            row.sums[c] = 0;
        } else if (row.sums[c] != 0) {
            keep_in_chunk(row.chunk(c), row.weights + c * kChunk, c * kChunk, kept);
            row.sums[c] = sum_of(row.weights + c * kChunk);
        }
    }
}

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
        const int64_t earlier = token - c * kChunk;
        int32_t higher = 0, equal = 0;
        for (int64_t i = 0; i < kChunk; ++i) {
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
