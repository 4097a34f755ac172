// AMX instructions: eight tiles, numbered 0 to 7, of up to 16 rows of 64 bytes.
//
// GCC's intrinsics do not declare which memory an instruction reads, so GCC may remove stores just before it as dead.
// The wrappers here declare it.
#pragma once

#include "common/simd.h"

#ifdef YGG_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace yggdrasil {

constexpr int64_t kTileRows = 16, kTileBytes = 64;

#ifdef YGG_AMX
// Request AMX state from the operating system, which must be done once per process.
inline bool has_amx() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

// A thread's use of AMX: configures and zeroes the tiles on construction, releases them on destruction.
class AmxTiles {
 public:
  AmxTiles() = default;
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
  ~AmxTiles() { asm volatile("tilerelease"); }

  void shape(int tile, int64_t rows, int64_t row_bytes) {
    shapes_.rows[tile] = static_cast<uint8_t>(rows);
    shapes_.row_bytes[tile] = static_cast<uint16_t>(row_bytes);
  }

  void configure() const { asm volatile("ldtilecfg %0" : : "m"(shapes_)); }

 private:
  struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } shapes_;
};

using AnyBytes = char[];  // an array of unknown size: the instruction accesses a whole tile

template <int Tile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
}

// Rows of a tile lie `stride` bytes apart in memory.
template <int Tile>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(Tile), "m"(*static_cast<const AnyBytes*>(from)));
}

template <int Tile>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c3, (%1,%2,1)" : "=m"(*static_cast<AnyBytes*>(to)) : "r"(to), "r"(stride), "i"(Tile));
}

// Accumulates the product of tile Rows and tile Columns in tile Sums, in float32. Pairs of bfloat16 along K are
// adjacent.
template <int Sums, int Rows, int Columns>
inline void add_bf16_products() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(Rows), "i"(Columns));
}

// As add_bf16_products for int8, with groups of four bytes adjacent along K and int32 sums.
template <int Sums, int Rows, int Columns>
inline void add_int8_products() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(Rows), "i"(Columns));
}
// As add_int8_products with int8 in tile Rows and uint8 in tile Columns.
template <int Sums, int Rows, int Columns>
inline void add_mixed_products() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(Rows), "i"(Columns));
}
#else
constexpr bool has_amx() { return false; }
#endif

}  // namespace yggdrasil
