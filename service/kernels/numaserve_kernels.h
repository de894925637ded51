// The C interface of the CPU kernels. Plain types alone, so that any language can load it.
//
// Work is described by structs, one for each kind of operation, and run by a pool of threads: one call can run a whole
// list of operations, each seeing what those before it wrote. Nothing here allocates per call once buffers have grown.
// Matrices are row-major; strides are counted in elements.
#ifndef NUMASERVE_KERNELS_H
#define NUMASERVE_KERNELS_H

#include <stdint.h>

#if defined(__GNUC__)
#define NUMASERVE_EXPORT __attribute__((visibility("default")))
#else
#define NUMASERVE_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define NUMASERVE_KERNELS_ABI 3

// Element types, and the formats of packed weights.
enum {
    NUMASERVE_F32 = 0,
    NUMASERVE_BF16 = 1,
    NUMASERVE_F16 = 2,
    NUMASERVE_INT8 = 3,
    NUMASERVE_INT4 = 4,
};

enum {
    NUMASERVE_SILU = 0,
    NUMASERVE_GELU = 1,
    NUMASERVE_GELU_TANH = 2,
    NUMASERVE_RELU = 3,
};

// Rows of a matrix, or one row (then the stride does not matter). `data` null where an optional one is absent.
typedef struct {
    void* data;
    int64_t stride;
    int64_t dtype;
} numaserve_array;

// Packed weights [rows, columns] of a linear layer (rows: its outputs), made by numaserve_pack and its like. `group` is the
// number of columns that share a scale in the integer formats; 0: all of them.
typedef struct {
    const void* data;
    int64_t rows;
    int64_t columns;
    int64_t format;
    int64_t group;
} numaserve_weight;

// y[rows, n] = residual + softcap(scale * (x[rows, k] . weight^T + bias)); softcap(v) = softcap * tanh(v / softcap), 0: off.
// Sums are fp32, over k in one order whatever `rows` is. y may be the residual itself.
typedef struct {
    numaserve_array x;
    numaserve_array y;
    numaserve_array bias;
    numaserve_array residual;
    numaserve_weight weight;
    int64_t rows;
    float scale;
    float softcap;
} numaserve_matmul;

// y[i] = residual[i] + scale * (offset + weight) * x[r] / sqrt(mean(x[r]^2) + eps), r = row_index[i], or i where that is null.
typedef struct {
    numaserve_array x;
    numaserve_array y;
    numaserve_array weight;
    numaserve_array residual;
    const int64_t* row_index;
    int64_t rows;
    int64_t columns;
    float eps;
    float offset;
    float scale;
    float unused;
} numaserve_rms_norm;

// For each row of qkv [rows, (heads + 2 kv_heads) * head_dim]: norms and rotates queries into `query`, norms and rotates keys
// into the cache, copies values into the cache, at slot slots[row] (not at all where that is negative).
// cosine and sine [table_rows, rotary_dim / 2] fp32, at row positions[row], or row where that is null; cosine null: no rotation.
typedef struct {
    numaserve_array qkv;
    numaserve_array query;
    numaserve_array query_norm;
    numaserve_array key_norm;
    const float* cosine;
    const float* sine;
    const int64_t* positions;
    const int64_t* slots;
    void* keys;
    void* values;
    int64_t cache_dtype;
    int64_t block_size;
    int64_t cache_slots;
    int64_t table_rows;
    int64_t rows;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t rotary_dim;
    int64_t interleaved;
    float eps;
    float norm_offset;
} numaserve_rope;

typedef struct {
    int64_t query_start;
    int64_t query_length;
    int64_t context_length;
} numaserve_sequence;

// Causal attention of query [*, heads * head_dim] over the paged cache of one layer: `blocks` blocks, each of block_size * kv_heads *
// head_dim keys and as many values, in the order that cache.h describes. The last query of a sequence has position
// context_length - 1.
// window: how many positions a query sees, itself included; 0: all.
typedef struct {
    numaserve_array query;
    numaserve_array y;
    const void* keys;
    const void* values;
    const int64_t* block_tables;
    const numaserve_sequence* sequences;
    int64_t cache_dtype;
    int64_t blocks;
    int64_t block_size;
    int64_t table_stride;
    int64_t sequence_count;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t window;
    float scale;
    float softcap;
} numaserve_attention;

// gated: y[rows, columns] = activation(x[:, :columns]) * x[:, columns:]; else y = activation(x).
typedef struct {
    numaserve_array x;
    numaserve_array y;
    int64_t rows;
    int64_t columns;
    int64_t kind;
    int64_t gated;
} numaserve_activation;

// y = residual + scale * x.
typedef struct {
    numaserve_array x;
    numaserve_array y;
    numaserve_array residual;
    int64_t rows;
    int64_t columns;
    float scale;
    float unused;
} numaserve_add;

// y[i] = scale * weight[ids[i]], from packed weights or, where their data is null, from the rows of `table`.
typedef struct {
    numaserve_array y;
    numaserve_array table;
    numaserve_weight weight;
    const int64_t* ids;
    int64_t rows;
    float scale;
    float unused;
} numaserve_embedding;

// How the token of one row is drawn. temperature 0: the first of the largest logits, whatever the rest says. Otherwise what is kept
// after top_k (0: all), top_p (from 1 on: all), min_p (0: all) and typical_p (from 1 on: all), in that order; `uniform` / 2^64
// is the place in the sum of the weights that are kept, by rising token.
typedef struct {
    double temperature;
    double top_p;
    double min_p;
    double typical_p;
    int64_t top_k;
    uint64_t uniform;
} numaserve_choice;

// For each row of fp32 logits [rows, columns] the largest one and the token that choices[row] picks. A row that holds NaN, whose
// largest is then NaN, or in which no logit or an infinite one is largest has token -1.
//
// A token's weight is the integer nearest to 2^30 * e^((logit - largest) / temperature), computed in fp32, with the same bits by
// every instruction set. top_k keeps all that equal the last one kept, top_p of these those with the lowest tokens.
// `weights` [rows, columns], null where nobody asks, gets the weights that were drawn from: 0 for what was not kept.
typedef struct {
    numaserve_array logits;
    const numaserve_choice* choices;
    float* largest;
    int64_t* tokens;
    int32_t* weights;
    int64_t rows;
    int64_t columns;
} numaserve_sample;

// For each row of fp32 logits [rows, columns] what its log probabilities are made of: the largest logit, NaN where the row holds one,
// and the sum of weights at temperature 1, so that log(sum(e^logit)) = largest + log(sum / 2^30); the rank of tokens[row], from 1 on,
// where of equal logits the lower token ranks first; and in likeliest [rows, most] the top[row] likeliest tokens in the order of
// ranks, or all, then -1. A row whose largest logit is not finite has sum and rank 0.
typedef struct {
    numaserve_array logits;
    const int64_t* tokens;
    const int64_t* top;
    float* largest;
    int64_t* sums;
    int64_t* ranks;
    int64_t* likeliest;
    int64_t most;
    int64_t rows;
    int64_t columns;
} numaserve_ranking;

enum {
    NUMASERVE_MATMUL = 0,
    NUMASERVE_RMS_NORM = 1,
    NUMASERVE_ROPE = 2,
    NUMASERVE_ATTENTION = 3,
    NUMASERVE_ACTIVATION = 4,
    NUMASERVE_ADD = 5,
    NUMASERVE_EMBEDDING = 6,
    NUMASERVE_SAMPLE = 7,
    NUMASERVE_RANKING = 8,
};

typedef struct {
    int64_t kind;
    const void* arguments;
} numaserve_operation;

typedef struct numaserve_pool numaserve_pool;

// Functions that return int give 0, or -1 with the reason in numaserve_last_error(), which is this thread's own.
NUMASERVE_EXPORT const char* numaserve_last_error(void);
NUMASERVE_EXPORT int numaserve_abi(void);

// Whether this machine can run an instruction set: "generic", "avx2", "avx512", "amx".
NUMASERVE_EXPORT int numaserve_isa_supported(const char* isa);

// `threads` threads, the caller counted as the first; thread i is pinned to cpus[i] (cpus null: none is pinned).
// isa null: the best that the machine has. A pool belongs to the process that made it and to one caller at a time.
NUMASERVE_EXPORT numaserve_pool* numaserve_pool_create(const int* cpus, int threads, const char* isa);
NUMASERVE_EXPORT void numaserve_pool_destroy(numaserve_pool* pool);
NUMASERVE_EXPORT int numaserve_pool_threads(const numaserve_pool* pool);
// How many of the pool's own threads are pinned; the caller pins itself, with the next function.
NUMASERVE_EXPORT int numaserve_pool_pinned(const numaserve_pool* pool);
NUMASERVE_EXPORT int numaserve_pool_pin_caller(numaserve_pool* pool);
NUMASERVE_EXPORT const char* numaserve_pool_isa(const numaserve_pool* pool);

NUMASERVE_EXPORT int numaserve_run(numaserve_pool* pool, const numaserve_operation* operations, int64_t count);

// Bytes of packed weights, -1 where format, group and shape do not go together.
NUMASERVE_EXPORT int64_t numaserve_packed_bytes(int64_t format, int64_t group, int64_t rows, int64_t columns);

// Packs `count` rows of `source` as rows first_row ... of `target`, whose data is written. Rows may come in any order and in
// several calls; the padding is written with the last row.
NUMASERVE_EXPORT int numaserve_pack(numaserve_pool* pool, const numaserve_array* source, int64_t first_row, int64_t count,
                                    const numaserve_weight* target);
// The same, rounding to the integers of the target's format: int8 symmetric, int4 with a zero point. `search` tries that many
// narrower ranges for each group and keeps the one with the least squared error.
NUMASERVE_EXPORT int numaserve_quantize(numaserve_pool* pool, const numaserve_array* source, int64_t first_row, int64_t count,
                                        int64_t search, const numaserve_weight* target);
// Packs integers that are quantised already: values [count, columns], one a byte (int8: signed; int4: 0 ... 15), scales and, for
// int4, zeros [count, groups]. A weight is (value - zero) * scale.
NUMASERVE_EXPORT int numaserve_pack_quantized(numaserve_pool* pool, const void* values, const float* scales,
                                              const uint8_t* zeros, int64_t first_row, int64_t count,
                                              const numaserve_weight* target);
// Rows first_row ... of packed weights as fp32 [count, columns].
NUMASERVE_EXPORT int numaserve_unpack(numaserve_pool* pool, const numaserve_weight* weight, int64_t first_row, int64_t count,
                                      float* target);

#ifdef __cplusplus
}
#endif

#endif
