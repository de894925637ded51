// What a machine can do at most: reading memory, and fused multiply-adds on fp32. For scripts/bench_cpu.
//
// Usage: machine_limits THREADS MEBIBYTES ROUNDS; prints bytes/s and operations/s of the best round of each.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
typedef float Floats __attribute__((vector_size(kBytes)));
typedef uint64_t Words __attribute__((vector_size(kBytes)));

constexpr int64_t kLanes = kBytes / 4;
constexpr int kChains = 12;
constexpr int64_t kSteps = 2'000'000;

// Consecutive lines of several streams at once, each fetched well ahead.
uint64_t read_all(const unsigned char* data, int64_t bytes) {
    constexpr int kStreams = 4;
    constexpr int64_t kAhead = 1024;
    Words sums[kStreams] = {};
    const int64_t part = bytes / kStreams / 64 * 64;
    for (int64_t at = 0; at < part; at += 64) {
        for (int s = 0; s < kStreams; ++s) {
            const unsigned char* line = data + s * part + at;
            __builtin_prefetch(line + kAhead);
            for (int64_t i = 0; i < 64; i += kBytes) {
                sums[s] ^= *reinterpret_cast<const Words*>(line + i);
            }
        }
    }
    uint64_t sum = 0;
    for (const Words& each : sums) {
        for (int i = 0; i < kBytes / 8; ++i) {
            sum ^= each[i];
        }
    }
    return sum;
}

// One variable for each chain: as an array they would be kept in memory.
#define CHAINS(EACH) EACH(0) EACH(1) EACH(2) EACH(3) EACH(4) EACH(5) EACH(6) EACH(7) EACH(8) EACH(9) EACH(10) EACH(11)

float multiply_and_add() {
    volatile float one = 1.0F, small = 1e-9F;
    const Floats a = Floats{} + one, b = Floats{} + small;
#define DECLARE(i) Floats sum##i = {};
    CHAINS(DECLARE)
    for (int64_t step = 0; step < kSteps; ++step) {
        // The empty statement keeps the loop from being folded.
#define ADD(i) sum##i = sum##i * a + b; asm volatile("" : "+x"(sum##i));
        CHAINS(ADD)
    }
    float sum = 0;
#define TAKE(i) sum += sum##i[0];
    CHAINS(TAKE)
    return sum;
}

template <class Function>
double seconds(int threads, Function function) {
    std::atomic<int> ready{0};
    std::vector<std::thread> team;
    std::chrono::steady_clock::time_point begin;
    std::atomic<bool> go{false};
    for (int t = 0; t < threads; ++t) {
        team.emplace_back([&, t] {
            ++ready;
            while (!go) {
            }
            function(t);
        });
    }
    while (ready < threads) {
    }
    begin = std::chrono::steady_clock::now();
    go = true;
    for (std::thread& each : team) {
        each.join();
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: machine_limits THREADS MEBIBYTES ROUNDS\n");
        return 2;
    }
    const int threads = atoi(argv[1]), rounds = atoi(argv[3]);
    const int64_t part = (int64_t{atoi(argv[2])} << 20) / threads / 4096 * 4096;
    auto* data = static_cast<unsigned char*>(aligned_alloc(4096, static_cast<size_t>(part * threads)));
    if (data == nullptr) {
        fprintf(stderr, "no memory for %s MiB\n", argv[2]);
        return 1;
    }
    memset(data, 1, static_cast<size_t>(part * threads));
    volatile uint64_t sink = 0;
    volatile float float_sink = 0;
    double bytes_rate = 0, work_rate = 0;
    for (int round = 0; round < rounds; ++round) {
        const double reading = seconds(threads, [&](int t) { sink = sink ^ read_all(data + t * part, part); });
        const double working = seconds(threads, [&](int) { float_sink = multiply_and_add(); });
        const double bytes = static_cast<double>(part) * threads / reading;
        const double work = 2.0 * kLanes * kChains * kSteps * threads / working;
        bytes_rate = bytes > bytes_rate ? bytes : bytes_rate;
        work_rate = work > work_rate ? work : work_rate;
    }
    printf("%.6g %.6g\n", bytes_rate, work_rate);
    free(data);
    return 0;
}
