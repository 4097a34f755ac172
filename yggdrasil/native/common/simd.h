// Available instruction sets, and number formats common to all kernels.
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
// Prefetches a cache line of a stream into the second-level cache: on its way to the first level it would occupy one of
// the few miss buffers, so that fewer lines could be under way. NOTE: GCC drops calls of the intrinsic if it considers
// a function that only prefetches to have no effects.
inline void fetch_ahead(const void* line) { asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(line))); }
#endif

}  // namespace yggdrasil
