// Refuses operations whose sizes, types or pointers cannot be right, before any thread touches memory. Each sets the error.
#pragma once

#include "numaserve_kernels.h"

namespace numaserve {

bool check_format(int64_t format, int64_t group, int64_t rows, int64_t columns);
bool check_weight(const char* name, const numaserve_weight& weight);
bool check_array(const char* name, const numaserve_array& array, int64_t rows, int64_t columns);
bool check_operation(const numaserve_operation& operation);

}  // namespace numaserve
