// The kernels of each instruction set behind one table, and the choice among them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "numaserve_kernels.h"
#include "pool.h"

namespace numaserve {

// Bytes of scratch that an operation needs: one piece for the team and one for each thread.
struct ScratchSize {
    size_t shared;
    size_t own;
};

struct KernelTable {
    const char* name;
    ScratchSize (*matmul_scratch)(const numaserve_matmul&);
    ScratchSize (*attention_scratch)(const numaserve_attention&, int threads);
    void (*matmul)(const Team&, const numaserve_matmul&);
    void (*attention)(const Team&, const numaserve_attention&);
    void (*rms_norm)(const Team&, const numaserve_rms_norm&);
    void (*rope)(const Team&, const numaserve_rope&);
    void (*activation)(const Team&, const numaserve_activation&);
    void (*add)(const Team&, const numaserve_add&);
    void (*embedding)(const Team&, const numaserve_embedding&);
    ScratchSize (*sampling_scratch)(int64_t columns);
    void (*sample)(const Team&, const numaserve_sample&);
    void (*ranking)(const Team&, const numaserve_ranking&);
};

// The kernels of one instruction set, null isa: the best that this machine runs. Null, with the error set, where there are none.
const KernelTable* select_kernels(const char* isa);

// Defined by one source file each, compiled with the flags of its instruction set.
const KernelTable& generic_kernels();
const KernelTable& avx2_kernels();
const KernelTable& avx512_kernels();
const KernelTable& amx_kernels();

}  // namespace numaserve
