// Runs every kernel of every instruction set on buffers that are exactly as large as they have to be, for the sanitizers to watch, and
// compares with sums in double. Prints a line for each instruction set; exits with 1 at the first result that is wrong.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "numaserve_kernels.h"

namespace {

std::mt19937 random_bits(1);

// On the heap and of exact size, so that one element too far is noticed.
using Floats = std::vector<float>;

Floats numbers(int64_t count) {
    std::normal_distribution<float> normal;
    Floats values(static_cast<size_t>(count));
    for (float& value : values) {
        value = normal(random_bits);
    }
    return values;
}

int64_t pick(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(random_bits); }

void require(bool holds, const char* what) {
    if (!holds) {
        fprintf(stderr, "wrong: %s (%s)\n", what, numaserve_last_error());
        exit(1);
    }
}

void require_close(double value, double expected, double tolerance, const char* what) {
    require(std::fabs(value - expected) <= tolerance * (1 + std::fabs(expected)), what);
}

numaserve_array rows_of(Floats& values, int64_t stride) { return {values.data(), stride, NUMASERVE_F32}; }

void run(numaserve_pool* pool, int64_t kind, const void* arguments) {
    const numaserve_operation operation{kind, arguments};
    require(numaserve_run(pool, &operation, 1) == 0, "the operation is accepted");
}

void check_matmul(numaserve_pool* pool, int64_t format, int64_t group) {
    const int64_t rows = pick(1, 40), n = pick(1, 70), k = pick(1, 300);
    Floats weight = numbers(n * k), x = numbers(rows * k), y(static_cast<size_t>(rows * n)), bias = numbers(n);
    const int64_t bytes = numaserve_packed_bytes(format, group, n, k);
    std::unique_ptr<unsigned char[]> memory(new unsigned char[static_cast<size_t>(bytes)]);
    memset(memory.get(), 255, static_cast<size_t>(bytes));
    const numaserve_weight target{memory.get(), n, k, format, group};
    const numaserve_array source = rows_of(weight, k);
    const bool integers = format == NUMASERVE_INT8 || format == NUMASERVE_INT4;
    const int status = integers ? numaserve_quantize(pool, &source, 0, n, 3, &target) : numaserve_pack(pool, &source, 0, n, &target);
    require(status == 0, "packing");
    Floats restored(static_cast<size_t>(n * k));
    require(numaserve_unpack(pool, &target, 0, n, restored.data()) == 0, "unpacking");
    numaserve_matmul op{};
    op.x = rows_of(x, k);
    op.y = rows_of(y, n);
    op.bias = rows_of(bias, n);
    op.weight = target;
    op.rows = rows;
    op.scale = 0.5F;
    run(pool, NUMASERVE_MATMUL, &op);
    // Beside integers inputs are rounded, by less than 1 / 65534 here.
    const double tolerance = integers ? 1e-3 : 1e-4;
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = 0; i < n; ++i) {
            double sum = bias[static_cast<size_t>(i)];
            for (int64_t j = 0; j < k; ++j) {
                sum += static_cast<double>(x[static_cast<size_t>(r * k + j)]) * static_cast<double>(restored[static_cast<size_t>(i * k + j)]);
            }
            require_close(y[static_cast<size_t>(r * n + i)], 0.5 * sum, tolerance, "a product");
        }
    }
    // Inputs of one each, so that a product is the sum of a row of weights.
    std::vector<uint16_t> halves(static_cast<size_t>(rows * k), 0x3f80), outputs(static_cast<size_t>(rows * n));
    op.x = {halves.data(), k, NUMASERVE_BF16};
    run(pool, NUMASERVE_MATMUL, &op);
    for (int64_t i = 0; i < n; ++i) {
        double sum = bias[static_cast<size_t>(i)];
        for (int64_t j = 0; j < k; ++j) {
            sum += static_cast<double>(restored[static_cast<size_t>(i * k + j)]);
        }
        require_close(y[static_cast<size_t>(i)], 0.5 * sum, 1e-4, "a product of bf16");
        require(y[static_cast<size_t>((rows - 1) * n + i)] == y[static_cast<size_t>(i)], "equal rows have equal products");
    }
    op.x = {halves.data(), k, NUMASERVE_BF16};
    op.y = {outputs.data(), n, NUMASERVE_F16};
    op.residual = {outputs.data(), n, NUMASERVE_F16};
    run(pool, NUMASERVE_MATMUL, &op);
    Floats looked_up(static_cast<size_t>(3 * k));
    const std::vector<int64_t> ids{0, n - 1, n / 2};
    numaserve_embedding embedding{};
    embedding.y = rows_of(looked_up, k);
    embedding.weight = target;
    embedding.ids = ids.data();
    embedding.rows = 3;
    embedding.scale = 1.0F;
    run(pool, NUMASERVE_EMBEDDING, &embedding);
    for (int64_t j = 0; j < k; ++j) {
        require(looked_up[static_cast<size_t>(k + j)] == restored[static_cast<size_t>((n - 1) * k + j)], "a row that was looked up");
    }
}

void check_rows(numaserve_pool* pool) {
    const int64_t rows = pick(1, 9), columns = pick(1, 1100);
    Floats x = numbers(rows * columns * 2), y(static_cast<size_t>(rows * columns)), weight = numbers(columns);
    numaserve_rms_norm norm{};
    norm.x = rows_of(x, 2 * columns);
    norm.y = rows_of(y, columns);
    norm.weight = rows_of(weight, columns);
    norm.rows = rows;
    norm.columns = columns;
    norm.eps = 1e-5F;
    norm.scale = 1.0F;
    run(pool, NUMASERVE_RMS_NORM, &norm);
    double squares = 0;
    for (int64_t c = 0; c < columns; ++c) {
        squares += static_cast<double>(x[static_cast<size_t>(c)]) * static_cast<double>(x[static_cast<size_t>(c)]);
    }
    const double scale = 1 / std::sqrt(squares / static_cast<double>(columns) + 1e-5);
    require_close(y[0], static_cast<double>(x[0]) * scale * static_cast<double>(weight[0]), 1e-5, "a norm");
    const numaserve_activation gate{rows_of(x, 2 * columns), rows_of(y, columns), rows, columns, pick(0, 3), 1};
    run(pool, NUMASERVE_ACTIVATION, &gate);
    const numaserve_add add{rows_of(x, 2 * columns), rows_of(y, columns), rows_of(y, columns), rows, columns, 1.0F, 0.0F};
    run(pool, NUMASERVE_ADD, &add);
}

// Writes a sequence into a shuffled cache with the rotation kernel (without a rotation) and attends to it.
void check_attention(numaserve_pool* pool, int64_t cache_dtype) {
    const int64_t kv_heads = pick(1, 3), group = pick(1, 4), heads = kv_heads * group, dim = pick(1, 70);
    const int64_t block_size = pick(0, 1) == 0 ? pick(1, 20) : 16 * pick(1, 3);
    const int64_t context = pick(1, 1200), length = pick(1, context < 90 ? context : 90), window = pick(0, 1) * pick(1, 200);
    const int64_t blocks = (context + block_size - 1) / block_size, slots = blocks * block_size;
    const int64_t width = (heads + 2 * kv_heads) * dim;
    std::vector<int64_t> table(static_cast<size_t>(blocks)), where(static_cast<size_t>(context));
    for (int64_t i = 0; i < blocks; ++i) {
        table[static_cast<size_t>(i)] = blocks - 1 - i;
    }
    for (int64_t i = 0; i < context; ++i) {
        where[static_cast<size_t>(i)] = table[static_cast<size_t>(i / block_size)] * block_size + i % block_size;
    }
    const int64_t bytes = slots * kv_heads * dim * (cache_dtype == NUMASERVE_F32 ? 4 : 2);
    std::unique_ptr<unsigned char[]> keys(new unsigned char[static_cast<size_t>(bytes)]), values(new unsigned char[static_cast<size_t>(bytes)]);
    memset(keys.get(), 255, static_cast<size_t>(bytes));
    memset(values.get(), 255, static_cast<size_t>(bytes));
    Floats qkv = numbers(context * width), query(static_cast<size_t>(context * heads * dim)), y(static_cast<size_t>(length * heads * dim));
    numaserve_rope rope{};
    rope.qkv = rows_of(qkv, width);
    rope.query = rows_of(query, heads * dim);
    rope.slots = where.data();
    rope.keys = keys.get();
    rope.values = values.get();
    rope.cache_dtype = cache_dtype;
    rope.block_size = block_size;
    rope.cache_slots = slots;
    rope.rows = context;
    rope.heads = heads;
    rope.kv_heads = kv_heads;
    rope.head_dim = dim;
    run(pool, NUMASERVE_ROPE, &rope);
    const numaserve_sequence sequence{0, length, context};
    numaserve_attention op{};
    op.query = {query.data() + (context - length) * heads * dim, heads * dim, NUMASERVE_F32};
    op.y = rows_of(y, heads * dim);
    op.keys = keys.get();
    op.values = values.get();
    op.block_tables = table.data();
    op.sequences = &sequence;
    op.cache_dtype = cache_dtype;
    op.blocks = blocks;
    op.block_size = block_size;
    op.table_stride = blocks;
    op.sequence_count = 1;
    op.heads = heads;
    op.kv_heads = kv_heads;
    op.head_dim = dim;
    op.window = window;
    op.scale = 0.1F;
    run(pool, NUMASERVE_ATTENTION, &op);
    const int64_t head = pick(0, heads - 1), row = pick(0, length - 1), position = context - length + row;
    double total = 0, sum = 0;
    for (int64_t p = window > 0 && position >= window ? position - window + 1 : 0; p <= position; ++p) {
        double score = 0;
        for (int64_t d = 0; d < dim; ++d) {
            const float q = query[static_cast<size_t>((position * heads + head) * dim + d)];
            score += static_cast<double>(q) * static_cast<double>(qkv[static_cast<size_t>(p * width + (heads + head / group) * dim + d)]);
        }
        const double weight = std::exp(score * 0.1);
        total += weight;
        sum += weight * static_cast<double>(qkv[static_cast<size_t>(p * width + (heads + kv_heads + head / group) * dim)]);
    }
    const double tolerance = cache_dtype == NUMASERVE_F32 ? 1e-5 : 5e-2;
    require_close(y[static_cast<size_t>((row * heads + head) * dim)], sum / total, tolerance, "an attended value");
}

// Rows of all kinds with all filters: what is drawn is kept, and every instruction set gives the bits of the generic one.
void check_sampling(numaserve_pool* pool, numaserve_pool* generic) {
    const int64_t rows = pick(1, 20), columns = pick(0, 1) != 0 ? pick(1, 600) : pick(1, 6000), most = pick(0, 30);
    const size_t cells = static_cast<size_t>(rows * columns), count = static_cast<size_t>(rows);
    Floats logits = numbers(rows * columns), largest(count), again(count);
    std::vector<numaserve_choice> choices(count);
    std::vector<int64_t> tokens(count), other(count), top(count), sums(count), ranks(count), likeliest(static_cast<size_t>(rows * most));
    for (size_t r = 0; r < count; ++r) {
        const int64_t kind = pick(0, 5);
        for (size_t i = 0; i < static_cast<size_t>(columns); ++i) {
            float& logit = logits[r * static_cast<size_t>(columns) + i];
            logit = kind == 0 ? 1.0F : kind == 1 ? std::round(logit) : kind == 2 && logit < 1 ? -INFINITY : logit * 4;
        }
        if (kind == 3) {
            logits[r * static_cast<size_t>(columns) + static_cast<size_t>(pick(0, columns - 1))] = pick(0, 1) != 0 ? NAN : INFINITY;
        }
        const auto part = [](double active) { return pick(0, 1) != 0 ? active : 1.0; };
        choices[r] = {pick(0, 9) * 0.3, part(0.9), pick(0, 1) * 0.02, part(0.7), pick(0, 1) * pick(1, columns + 1), random_bits() * 0x100000001ULL};
        top[r] = pick(0, most);
    }
    std::vector<int32_t> weights(cells), other_weights(cells);
    numaserve_sample op{rows_of(logits, columns), choices.data(), largest.data(), tokens.data(), weights.data(), rows, columns};
    run(pool, NUMASERVE_SAMPLE, &op);
    for (size_t r = 0; r < count; ++r) {
        const bool usable = std::isfinite(largest[r]);
        require(usable ? weights[r * static_cast<size_t>(columns) + static_cast<size_t>(tokens[r])] > 0 : tokens[r] == -1, "a token");
        other[r] = usable ? tokens[r] : 0;
    }
    const numaserve_ranking ranking{rows_of(logits, columns), other.data(), top.data(), again.data(), sums.data(), ranks.data(),
                                    likeliest.data(), most, rows, columns};
    run(pool, NUMASERVE_RANKING, &ranking);
    for (size_t r = 0; r < count; ++r) {
        require(std::isfinite(again[r]) ? ranks[r] >= 1 && ranks[r] <= columns : ranks[r] == 0, "a rank");
        require(!std::isfinite(again[r]) || top[r] == 0 || logits[r * static_cast<size_t>(columns) + static_cast<size_t>(likeliest[r * static_cast<size_t>(most)])] == again[r], "the likeliest");
    }
    op.tokens = other.data();
    op.weights = other_weights.data();
    run(generic, NUMASERVE_SAMPLE, &op);
    require(tokens == other && weights == other_weights, "the bits of the generic kernels");
}

}  // namespace

int main() {
    numaserve_pool* generic = numaserve_pool_create(nullptr, 1, "generic");
    require(generic != nullptr, "a pool");
    for (const char* isa : {"generic", "avx2", "avx512", "amx"}) {
        if (numaserve_isa_supported(isa) == 0) {
            continue;
        }
        for (int threads = 1; threads <= 4; ++threads) {
            numaserve_pool* pool = numaserve_pool_create(nullptr, threads, isa);
            require(pool != nullptr, "a pool");
            for (int round = 0; round < 6; ++round) {
                for (int64_t format = NUMASERVE_F32; format <= NUMASERVE_F16; ++format) {
                    check_matmul(pool, format, 0);
                    check_attention(pool, format);
                }
                for (const int64_t group : {0, 16, 64, 256}) {
                    check_matmul(pool, NUMASERVE_INT8, group);
                    check_matmul(pool, NUMASERVE_INT4, group);
                }
                check_rows(pool);
                check_sampling(pool, generic);
            }
            numaserve_pool_destroy(pool);
        }
        printf("%s: right\n", isa);
    }
    numaserve_pool_destroy(generic);
    return 0;
}
