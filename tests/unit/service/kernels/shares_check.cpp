// Shares units out in teams in which one thread does nothing before the others are done: each unit must be worked on once, and the
// others must not need that thread. Compiled with pool.cpp alone. Exits with 1 at the first thing that is wrong.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "dispatch.h"
#include "numaserve_kernels.h"
#include "pool.h"

namespace numaserve {

const KernelTable* select_kernels(const char*) {
    static const KernelTable none{};
    return &none;
}

}  // namespace numaserve

namespace {

using numaserve::Range;
using numaserve::Shares;
using numaserve::Team;

// More than the numbers that tell one round from another.
constexpr int kRounds = 600;

struct Job {
    std::vector<std::atomic<int>> taken;
    std::atomic<int64_t> total{0};
    int64_t count;
    int64_t most;
    int late;
    bool wrong = false;

    Job(int64_t count, int64_t most, int late) : taken(static_cast<size_t>(count)), count(count), most(most), late(late) {}
};

void work(const Team& team, const void* argument) {
    Job& job = *static_cast<Job*>(const_cast<void*>(argument));
    Shares shares(team, job.count);
    while (team.index == job.late && job.total < job.count) {
    }
    Range units{};
    while (shares.take(job.most, units)) {
        if (units.end - units.begin < 1 || units.end - units.begin > job.most || team.index == job.late) {
            job.wrong = true;
            return;
        }
        for (int64_t unit = units.begin; unit < units.end; ++unit) {
            ++job.taken[static_cast<size_t>(unit)];
            ++job.total;
        }
    }
}

void check(numaserve_pool* pool, int64_t count, int64_t most, int late) {
    Job job(count, most, late);
    bool right = numaserve::run_team(pool, work, &job, 0, 0) && !job.wrong;
    for (const std::atomic<int>& times : job.taken) {
        right = right && times == 1;
    }
    if (!right) {
        fprintf(stderr, "wrong: %lld units, %lld at once, thread %d late\n", static_cast<long long>(count), static_cast<long long>(most), late);
        exit(1);
    }
}

}  // namespace

int main() {
    for (int threads = 1; threads <= 4; ++threads) {
        numaserve_pool* pool = numaserve_pool_create(nullptr, threads, nullptr);
        for (int round = 0; round < kRounds; ++round) {
            check(pool, round % 97, 1 + round % 5, threads > 1 ? round % threads : -1);
        }
        numaserve_pool_destroy(pool);
    }
    puts("right");
    return 0;
}
