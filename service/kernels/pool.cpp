#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "dispatch.h"
#include "numaserve_kernels.h"

namespace numaserve {
namespace {

// Long enough to bridge the gap between two calls of one step, short enough to leave an idle machine idle.
constexpr int64_t kSpinNanoseconds = 60'000;
constexpr size_t kAlignment = 4096;
constexpr int kMostThreads = 1024;

thread_local char last_error[512];

void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

// A counter that threads wait on: by spinning first, then asleep in the kernel.
class Signal {
   public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }

    void advance() {
        value_.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) != 0) {
            syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
        }
    }

    // Returns once the value is no longer `seen`.
    void wait(uint32_t seen) {
        const int64_t give_up = nanoseconds() + kSpinNanoseconds;
        do {
            for (int i = 0; i < 64; ++i) {
                if (value() != seen) {
                    return;
                }
                pause_briefly();
            }
        } while (nanoseconds() < give_up);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        while (value_.load(std::memory_order_seq_cst) == seen) {
            syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        }
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }

   private:
    alignas(64) std::atomic<uint32_t> value_{0};
    std::atomic<uint32_t> sleepers_{0};
};

struct Scratch {
    unsigned char* data = nullptr;
    size_t bytes = 0;

    bool grow(size_t wanted) {
        if (wanted <= bytes) {
            return true;
        }
        wanted = (wanted + kAlignment - 1) / kAlignment * kAlignment;
        free(data);
        data = static_cast<unsigned char*>(aligned_alloc(kAlignment, wanted));
        bytes = data == nullptr ? 0 : wanted;
        return data != nullptr;
    }
};

}  // namespace

void set_error(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
}

}  // namespace numaserve

using numaserve::Scratch;
using numaserve::Signal;

struct numaserve_pool {
    struct Member {
        numaserve_pool* pool;
        int index;
        pthread_t thread;
    };

    int size = 1;
    int pinned = 0;
    int caller_cpu = -1;
    pid_t process = 0;
    const numaserve::KernelTable* kernels = nullptr;
    Member* members = nullptr;
    numaserve::ShareLine* lines = nullptr;
    int started = 1;

    Signal start;
    Signal gathered;
    std::atomic<int> arrived{0};
    bool stopping = false;
    numaserve::TeamFunction function = nullptr;
    const void* argument = nullptr;
    Scratch shared;
    Scratch own;
    size_t own_stride = 0;

    numaserve::Team team(int index) {
        return {this, index, size, shared.data, own.data + own_stride * static_cast<size_t>(index), lines};
    }

    void gather() {
        if (size == 1) {
            return;
        }
        const uint32_t round = gathered.value();
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived.store(0, std::memory_order_relaxed);
            gathered.advance();
        } else {
            gathered.wait(round);
        }
    }

    void serve(int index) {
        uint32_t seen = 0;
        for (;;) {
            start.wait(seen);
            seen = start.value();
            if (stopping) {
                return;
            }
            function(team(index), argument);
            gather();
        }
    }
};

namespace numaserve {
namespace {

// A ShareLine's number: the round, then begin and end of what is left.
uint64_t pack(uint8_t round, Range range) {
    return static_cast<uint64_t>(round) << 56 | static_cast<uint64_t>(range.begin) << 28 | static_cast<uint64_t>(range.end);
}

Range unpack(uint64_t number) {
    return {static_cast<int64_t>(number >> 28 & Shares::kMostUnits), static_cast<int64_t>(number & Shares::kMostUnits)};
}

void* thread_main(void* argument) {
    auto* member = static_cast<numaserve_pool::Member*>(argument);
    member->pool->serve(member->index);
    return nullptr;
}

bool pin(pthread_t thread, int cpu) {
    const size_t bytes = CPU_ALLOC_SIZE(cpu + 1);
    cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(cpu) + 1);
    if (set == nullptr) {
        return false;
    }
    CPU_ZERO_S(bytes, set);
    CPU_SET_S(static_cast<size_t>(cpu), bytes, set);
    const int failed = pthread_setaffinity_np(thread, bytes, set);
    CPU_FREE(set);
    return failed == 0;
}

}  // namespace

void Team::barrier() const { pool->gather(); }

Range share(int64_t count, int index, int size) {
    const int64_t least = count / size;
    const int64_t more = count % size;
    const int64_t begin = index * least + (index < more ? index : more);
    return {begin, begin + least + (index < more ? 1 : 0)};
}

Shares::Shares(const Team& team, int64_t count) : team_(team), count_(count), round_(++team.lines[team.index].made) {}

bool Shares::take(int64_t most, Range& units) {
    for (int i = 0; i < team_.size; ++i) {
        if (take_from((team_.index + i) % team_.size, most, units)) {
            return true;
        }
    }
    return false;
}

bool Shares::take_from(int index, int64_t most, Range& units) {
    std::atomic<uint64_t>& line = team_.lines[index].left;
    uint64_t seen = line.load(std::memory_order_relaxed);
    for (;;) {
        // Whoever comes first begins a thread's part: its owner may not have come here yet.
        const bool is_begun = (seen >> 56) == round_;
        const Range left = is_begun ? unpack(seen) : share(count_, index, team_.size);
        if (left.begin >= left.end) {
            return false;
        }
        const int64_t taken = left.end - left.begin < most ? left.end - left.begin : most;
        const bool is_own = index == team_.index;
        units = is_own ? Range{left.begin, left.begin + taken} : Range{left.end - taken, left.end};
        const Range rest = is_own ? Range{units.end, left.end} : Range{left.begin, units.begin};
        if (line.compare_exchange_weak(seen, pack(round_, rest), std::memory_order_relaxed)) {
            return true;
        }
    }
}

const KernelTable& kernels_of(const numaserve_pool* pool) { return *pool->kernels; }

bool run_team(numaserve_pool* pool, TeamFunction function, const void* argument, size_t shared_bytes, size_t own_bytes) {
    if (pool->process != getpid()) {
        set_error("the thread pool was made by process %d and cannot be used after a fork", pool->process);
        return false;
    }
    const size_t stride = (own_bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (stride > pool->own_stride) {
        pool->own_stride = stride;
    }
    if (!pool->shared.grow(shared_bytes) || !pool->own.grow(pool->own_stride * static_cast<size_t>(pool->size))) {
        pool->own_stride = 0;
        set_error("no memory for %zu bytes of scratch", shared_bytes + stride * static_cast<size_t>(pool->size));
        return false;
    }
    pool->function = function;
    pool->argument = argument;
    if (pool->size > 1) {
        pool->start.advance();
    }
    function(pool->team(0), argument);
    pool->gather();
    return true;
}

}  // namespace numaserve

extern "C" {

const char* numaserve_last_error(void) { return numaserve::last_error; }

numaserve_pool* numaserve_pool_create(const int* cpus, int threads, const char* isa) {
    if (threads < 1 || threads > numaserve::kMostThreads) {
        numaserve::set_error("threads: must be 1 to %d, not %d", numaserve::kMostThreads, threads);
        return nullptr;
    }
    for (int i = 0; cpus != nullptr && i < threads; ++i) {
        if (cpus[i] < 0 || cpus[i] > 1 << 20) {
            numaserve::set_error("cpus: %d is no CPU number", cpus[i]);
            return nullptr;
        }
    }
    const numaserve::KernelTable* kernels = numaserve::select_kernels(isa);
    if (kernels == nullptr) {
        return nullptr;
    }
    auto* pool = new (std::nothrow) numaserve_pool;
    auto* members = new (std::nothrow) numaserve_pool::Member[static_cast<size_t>(threads)];
    auto* lines = new (std::nothrow) numaserve::ShareLine[static_cast<size_t>(threads)];
    if (pool == nullptr || members == nullptr || lines == nullptr) {
        delete pool;
        delete[] members;
        delete[] lines;
        numaserve::set_error("no memory for a thread pool");
        return nullptr;
    }
    pool->size = threads;
    pool->process = getpid();
    pool->kernels = kernels;
    pool->members = members;
    pool->lines = lines;
    pool->caller_cpu = cpus == nullptr ? -1 : cpus[0];
    for (int i = 1; i < threads; ++i) {
        members[i] = {pool, i, {}};
        const int failed = pthread_create(&members[i].thread, nullptr, numaserve::thread_main, &members[i]);
        if (failed != 0) {
            numaserve_pool_destroy(pool);
            numaserve::set_error("cannot start thread %d of %d: %s", i + 1, threads, strerror(failed));
            return nullptr;
        }
        ++pool->started;
        if (cpus != nullptr && numaserve::pin(members[i].thread, cpus[i])) {
            ++pool->pinned;
        }
    }
    return pool;
}

void numaserve_pool_destroy(numaserve_pool* pool) {
    if (pool == nullptr) {
        return;
    }
    if (pool->process == getpid()) {
        pool->stopping = true;
        pool->start.advance();
        for (int i = 1; i < pool->started; ++i) {
            pthread_join(pool->members[i].thread, nullptr);
        }
    }
    free(pool->shared.data);
    free(pool->own.data);
    delete[] pool->members;
    delete[] pool->lines;
    delete pool;
}

int numaserve_pool_threads(const numaserve_pool* pool) { return pool->size; }

int numaserve_pool_pinned(const numaserve_pool* pool) { return pool->pinned; }

int numaserve_pool_pin_caller(numaserve_pool* pool) {
    if (pool->caller_cpu < 0) {
        numaserve::set_error("the pool was made without CPUs");
        return -1;
    }
    if (!numaserve::pin(pthread_self(), pool->caller_cpu)) {
        numaserve::set_error("cannot pin the calling thread to CPU %d", pool->caller_cpu);
        return -1;
    }
    return 0;
}

const char* numaserve_pool_isa(const numaserve_pool* pool) { return pool->kernels->name; }

}  // extern "C"
