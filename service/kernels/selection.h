// Selection among numbers: the part of sampling that is scalar on every machine, compiled once and without vector flags.
#pragma once

#include <cstdint>

namespace numaserve {

// A token with its place in some order and its weight.
struct Ordered {
    uint64_t key;
    int64_t weight;
};

// The value that `place` others exceed or equal. Reorders the values, none of which may be NaN.
float largest_but(float* values, int64_t count, int64_t place);

// The key of the first entry, by rising key, with which the sum of weights reaches `wanted`; the last key where none does.
// Reorders the entries, of which there must be one. Takes linear time.
uint64_t key_reaching(Ordered* entries, int64_t count, int64_t wanted);

// Puts the `first` entries of least key in front, by rising key.
void sort_first(Ordered* entries, int64_t count, int64_t first);

}  // namespace numaserve
