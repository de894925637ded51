// Conversions of single numbers between fp32, bf16 and fp16, rounding to nearest even. NaN stays NaN.
#pragma once

#include <cstdint>
#include <cstring>

#include "numaserve_kernels.h"

namespace {

inline float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

inline float bf16_to_float(uint16_t value) { return bits_to_float(static_cast<uint32_t>(value) << 16); }

inline uint16_t float_to_bf16(float value) {
    const uint32_t bits = float_to_bits(value);
    if ((bits & 0x7fffffffU) > 0x7f800000U) {
        return static_cast<uint16_t>(bits >> 16 | 0x40U);
    }
    return static_cast<uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

inline float f16_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000U) << 16;
    const uint32_t magnitude = half & 0x7fffU;
    if (magnitude >= 0x7c00U) {
        return bits_to_float(sign | 0x7f800000U | (magnitude & 0x3ffU) << 13);
    }
    if (magnitude < 0x400U) {
        const float value = static_cast<float>(magnitude) * 0x1p-24F;
        return sign != 0 ? -value : value;
    }
    return bits_to_float(sign | ((magnitude << 13) + (112U << 23)));
}

inline uint16_t float_to_f16(float value) {
    const uint32_t bits = float_to_bits(value);
    const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000U);
    const uint32_t magnitude = bits & 0x7fffffffU;
    if (magnitude > 0x7f800000U) {
        return static_cast<uint16_t>(sign | 0x7e00U | (magnitude >> 13 & 0x3ffU));
    }
    if (magnitude >= 0x477ff000U) {
        return static_cast<uint16_t>(sign | 0x7c00U);
    }
    if (magnitude < 0x38800000U) {
        // Adding 0.5 leaves the rounded multiple of 2^-24 in the lowest bits.
        return static_cast<uint16_t>(sign | (float_to_bits(bits_to_float(magnitude) + 0.5F) - 0x3f000000U));
    }
    return static_cast<uint16_t>(sign | (magnitude - (112U << 23) + 0xfffU + (magnitude >> 13 & 1U)) >> 13);
}

inline float load_number(const void* data, int64_t dtype, int64_t index) {
    switch (dtype) {
        case NUMASERVE_BF16:
            return bf16_to_float(static_cast<const uint16_t*>(data)[index]);
        case NUMASERVE_F16:
            return f16_to_float(static_cast<const uint16_t*>(data)[index]);
        default:
            return static_cast<const float*>(data)[index];
    }
}

inline int64_t number_bytes(int64_t dtype) { return dtype == NUMASERVE_F32 ? 4 : 2; }

}  // namespace
