// How packed weights lie in memory.
//
// Sixteen outputs make a panel; a panel holds its columns two by two, so that one load brings what two steps of the sum over
// columns need. Columns and outputs that are missing are padded with zero weights. Of a pair of columns (k, k + 1):
//   bf16  [16][2]  the pair side by side for each output: widening is one shift and one mask, and it is the layout that tile and
//                  dot-product instructions ask for
//   fp32, fp16, int8  [2][16]
// int4 holds four pairs together, in [16][2] words of 16 bits: for each output and each of a pair's two columns the numbers of the
// four pairs, the first one lowest. Shifting and masking all words gives a pair's numbers side by side for each output.
// The integer formats are followed by scales fp32 [panels][groups][16] and, int4, zero points uint8 [panels][groups][16].
#pragma once

#include <cstdint>

#include "floats.h"
#include "numaserve_kernels.h"

// Without a name, so that each instruction set gets code of its own.
namespace {
namespace packed {

constexpr int64_t kPanel = 16;
constexpr int64_t kSectionAlignment = 64;
// The pairs of columns of int4 that lie together, and their bytes.
constexpr int64_t kInt4Pairs = 4;
constexpr int64_t kInt4Bytes = 64;

struct Layout {
    int64_t panels;
    int64_t pairs;
    int64_t pair_bytes;
    int64_t groups;
    int64_t group_pairs;
    int64_t panel_bytes;
    int64_t scales_offset;
    int64_t zeros_offset;
    int64_t bytes;
};

inline int64_t pair_bytes_of(int64_t format) {
    switch (format) {
        case NUMASERVE_F32:
            return 128;
        case NUMASERVE_BF16:
        case NUMASERVE_F16:
            return 64;
        case NUMASERVE_INT8:
            return 32;
        default:
            return 16;
    }
}

inline Layout layout_of(int64_t format, int64_t group, int64_t rows, int64_t columns) {
    Layout layout{};
    layout.panels = (rows + kPanel - 1) / kPanel;
    layout.pairs = (columns + 1) / 2;
    layout.pair_bytes = pair_bytes_of(format);
    const int64_t together = format == NUMASERVE_INT4 ? kInt4Pairs : 1;
    layout.panel_bytes = (layout.pairs + together - 1) / together * together * layout.pair_bytes;
    const bool integers = format == NUMASERVE_INT8 || format == NUMASERVE_INT4;
    layout.group_pairs = group == 0 ? layout.pairs : group / 2;
    layout.groups = integers && layout.pairs > 0 ? (layout.pairs + layout.group_pairs - 1) / layout.group_pairs : 0;
    const int64_t scales = layout.panels * layout.groups * kPanel;
    layout.scales_offset = (layout.panels * layout.panel_bytes + kSectionAlignment - 1) / kSectionAlignment * kSectionAlignment;
    layout.zeros_offset = layout.scales_offset + scales * 4;
    layout.bytes = layout.zeros_offset + (format == NUMASERVE_INT4 ? scales : 0);
    return layout;
}

inline Layout layout_of(const numaserve_weight& weight) {
    return layout_of(weight.format, weight.group, weight.rows, weight.columns);
}

inline const float* panel_scales(const numaserve_weight& weight, const Layout& layout, int64_t panel) {
    const auto* base = static_cast<const unsigned char*>(weight.data);
    return reinterpret_cast<const float*>(base + layout.scales_offset) + panel * layout.groups * kPanel;
}

inline const uint8_t* panel_zeros(const numaserve_weight& weight, const Layout& layout, int64_t panel) {
    return static_cast<const unsigned char*>(weight.data) + layout.zeros_offset + panel * layout.groups * kPanel;
}

// Of int4, the byte that holds a number of a panel, and where in it the number begins.
struct Nibble {
    int64_t byte;
    int shift;
};

inline Nibble nibble_of(int64_t lane, int64_t column) {
    const int64_t pair = column / 2 % kInt4Pairs, word = 2 * lane + column % 2;
    return {column / (2 * kInt4Pairs) * kInt4Bytes + 2 * word + pair / 2, static_cast<int>(4 * (pair % 2))};
}

// The number that a weight stands for, its scale included.
inline float weight_at(const numaserve_weight& weight, const Layout& layout, int64_t row, int64_t column) {
    const int64_t panel = row / kPanel, lane = row % kPanel, pair = column / 2, second = column % 2;
    const auto* start = static_cast<const unsigned char*>(weight.data) + panel * layout.panel_bytes;
    const auto* data = start + pair * layout.pair_bytes;
    switch (weight.format) {
        case NUMASERVE_BF16:
            return load_number(data, NUMASERVE_BF16, 2 * lane + second);
        case NUMASERVE_F16:
        case NUMASERVE_F32:
            return load_number(data, weight.format, kPanel * second + lane);
        default:
            break;
    }
    const int64_t at = pair / layout.group_pairs * kPanel + lane;
    const float scale = panel_scales(weight, layout, panel)[at];
    if (weight.format == NUMASERVE_INT8) {
        return static_cast<float>(static_cast<int8_t>(data[kPanel * second + lane])) * scale;
    }
    const Nibble nibble = nibble_of(lane, column);
    const int value = start[nibble.byte] >> nibble.shift & 15;
    return static_cast<float>(value - panel_zeros(weight, layout, panel)[at]) * scale;
}

}  // namespace packed
}  // namespace
