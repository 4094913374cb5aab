// CUDA's functions that expressions of the tests use, for the CPU. They are exact, and their order of rounding is NumPy's.
#pragma once
#include <cmath>

inline float __expf(float x) { return expf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
