// In the place of the Hopper family's PTX instructions, for host tests of what needs none of them.
#pragma once

#include "common/ptx.cuh"

inline int max(int a, int b) { return a > b ? a : b; }
