#include "checks.h"

#include "pool.h"

namespace numaserve {
namespace {

bool fail(const char* name, const char* problem) {
    set_error("%s: %s", name, problem);
    return false;
}

bool is_dtype(int64_t dtype) { return dtype >= NUMASERVE_F32 && dtype <= NUMASERVE_F16; }

bool check_optional(const char* name, const numaserve_array& array, int64_t rows, int64_t columns) {
    return array.data == nullptr || check_array(name, array, rows, columns);
}

bool check_sizes(int64_t rows, int64_t columns) {
    if (rows < 0) {
        return fail("rows", "is negative");
    }
    return columns > 0 || fail("columns", "must be positive");
}

bool check_indices(const char* name, const int64_t* indices, int64_t count, int64_t least, int64_t end) {
    for (int64_t i = 0; i < count; ++i) {
        if (indices[i] < least || indices[i] >= end) {
            set_error("%s: %lld is not below %lld", name, static_cast<long long>(indices[i]), static_cast<long long>(end));
            return false;
        }
    }
    return true;
}

bool check(const numaserve_matmul& op) {
    return check_weight("weight", op.weight) && check_sizes(op.rows, op.weight.columns) &&
           check_array("x", op.x, op.rows, op.weight.columns) && check_array("y", op.y, op.rows, op.weight.rows) &&
           check_optional("bias", op.bias, 1, op.weight.rows) && check_optional("residual", op.residual, op.rows, op.weight.rows);
}

bool check(const numaserve_rms_norm& op) {
    // Rows of x that an index names cannot be checked: how many there are is not said.
    return check_sizes(op.rows, op.columns) && check_array("x", op.x, op.rows, op.columns) &&
           check_array("y", op.y, op.rows, op.columns) && check_array("weight", op.weight, 1, op.columns) &&
           check_optional("residual", op.residual, op.rows, op.columns);
}

bool check(const numaserve_rope& op) {
    if (op.head_dim <= 0 || op.head_dim > 1024 || op.heads <= 0 || op.kv_heads <= 0) {
        return fail("heads, kv_heads, head_dim", "must be positive, head_dim at most 1024");
    }
    if (op.rotary_dim < 0 || op.rotary_dim > op.head_dim || op.rotary_dim % 2 != 0) {
        return fail("rotary_dim", "must be even and at most head_dim");
    }
    if ((op.cosine == nullptr) != (op.sine == nullptr)) {
        return fail("cosine, sine", "must be given both or neither");
    }
    if (op.keys == nullptr || op.values == nullptr || op.slots == nullptr || !is_dtype(op.cache_dtype)) {
        return fail("keys, values, slots, cache_dtype", "must be given");
    }
    if (op.block_size <= 0) {
        return fail("block_size", "must be positive");
    }
    if (op.cosine != nullptr && op.positions == nullptr && op.table_rows < op.rows) {
        return fail("table_rows", "is less than rows");
    }
    const int64_t query = op.heads * op.head_dim;
    return check_sizes(op.rows, op.head_dim) && check_array("qkv", op.qkv, op.rows, query + 2 * op.kv_heads * op.head_dim) &&
           check_array("query", op.query, op.rows, query) && check_optional("query_norm", op.query_norm, 1, op.head_dim) &&
           check_optional("key_norm", op.key_norm, 1, op.head_dim) &&
           (op.cosine == nullptr || op.positions == nullptr ||
            check_indices("positions", op.positions, op.rows, 0, op.table_rows)) &&
           check_indices("slots", op.slots, op.rows, INT64_MIN, op.cache_slots);
}

bool check(const numaserve_attention& op) {
    if (op.head_dim <= 0 || op.head_dim > 1024 || op.heads <= 0 || op.kv_heads <= 0 || op.heads % op.kv_heads != 0) {
        return fail("heads, kv_heads, head_dim", "must be positive, kv_heads a divisor of heads, head_dim at most 1024");
    }
    if (op.block_size <= 0 || op.blocks < 0 || op.window < 0 || op.sequence_count < 0 || !is_dtype(op.cache_dtype)) {
        return fail("block_size, blocks, window, sequence_count, cache_dtype", "one is out of range");
    }
    if (op.sequence_count > 0 && (op.keys == nullptr || op.values == nullptr || op.block_tables == nullptr ||
                                  op.sequences == nullptr)) {
        return fail("keys, values, block_tables, sequences", "must be given");
    }
    const int64_t columns = op.heads * op.head_dim;
    int64_t rows = 0;
    for (int64_t s = 0; s < op.sequence_count; ++s) {
        const numaserve_sequence& sequence = op.sequences[s];
        if (sequence.query_start < 0 || sequence.query_length < 0 || sequence.context_length < sequence.query_length) {
            return fail("sequences", "query_start is negative, or context_length less than query_length");
        }
        const int64_t blocks = (sequence.context_length + op.block_size - 1) / op.block_size;
        if (blocks > op.table_stride && op.sequence_count > 1) {
            return fail("block_tables", "has fewer columns than a sequence has blocks");
        }
        // Blocks that lie wholly before the window are never read, so that their places may hold anything.
        const int64_t first = sequence.context_length - sequence.query_length - op.window + 1;
        const int64_t skipped = op.window > 0 && first > 0 ? first / op.block_size : 0;
        if (sequence.query_length > 0 &&
            !check_indices("block_tables", op.block_tables + s * op.table_stride + skipped, blocks - skipped, 0, op.blocks)) {
            return false;
        }
        const int64_t end = sequence.query_start + sequence.query_length;
        rows = end > rows ? end : rows;
    }
    return check_array("query", op.query, rows, columns) && check_array("y", op.y, rows, columns);
}

bool check(const numaserve_activation& op) {
    if (op.kind < NUMASERVE_SILU || op.kind > NUMASERVE_RELU) {
        return fail("kind", "is no activation");
    }
    return check_sizes(op.rows, op.columns) && check_array("x", op.x, op.rows, op.gated != 0 ? 2 * op.columns : op.columns) &&
           check_array("y", op.y, op.rows, op.columns);
}

bool check(const numaserve_add& op) {
    return check_sizes(op.rows, op.columns) && check_array("x", op.x, op.rows, op.columns) &&
           check_array("y", op.y, op.rows, op.columns) && check_array("residual", op.residual, op.rows, op.columns);
}

bool check(const numaserve_embedding& op) {
    const numaserve_array& table = op.table;
    const bool weight = op.weight.data != nullptr
                            ? check_weight("weight", op.weight)
                            : check_array("table", table, op.weight.rows, op.weight.columns);
    if (op.rows > 0 && op.ids == nullptr) {
        return fail("ids", "is null");
    }
    return weight && check_sizes(op.rows, op.weight.columns) && check_array("y", op.y, op.rows, op.weight.columns) &&
           check_indices("ids", op.ids, op.rows, 0, op.weight.rows);
}

bool check(const numaserve_choice& choice) {
    // Written so that NaN fails too.
    if (!(choice.temperature >= 0)) {
        return fail("temperature", "is negative or NaN");
    }
    if (!(choice.top_p >= 0) || !(choice.typical_p >= 0)) {
        return fail("top_p, typical_p", "one is negative or NaN");
    }
    return (choice.min_p >= 0 && choice.min_p <= 1) || fail("min_p", "is not from 0 to 1");
}

bool check_logits(const numaserve_array& logits, int64_t rows, int64_t columns) {
    // What counts tokens fits 32 bits, and the sum of all weights the whole numbers of a double.
    if (columns > INT64_C(1) << 22) {
        return fail("columns", "must be at most 2^22");
    }
    return check_sizes(rows, columns) && check_array("logits", logits, rows, columns) &&
           (logits.dtype == NUMASERVE_F32 || fail("logits", "must be fp32"));
}

bool check(const numaserve_sample& op) {
    if (!check_logits(op.logits, op.rows, op.columns)) {
        return false;
    }
    if (op.rows > 0 && (op.choices == nullptr || op.largest == nullptr || op.tokens == nullptr)) {
        return fail("choices, largest, tokens", "must be given");
    }
    for (int64_t row = 0; row < op.rows; ++row) {
        if (!check(op.choices[row])) {
            return false;
        }
    }
    return true;
}

bool check(const numaserve_ranking& op) {
    if (!check_logits(op.logits, op.rows, op.columns)) {
        return false;
    }
    if (op.rows > 0 && (op.tokens == nullptr || op.top == nullptr || op.largest == nullptr || op.sums == nullptr ||
                        op.ranks == nullptr || (op.likeliest == nullptr && op.most > 0))) {
        return fail("tokens, top, largest, sums, ranks, likeliest", "must be given");
    }
    return check_indices("tokens", op.tokens, op.rows, 0, op.columns) && check_indices("top", op.top, op.rows, 0, op.most + 1);
}

}  // namespace

bool check_format(int64_t format, int64_t group, int64_t rows, int64_t columns) {
    if (format < NUMASERVE_F32 || format > NUMASERVE_INT4) {
        return fail("format", "is unknown");
    }
    if (rows <= 0 || columns <= 0 || rows > INT64_C(1) << 40 || columns > INT64_C(1) << 40) {
        return fail("shape", "must be positive");
    }
    const bool integers = format == NUMASERVE_INT8 || format == NUMASERVE_INT4;
    if (group != 0 && (!integers || (group != 16 && group != 32 && group != 64 && group != 128 && group != 256))) {
        return fail("group", "must be 0 or, for integers, 16, 32, 64, 128 or 256");
    }
    return true;
}

bool check_weight(const char* name, const numaserve_weight& weight) {
    if (weight.data == nullptr) {
        return fail(name, "is null");
    }
    if (reinterpret_cast<uintptr_t>(weight.data) % 4 != 0) {
        return fail(name, "does not lie at a multiple of four bytes");
    }
    return check_format(weight.format, weight.group, weight.rows, weight.columns);
}

bool check_array(const char* name, const numaserve_array& array, int64_t rows, int64_t columns) {
    if (!is_dtype(array.dtype)) {
        return fail(name, "has an unknown element type");
    }
    if (rows == 0) {
        return true;
    }
    if (array.data == nullptr) {
        return fail(name, "is null");
    }
    if (rows > 1 && array.stride < columns) {
        return fail(name, "has rows that overlap");
    }
    return true;
}

bool check_operation(const numaserve_operation& operation) {
    const void* arguments = operation.arguments;
    if (arguments == nullptr) {
        return fail("arguments", "is null");
    }
    switch (operation.kind) {
        case NUMASERVE_MATMUL:
            return check(*static_cast<const numaserve_matmul*>(arguments));
        case NUMASERVE_RMS_NORM:
            return check(*static_cast<const numaserve_rms_norm*>(arguments));
        case NUMASERVE_ROPE:
            return check(*static_cast<const numaserve_rope*>(arguments));
        case NUMASERVE_ATTENTION:
            return check(*static_cast<const numaserve_attention*>(arguments));
        case NUMASERVE_ACTIVATION:
            return check(*static_cast<const numaserve_activation*>(arguments));
        case NUMASERVE_ADD:
            return check(*static_cast<const numaserve_add*>(arguments));
        case NUMASERVE_EMBEDDING:
            return check(*static_cast<const numaserve_embedding*>(arguments));
        case NUMASERVE_SAMPLE:
            return check(*static_cast<const numaserve_sample*>(arguments));
        case NUMASERVE_RANKING:
            return check(*static_cast<const numaserve_ranking*>(arguments));
        default:
            return fail("kind", "is no operation");
    }
}

}  // namespace numaserve
