// Packing, quantising and unpacking of weights. Portable code: it runs once, at the speed of memory.
#include "packed.h"

#include <cmath>

#include "checks.h"
#include "numaserve_kernels.h"
#include "pool.h"

namespace numaserve {
namespace {

using packed::kPanel;
using packed::Layout;

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

struct Packing {
    numaserve_array source;
    const uint8_t* values;
    const float* scales;
    const uint8_t* zeros;
    int64_t first_row;
    int64_t count;
    int64_t search;
    numaserve_weight weight;
    float* unpacked;
};

// The rows of one panel that a call brings, as lanes, and the row of the call that is lane 0 (which may lie before its first).
struct Lanes {
    int64_t begin;
    int64_t end;
    int64_t first;
};

Lanes lanes_of(const Packing& job, int64_t panel) {
    const int64_t start = panel * kPanel;
    return {most(job.first_row - start, 0), least(job.first_row + job.count - start, kPanel), start - job.first_row};
}

Range panels_of(const Packing& job, const Team& team) {
    const int64_t first = job.first_row / kPanel;
    const int64_t end = (job.first_row + job.count + kPanel - 1) / kPanel;
    const Range mine = share(end - first, team.index, team.size);
    return {first + mine.begin, first + mine.end};
}

unsigned char* panel_data(const Packing& job, const Layout& layout, int64_t panel) {
    return static_cast<unsigned char*>(const_cast<void*>(job.weight.data)) + panel * layout.panel_bytes;
}

float* scales_at(const Packing& job, const Layout& layout, int64_t panel) {
    return const_cast<float*>(packed::panel_scales(job.weight, layout, panel));
}

uint8_t* zeros_at(const Packing& job, const Layout& layout, int64_t panel) {
    return const_cast<uint8_t*>(packed::panel_zeros(job.weight, layout, panel));
}

// Zeroes the lanes past the last row, so that padding never holds what the memory held before.
void clear_padding(const Packing& job, const Layout& layout, int64_t panel) {
    const int64_t rows = least(job.weight.rows - panel * kPanel, kPanel);
    const bool last = panel == layout.panels - 1 && job.first_row + job.count == job.weight.rows;
    if (!last || rows == kPanel) {
        return;
    }
    unsigned char* data = panel_data(job, layout, panel);
    const int64_t format = job.weight.format;
    const int64_t lane_bytes = format == NUMASERVE_BF16 || format == NUMASERVE_F32 ? 4 : layout.pair_bytes / 32;
    for (int64_t at = 0; format == NUMASERVE_INT4 && at < layout.panel_bytes; at += packed::kInt4Bytes) {
        memset(data + at + rows * 4, 0, static_cast<size_t>((kPanel - rows) * 4));
    }
    for (int64_t pair = 0; format != NUMASERVE_INT4 && pair < layout.pairs; ++pair) {
        unsigned char* at = data + pair * layout.pair_bytes;
        const int64_t parts = format == NUMASERVE_BF16 ? 1 : 2;
        for (int64_t part = 0; part < parts; ++part) {
            memset(at + (part * kPanel + rows) * lane_bytes, 0, static_cast<size_t>((kPanel - rows) * lane_bytes));
        }
    }
    for (int64_t group = 0; group < layout.groups; ++group) {
        for (int64_t lane = rows; lane < kPanel; ++lane) {
            scales_at(job, layout, panel)[group * kPanel + lane] = 0.0F;
            if (format == NUMASERVE_INT4) {
                zeros_at(job, layout, panel)[group * kPanel + lane] = 0;
            }
        }
    }
}

uint16_t as_half(const numaserve_array& source, int64_t at, int64_t format) {
    if (source.dtype == format) {
        return static_cast<const uint16_t*>(source.data)[at];
    }
    const float value = load_number(source.data, source.dtype, at);
    return format == NUMASERVE_BF16 ? float_to_bf16(value) : float_to_f16(value);
}

void pack_panel(const Packing& job, const Layout& layout, int64_t panel) {
    const Lanes lanes = lanes_of(job, panel);
    const int64_t columns = job.weight.columns, format = job.weight.format;
    unsigned char* data = panel_data(job, layout, panel);
    for (int64_t lane = lanes.begin; lane < lanes.end; ++lane) {
        const int64_t from = (lanes.first + lane) * job.source.stride;
        for (int64_t k = 0; k < 2 * layout.pairs; ++k) {
            unsigned char* at = data + k / 2 * layout.pair_bytes;
            const int64_t place = format == NUMASERVE_BF16 ? 2 * lane + k % 2 : k % 2 * kPanel + lane;
            if (format == NUMASERVE_F32) {
                const float value = k < columns ? load_number(job.source.data, job.source.dtype, from + k) : 0.0F;
                memcpy(at + 4 * place, &value, 4);
            } else {
                const auto value = static_cast<uint16_t>(k < columns ? as_half(job.source, from + k, format) : 0);
                memcpy(at + 2 * place, &value, 2);
            }
        }
    }
    clear_padding(job, layout, panel);
}

// Sixteen rows of bf16 at once: a word holds the same pair of columns in the source and in the panel.
bool pack_bf16_words(const Packing& job, const Layout& layout, int64_t panel) {
    const Lanes lanes = lanes_of(job, panel);
    const bool whole = lanes.begin == 0 && lanes.end == kPanel && job.weight.columns % 2 == 0;
    if (!whole || job.weight.format != NUMASERVE_BF16 || job.source.dtype != NUMASERVE_BF16) {
        return false;
    }
    unsigned char* data = panel_data(job, layout, panel);
    const auto* source = static_cast<const unsigned char*>(job.source.data) + lanes.first * job.source.stride * 2;
    for (int64_t pair = 0; pair < layout.pairs; ++pair) {
        for (int64_t lane = 0; lane < kPanel; ++lane) {
            memcpy(data + pair * 64 + lane * 4, source + lane * job.source.stride * 2 + pair * 4, 4);
        }
    }
    return true;
}

void pack_team(const Team& team, const void* argument) {
    const auto& job = *static_cast<const Packing*>(argument);
    const Layout layout = packed::layout_of(job.weight);
    const Range panels = panels_of(job, team);
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
        if (!pack_bf16_words(job, layout, panel)) {
            pack_panel(job, layout, panel);
        }
    }
}

void put_integer(const Packing& job, const Layout& layout, unsigned char* data, int64_t lane, int64_t k, int value) {
    if (job.weight.format == NUMASERVE_INT8) {
        data[k / 2 * layout.pair_bytes + k % 2 * kPanel + lane] = static_cast<unsigned char>(static_cast<int8_t>(value));
        return;
    }
    const packed::Nibble nibble = packed::nibble_of(lane, k);
    unsigned char& byte = data[nibble.byte];
    byte = static_cast<unsigned char>((byte & ~(15 << nibble.shift)) | value << nibble.shift);
}

// Fills up a lane behind its last column.
void pad_columns(const Packing& job, const Layout& layout, unsigned char* data, int64_t lane, int value) {
    for (int64_t k = job.weight.columns; k < 2 * (layout.panel_bytes / layout.pair_bytes); ++k) {
        put_integer(job, layout, data, lane, k, value);
    }
}

// How one group of weights becomes integers: value = round(weight / scale) + zero, kept within [low, high].
struct Rounding {
    float scale;
    int zero;
    int low;
    int high;

    int operator()(float weight) const {
        const float value = std::nearbyintf(weight / scale) + static_cast<float>(zero);
        // A comparison that NaN fails first, so that it becomes the lowest value and not undefined.
        return !(value > static_cast<float>(low)) ? low : value > static_cast<float>(high) ? high : static_cast<int>(value);
    }

    double error(const float* weights, int64_t count) const {
        double total = 0.0;
        for (int64_t i = 0; i < count; ++i) {
            const double restored = static_cast<double>(scale) * ((*this)(weights[i]) - zero);
            total += (restored - static_cast<double>(weights[i])) * (restored - static_cast<double>(weights[i]));
        }
        return total;
    }
};

Rounding rounding_for(int64_t format, float smallest, float largest) {
    if (format == NUMASERVE_INT8) {
        const float range = std::fmax(-smallest, largest);
        return {range > 0.0F ? range / 127.0F : 1.0F, 0, -127, 127};
    }
    const float low = std::fmin(smallest, 0.0F), high = std::fmax(largest, 0.0F);
    const float scale = high > low ? (high - low) / 15.0F : 1.0F;
    const int zero = static_cast<int>(std::fmin(std::fmax(std::nearbyintf(-low / scale), 0.0F), 15.0F));
    return {scale, zero, 0, 15};
}

Rounding choose_rounding(const Packing& job, const float* weights, int64_t count) {
    float smallest = weights[0], largest = weights[0];
    for (int64_t i = 1; i < count; ++i) {
        smallest = std::fmin(smallest, weights[i]);
        largest = std::fmax(largest, weights[i]);
    }
    Rounding best = rounding_for(job.weight.format, smallest, largest);
    double best_error = job.search > 0 ? best.error(weights, count) : 0.0;
    for (int64_t i = 1; i <= job.search; ++i) {
        // Down to 0.6 of the range: narrower ones cut off more than finer steps win back.
        const float share_of_range = 1.0F - 0.4F * static_cast<float>(i) / static_cast<float>(job.search);
        const Rounding narrower = rounding_for(job.weight.format, smallest * share_of_range, largest * share_of_range);
        const double error = narrower.error(weights, count);
        if (error < best_error) {
            best = narrower;
            best_error = error;
        }
    }
    return best;
}

void quantize_panel(const Packing& job, const Layout& layout, int64_t panel, float* row) {
    const Lanes lanes = lanes_of(job, panel);
    const int64_t columns = job.weight.columns, group_columns = 2 * layout.group_pairs;
    unsigned char* data = panel_data(job, layout, panel);
    for (int64_t lane = lanes.begin; lane < lanes.end; ++lane) {
        const int64_t from = (lanes.first + lane) * job.source.stride;
        for (int64_t k = 0; k < columns; ++k) {
            row[k] = load_number(job.source.data, job.source.dtype, from + k);
        }
        for (int64_t group = 0; group < layout.groups; ++group) {
            const int64_t begin = group * group_columns, end = least(begin + group_columns, columns);
            const Rounding rounding = choose_rounding(job, row + begin, end - begin);
            scales_at(job, layout, panel)[group * kPanel + lane] = rounding.scale;
            if (job.weight.format == NUMASERVE_INT4) {
                zeros_at(job, layout, panel)[group * kPanel + lane] = static_cast<uint8_t>(rounding.zero);
            }
            for (int64_t k = begin; k < end; ++k) {
                put_integer(job, layout, data, lane, k, rounding(row[k]));
            }
            if (end == columns) {
                pad_columns(job, layout, data, lane, rounding.zero);
            }
        }
    }
    clear_padding(job, layout, panel);
}

void quantize_team(const Team& team, const void* argument) {
    const auto& job = *static_cast<const Packing*>(argument);
    const Layout layout = packed::layout_of(job.weight);
    const Range panels = panels_of(job, team);
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
        quantize_panel(job, layout, panel, reinterpret_cast<float*>(team.own));
    }
}

void pack_quantized_team(const Team& team, const void* argument) {
    const auto& job = *static_cast<const Packing*>(argument);
    const Layout layout = packed::layout_of(job.weight);
    const Range panels = panels_of(job, team);
    const int64_t columns = job.weight.columns;
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
        const Lanes lanes = lanes_of(job, panel);
        unsigned char* data = panel_data(job, layout, panel);
        for (int64_t lane = lanes.begin; lane < lanes.end; ++lane) {
            const int64_t row = lanes.first + lane;
            int zero = 0;
            for (int64_t group = 0; group < layout.groups; ++group) {
                scales_at(job, layout, panel)[group * kPanel + lane] = job.scales[row * layout.groups + group];
                if (job.weight.format == NUMASERVE_INT4) {
                    zero = job.zeros[row * layout.groups + group];
                    zeros_at(job, layout, panel)[group * kPanel + lane] = static_cast<uint8_t>(zero);
                }
            }
            for (int64_t k = 0; k < columns; ++k) {
                const uint8_t value = job.values[row * columns + k];
                put_integer(job, layout, data, lane, k, job.weight.format == NUMASERVE_INT8 ? static_cast<int8_t>(value) : value & 15);
            }
            pad_columns(job, layout, data, lane, zero);
        }
        clear_padding(job, layout, panel);
    }
}

void unpack_team(const Team& team, const void* argument) {
    const auto& job = *static_cast<const Packing*>(argument);
    const Layout layout = packed::layout_of(job.weight);
    const Range rows = share(job.count, team.index, team.size);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        for (int64_t k = 0; k < job.weight.columns; ++k) {
            job.unpacked[r * job.weight.columns + k] = packed::weight_at(job.weight, layout, job.first_row + r, k);
        }
    }
}

bool check_rows(const numaserve_pool* pool, const numaserve_weight& weight, int64_t first_row, int64_t count) {
    if (pool == nullptr) {
        set_error("pool: is null");
        return false;
    }
    if (!check_weight("weight", weight)) {
        return false;
    }
    if (first_row < 0 || count < 0 || first_row > weight.rows - count) {
        set_error("rows %lld to %lld are not among the weight's %lld", static_cast<long long>(first_row),
                  static_cast<long long>(first_row + count), static_cast<long long>(weight.rows));
        return false;
    }
    return true;
}

bool is_integer(int64_t format) { return format == NUMASERVE_INT8 || format == NUMASERVE_INT4; }

int run(numaserve_pool* pool, TeamFunction function, const Packing& job, size_t own_bytes) {
    return run_team(pool, function, &job, 0, own_bytes) ? 0 : -1;
}

}  // namespace
}  // namespace numaserve

using numaserve::Packing;
using numaserve::set_error;

extern "C" {

int64_t numaserve_packed_bytes(int64_t format, int64_t group, int64_t rows, int64_t columns) {
    return numaserve::check_format(format, group, rows, columns) ? packed::layout_of(format, group, rows, columns).bytes : -1;
}

int numaserve_pack(numaserve_pool* pool, const numaserve_array* source, int64_t first_row, int64_t count,
                   const numaserve_weight* target) {
    if (!numaserve::check_rows(pool, *target, first_row, count) ||
        !numaserve::check_array("source", *source, count, target->columns)) {
        return -1;
    }
    if (numaserve::is_integer(target->format)) {
        set_error("format: numaserve_pack rounds to no integers");
        return -1;
    }
    const Packing job{*source, nullptr, nullptr, nullptr, first_row, count, 0, *target, nullptr};
    return numaserve::run(pool, numaserve::pack_team, job, 0);
}

int numaserve_quantize(numaserve_pool* pool, const numaserve_array* source, int64_t first_row, int64_t count, int64_t search,
                       const numaserve_weight* target) {
    if (!numaserve::check_rows(pool, *target, first_row, count) ||
        !numaserve::check_array("source", *source, count, target->columns)) {
        return -1;
    }
    if (!numaserve::is_integer(target->format) || search < 0) {
        set_error(search < 0 ? "search: is negative" : "format: is not one of integers");
        return -1;
    }
    const Packing job{*source, nullptr, nullptr, nullptr, first_row, count, search, *target, nullptr};
    return numaserve::run(pool, numaserve::quantize_team, job, static_cast<size_t>(target->columns) * sizeof(float));
}

int numaserve_pack_quantized(numaserve_pool* pool, const void* values, const float* scales, const uint8_t* zeros,
                             int64_t first_row, int64_t count, const numaserve_weight* target) {
    if (!numaserve::check_rows(pool, *target, first_row, count)) {
        return -1;
    }
    const bool wants_zeros = target->format == NUMASERVE_INT4;
    if (!numaserve::is_integer(target->format) || values == nullptr || scales == nullptr || (zeros != nullptr) != wants_zeros) {
        set_error("values, scales and (int4 alone) zeros must be given for a format of integers");
        return -1;
    }
    const Packing job{{}, static_cast<const uint8_t*>(values), scales, zeros, first_row, count, 0, *target, nullptr};
    return numaserve::run(pool, numaserve::pack_quantized_team, job, 0);
}

int numaserve_unpack(numaserve_pool* pool, const numaserve_weight* weight, int64_t first_row, int64_t count, float* target) {
    if (!numaserve::check_rows(pool, *weight, first_row, count)) {
        return -1;
    }
    const Packing job{{}, nullptr, nullptr, nullptr, first_row, count, 0, *weight, target};
    return numaserve::run(pool, numaserve::unpack_team, job, 0);
}

}  // extern "C"
