// Macros for the available instruction sets, and prefetching.
#pragma once

#include "common/tensor.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define YGG_AVX2 1
#endif
#if defined(YGG_AVX2) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define YGG_AVX512 1
#endif
#if defined(YGG_AVX512) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define YGG_AMX 1
#endif

namespace yggdrasil {

#ifdef YGG_AVX2
// Prefetches a cache line into the L2 cache. A prefetch into L1 would occupy one of its few line fill buffers, so fewer
// lines could be in flight. NOTE: GCC drops the intrinsic in functions that it considers free of side effects.
inline void prefetch_l2(const void* line) { asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(line))); }
#endif

}  // namespace yggdrasil
