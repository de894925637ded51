// A team of pinned threads that run one function together, with barriers inside it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

struct numaserve_pool;

namespace numaserve {

struct KernelTable;

// What a thread of a running team knows: which one it is, how many there are, and its memory.
struct Team {
    numaserve_pool* pool;
    int index;
    int size;
    unsigned char* shared;
    unsigned char* own;

    // Returns when all threads of the team have come here; what they wrote before is then visible to all.
    void barrier() const;
};

struct Range {
    int64_t begin;
    int64_t end;
};

// The part of [0, count) that belongs to one thread: contiguous, sizes differing by at most one.
Range share(int64_t count, int index, int size);

// Runs function(team, argument) on every thread of the pool, the caller being the first. False where memory ran out.
using TeamFunction = void (*)(const Team&, const void* argument);
bool run_team(numaserve_pool* pool, TeamFunction function, const void* argument, size_t shared_bytes, size_t own_bytes);

const KernelTable& kernels_of(const numaserve_pool* pool);

void set_error(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace numaserve
