// A row of logits and the integer weights of its tokens: what sampling and log probabilities are made of.
//
// A row is worked on by one thread alone, in chunks of neighbouring tokens, and nothing but its own numbers goes into the outcome.
// Weights are integers, so that their sums have no order; what is computed in fp32 is computed by single additions and products,
// which every instruction set rounds alike. A token that is dropped has weight 0 from then on.
#pragma once

#include <cfloat>
#include <cmath>

#include "floats.h"
#include "selection.h"
#include "vector_math.h"

namespace {
namespace sampling {

using namespace simd;
using numaserve::Ordered;

constexpr int64_t kChunk = 256;
constexpr float kInfinity = __builtin_inff();
constexpr int kWeightBits = 30;
constexpr double kLargestWeight = 1 << kWeightBits;
// Powers of two below which a weight is surely 0.
constexpr float kLeastPower = -40.0F;
// More than rounding makes of a power, in powers of two.
constexpr double kMargin = 1e-3;

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

// So many scores ahead are fetched from memory while a row is read for the first time, in the row or beyond it, where the next one
// lies as a rule. The hardware's own fetching starts anew with each page.
constexpr int64_t kFetchedAhead = 2048;

void fetch_ahead(const float* scores) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(scores) + kFetchedAhead * sizeof *scores;
    for (uintptr_t line = 0; line < kChunk * sizeof *scores; line += 64) {
        prefetch(reinterpret_cast<const void*>(at + line));
    }
}

// Finds the largest scores; false where there is NaN or no finite one.
bool survey(Row& row) {
    Mask nan = unordered(zero(), zero());
    for (int64_t c = 0; c < row.chunks; ++c) {
        fetch_ahead(row.scores + c * kChunk);
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
    const auto until = static_cast<int32_t>(kept.until > first ? kept.until - first : 0);
    for (int32_t i = 0; i < kChunk; ++i) {
        weights[i] = (scores[i] > lowest) | ((scores[i] == lowest) & (i < until)) ? weights[i] : 0;
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

}  // namespace sampling
}  // namespace
