#include "simd_generic.h"
// The vectors come first: what follows is written in terms of them.
#include "kernel_table.h"

namespace numaserve {

const KernelTable& generic_kernels() {
    static constexpr KernelTable table = make_table("generic");
    return table;
}

}  // namespace numaserve
