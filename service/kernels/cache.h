// How the keys and values of one layer lie in the cache. Included after one of the simd headers.
//
// Where a block holds whole panels of sixteen positions, and a head an even number of elements, a block holds one head after the
// other: of each the keys as panels, where an element is a column and a position an output, as in packed weights of their type, and
// the values [block_size][head_dim]. What a head's queries read is then contiguous, and products need nothing laid out before.
// Else both are [block_size][kv_heads][head_dim].
#pragma once

#include <cstring>

#include "packed.h"
#include "vector_math.h"

namespace {
namespace cache {

using packed::kPanel;

struct Layout {
    int64_t dtype;
    int64_t block_size;
    int64_t kv_heads;
    int64_t head_dim;

    bool in_panels() const { return block_size % kPanel == 0 && head_dim % 2 == 0; }
    // Successive positions whose numbers of one head are contiguous.
    int64_t run() const { return in_panels() ? kPanel : 1; }
    int64_t head_bytes() const { return head_dim * number_bytes(dtype); }
    // From a position of a block to the next one.
    int64_t stride() const { return in_panels() ? head_bytes() : kv_heads * head_bytes(); }
    // Where a head's first position of a block lies.
    int64_t block_at(int64_t block, int64_t head) const {
        return (block * kv_heads * block_size + (in_panels() ? head * block_size : head)) * head_bytes();
    }

    // Writes a key of fp32 [head_dim].
    void put_key(void* keys, int64_t slot, int64_t head, const float* key) const {
        const int64_t offset = slot % block_size;
        auto* block = static_cast<unsigned char*>(keys) + block_at(slot / block_size, head);
        if (!in_panels()) {
            return put(block + offset * stride(), key);
        }
        unsigned char numbers[kMostDim * sizeof(float)];
        put(numbers, key);
        unsigned char* panel = block + offset / kPanel * kPanel * head_bytes();
        // bf16 lies two by two, so that a word moves at once.
        if (dtype == NUMASERVE_F16) {
            scatter<2>(panel, offset % kPanel, numbers);
        } else {
            scatter<4>(panel, offset % kPanel, numbers);
        }
    }

    void put_value(void* values, int64_t slot, int64_t head, const float* value) const {
        const int64_t at = block_at(slot / block_size, head) + slot % block_size * stride();
        put(static_cast<unsigned char*>(values) + at, value);
    }

    static constexpr int64_t kMostDim = 1024;

   private:
    template <int64_t kWidth>
    void scatter(unsigned char* panel, int64_t lane, const unsigned char* numbers) const {
        for (int64_t at = 0; at < head_bytes(); at += kWidth) {
            memcpy(panel + at * kPanel + lane * kWidth, numbers + at, kWidth);
        }
    }

    void put(void* to, const float* numbers) const {
        for (int64_t d = 0; d < head_dim; d += simd::kLanes) {
            simd::store_some(to, dtype, d, head_dim - d, simd::load_some(numbers, NUMASERVE_F32, d, head_dim - d));
        }
    }
};

// Goes over successive positions of a sequence whose blocks `table` names.
class Places {
   public:
    Places(const Layout& layout, const int64_t* table, int64_t head, int64_t position)
        : layout_(layout), block_(table + position / layout.block_size), head_(head), offset_(position % layout.block_size) {}

    // Where the next layout.run() positions begin.
    int64_t next() {
        const int64_t at = layout_.block_at(*block_, head_) + offset_ * layout_.stride();
        offset_ += layout_.run();
        if (offset_ == layout_.block_size) {
            offset_ = 0;
            ++block_;
        }
        return at;
    }

   private:
    const Layout& layout_;
    const int64_t* block_;
    int64_t head_;
    int64_t offset_;
};

}  // namespace cache
}  // namespace
