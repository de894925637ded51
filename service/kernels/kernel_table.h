// Fills a table with the kernels of the instruction set that the including file was compiled for.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "matmul.h"
#include "sampling.h"

namespace {

constexpr numaserve::KernelTable make_table(const char* name) {
    return {name,
            matmul::scratch,
            attention::scratch,
            matmul::run,
            attention::run,
            elementwise::rms_norm,
            elementwise::rope,
            elementwise::activation,
            elementwise::add,
            elementwise::embedding,
            sampling::scratch,
            sampling::sample,
            sampling::ranking};
}

}  // namespace
