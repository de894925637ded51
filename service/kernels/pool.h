// A team of pinned threads that run one function together, with barriers inside it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

struct numaserve_pool;

namespace numaserve {

struct KernelTable;

// What is left of a thread's part of a Shares, and how many of them it has made.
struct alignas(64) ShareLine {
    std::atomic<uint64_t> left{0};
    uint8_t made = 0;
};

// What a thread of a running team knows: which one it is, how many there are, and its memory.
struct Team {
    numaserve_pool* pool;
    int index;
    int size;
    unsigned char* shared;
    unsigned char* own;
    ShareLine* lines;  // of each thread, for Shares

    // Returns when all threads of the team have come here; what they wrote before is then visible to all.
    void barrier() const;
};

struct Range {
    int64_t begin;
    int64_t end;
};

// The part of [0, count) that belongs to one thread: contiguous, sizes differing by at most one.
Range share(int64_t count, int index, int size);

// Units [0, count), at most kMostUnits, that a team shares out while it works on them: each thread takes from the front of its own
// `share`, and then from the ends of the others', so that one that is slowed down holds nobody up. All threads of the team have to
// make it for the same count, and to meet before they make the next one.
class Shares {
   public:
    static constexpr int64_t kMostUnits = (int64_t{1} << 28) - 1;

    Shares(const Team& team, int64_t count);

    // Takes up to `most` units that lie together; false once none are left.
    bool take(int64_t most, Range& units);

   private:
    bool take_from(int index, int64_t most, Range& units);

    const Team& team_;
    int64_t count_;
    uint8_t round_;
};

// Runs function(team, argument) on every thread of the pool, the caller being the first. False where memory ran out.
using TeamFunction = void (*)(const Team&, const void* argument);
bool run_team(numaserve_pool* pool, TeamFunction function, const void* argument, size_t shared_bytes, size_t own_bytes);

const KernelTable& kernels_of(const numaserve_pool* pool);

void set_error(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace numaserve
