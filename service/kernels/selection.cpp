#include "selection.h"

#include <algorithm>
#include <cstring>
#include <functional>

namespace numaserve {
namespace {

constexpr int kDigitBits = 11;
constexpr uint32_t kDigits = 1U << kDigitBits;
// Fewer than these are not worth a count of their digits.
constexpr int64_t kFew = 256;

// Integers that fall with the values.
uint32_t falling(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bits >> 31) != 0 ? bits : ~bits & 0x7fffffffU;
}

bool before(const Ordered& a, const Ordered& b) { return a.key < b.key; }

}  // namespace

float largest_but(float* values, int64_t count, int64_t place) {
    // By digits, the first first: comparisons that nobody can predict are many times as slow.
    for (int shift = 32 - kDigitBits; count > kFew && shift >= 0; shift = shift == 0 ? -1 : std::max(shift - kDigitBits, 0)) {
        uint32_t counts[kDigits] = {};
        for (int64_t i = 0; i < count; ++i) {
            ++counts[falling(values[i]) >> shift & (kDigits - 1)];
        }
        uint32_t digit = 0;
        while (place >= counts[digit]) {
            place -= counts[digit++];
        }
        int64_t left = 0;
        for (int64_t i = 0; i < count; ++i) {
            const float value = values[i];
            values[left] = value;
            left += (falling(value) >> shift & (kDigits - 1)) == digit;
        }
        count = left;
    }
    std::nth_element(values, values + place, values + count, std::greater<float>());
    return values[place];
}

uint64_t key_reaching(Ordered* entries, int64_t count, int64_t wanted) {
    while (count > 1) {
        const int64_t half = count / 2;
        std::nth_element(entries, entries + half, entries + count, before);
        int64_t sum = 0;
        for (int64_t i = 0; i < half; ++i) {
            sum += entries[i].weight;
        }
        if (sum >= wanted) {
            count = half;
        } else {
            wanted -= sum;
            entries += half;
            count -= half;
        }
    }
    return entries->key;
}

void sort_first(Ordered* entries, int64_t count, int64_t first) {
    std::partial_sort(entries, entries + first, entries + count, before);
}

}  // namespace numaserve
