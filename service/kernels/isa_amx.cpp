#include "simd_avx512.h"
// The vectors come first: what follows is written in terms of them.
#include "matmul_amx.h"

namespace numaserve {

const KernelTable& amx_kernels() {
    static const KernelTable table = [] {
        KernelTable amx = avx512_kernels();
        amx.name = "amx";
        amx.matmul_scratch = matmul_amx::scratch;
        amx.matmul = matmul_amx::run;
        return amx;
    }();
    return table;
}

}  // namespace numaserve
