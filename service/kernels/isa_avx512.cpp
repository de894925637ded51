#include "simd_avx512.h"
// The vectors come first: what follows is written in terms of them.
#include "kernel_table.h"

namespace numaserve {

const KernelTable& avx512_kernels() {
    static constexpr KernelTable table = make_table("avx512");
    return table;
}

}  // namespace numaserve
