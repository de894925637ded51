#include "dispatch.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace numaserve {
namespace {

#if defined(__x86_64__)

struct Registers {
    unsigned eax, ebx, ecx, edx;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
    Registers r{};
    __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
    return r;
}

bool bit(unsigned value, unsigned index) { return (value >> index & 1U) != 0; }

// The register state that the operating system saves (XCR0, Intel SDM volume 1, chapter 13).
bool system_saves(uint64_t state) {
    if (!bit(cpuid(1, 0).ecx, 27)) {
        return false;
    }
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((static_cast<uint64_t>(high) << 32 | low) & state) == state;
}

constexpr uint64_t kAvxState = 0x6;
constexpr uint64_t kAvx512State = 0xe6;
constexpr uint64_t kTileState = 0x60000;

bool has_avx2() {
    const Registers one = cpuid(1, 0);
    const bool fma = bit(one.ecx, 12), avx = bit(one.ecx, 28), f16c = bit(one.ecx, 29);
    return fma && avx && f16c && bit(cpuid(7, 0).ebx, 5) && system_saves(kAvxState);
}

bool has_avx512() {
    const unsigned ebx = cpuid(7, 0).ebx;
    const bool f = bit(ebx, 16), dq = bit(ebx, 17), bw = bit(ebx, 30), vl = bit(ebx, 31);
    return has_avx2() && f && dq && bw && vl && system_saves(kAvx512State);
}

// Linux hands out tile registers on request alone (Documentation/arch/x86/xstate.rst).
bool has_amx() {
    constexpr long kRequestPermission = 0x1023;
    constexpr long kTileData = 18;
    const unsigned edx = cpuid(7, 0).edx;
    const bool bf16 = bit(edx, 22), tile = bit(edx, 24);
    return has_avx512() && bf16 && tile && system_saves(kTileState) &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#endif

bool always() { return true; }

struct Candidate {
    const char* name;
    bool (*supported)();
    const KernelTable& (*kernels)();
};

// Best first.
const Candidate candidates[] = {
#if defined(NUMASERVE_WITH_AMX)
    {"amx", has_amx, amx_kernels},
#endif
#if defined(NUMASERVE_WITH_AVX512)
    {"avx512", has_avx512, avx512_kernels},
#endif
#if defined(NUMASERVE_WITH_AVX2)
    {"avx2", has_avx2, avx2_kernels},
#endif
    {"generic", always, generic_kernels},
};

}  // namespace

const KernelTable* select_kernels(const char* isa) {
    for (const Candidate& candidate : candidates) {
        if (isa == nullptr ? candidate.supported() : strcmp(isa, candidate.name) == 0) {
            if (!candidate.supported()) {
                set_error("this machine has no %s", isa);
                return nullptr;
            }
            return &candidate.kernels();
        }
    }
    set_error("no kernels were built for instruction set %s", isa);
    return nullptr;
}

}  // namespace numaserve

extern "C" {

int numaserve_abi(void) { return NUMASERVE_KERNELS_ABI; }

int numaserve_isa_supported(const char* isa) { return isa != nullptr && numaserve::select_kernels(isa) != nullptr; }

}  // extern "C"
