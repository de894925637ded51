// Runs lists of operations on a pool.
#include <cstdio>
#include <cstring>

#include "checks.h"
#include "dispatch.h"
#include "numaserve_kernels.h"
#include "pool.h"

namespace numaserve {
namespace {

struct Program {
    const numaserve_operation* operations;
    int64_t count;
};

void run_operation(const Team& team, const KernelTable& kernels, const numaserve_operation& operation) {
    const void* arguments = operation.arguments;
    switch (operation.kind) {
        case NUMASERVE_MATMUL:
            return kernels.matmul(team, *static_cast<const numaserve_matmul*>(arguments));
        case NUMASERVE_RMS_NORM:
            return kernels.rms_norm(team, *static_cast<const numaserve_rms_norm*>(arguments));
        case NUMASERVE_ROPE:
            return kernels.rope(team, *static_cast<const numaserve_rope*>(arguments));
        case NUMASERVE_ATTENTION:
            return kernels.attention(team, *static_cast<const numaserve_attention*>(arguments));
        case NUMASERVE_ACTIVATION:
            return kernels.activation(team, *static_cast<const numaserve_activation*>(arguments));
        case NUMASERVE_ADD:
            return kernels.add(team, *static_cast<const numaserve_add*>(arguments));
        case NUMASERVE_SAMPLE:
            return kernels.sample(team, *static_cast<const numaserve_sample*>(arguments));
        case NUMASERVE_RANKING:
            return kernels.ranking(team, *static_cast<const numaserve_ranking*>(arguments));
        default:
            return kernels.embedding(team, *static_cast<const numaserve_embedding*>(arguments));
    }
}

void run_program(const Team& team, const void* argument) {
    const auto& program = *static_cast<const Program*>(argument);
    const KernelTable& kernels = kernels_of(team.pool);
    for (int64_t i = 0; i < program.count; ++i) {
        if (i > 0) {
            team.barrier();
        }
        run_operation(team, kernels, program.operations[i]);
    }
}

ScratchSize scratch_of(const KernelTable& kernels, const numaserve_operation& operation, int threads) {
    switch (operation.kind) {
        case NUMASERVE_MATMUL:
            return kernels.matmul_scratch(*static_cast<const numaserve_matmul*>(operation.arguments));
        case NUMASERVE_ATTENTION:
            return kernels.attention_scratch(*static_cast<const numaserve_attention*>(operation.arguments), threads);
        case NUMASERVE_SAMPLE:
            return kernels.sampling_scratch(static_cast<const numaserve_sample*>(operation.arguments)->columns);
        case NUMASERVE_RANKING:
            return kernels.sampling_scratch(static_cast<const numaserve_ranking*>(operation.arguments)->columns);
        default:
            return {0, 0};
    }
}

}  // namespace
}  // namespace numaserve

extern "C" int numaserve_run(numaserve_pool* pool, const numaserve_operation* operations, int64_t count) {
    using namespace numaserve;
    ScratchSize most{0, 0};
    for (int64_t i = 0; i < count; ++i) {
        if (!check_operation(operations[i])) {
            char reason[256];
            snprintf(reason, sizeof reason, "%s", numaserve_last_error());
            set_error("operation %lld: %s", static_cast<long long>(i), reason);
            return -1;
        }
        const ScratchSize size = scratch_of(kernels_of(pool), operations[i], numaserve_pool_threads(pool));
        most.shared = size.shared > most.shared ? size.shared : most.shared;
        most.own = size.own > most.own ? size.own : most.own;
    }
    const Program program{operations, count};
    return run_team(pool, run_program, &program, most.shared, most.own) ? 0 : -1;
}
