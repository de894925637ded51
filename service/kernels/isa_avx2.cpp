#include "simd_avx2.h"
// The vectors come first: what follows is written in terms of them.
#include "kernel_table.h"

namespace numaserve {

const KernelTable& avx2_kernels() {
    static constexpr KernelTable table = make_table("avx2");
    return table;
}

}  // namespace numaserve
