// Quantised linears with vectors of 256 bits. Without VNNI, products of bytes are added up in 16 bits as long as they
// cannot overflow, then in 32. Sums of a chunk are the same integers, and are weighed in the same order, as in
// quantised_linear.h: to the same bits.
#pragma once

#include "quantised/quantised_input.h"

namespace yggdrasil {

#if defined(YGG_AVX2) && !defined(YGG_VNNI)
constexpr int64_t kFetchAhead = 8192;  // bytes of the stream of weights

// Vector `vector` of a chunk, of eight outputs: its values from 0 on.
template <typename F>
[[gnu::always_inline]] inline __m256i widened(const uint8_t* values, int vector, int half) {
  const auto at = [&](int64_t place) __attribute__((always_inline)) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + place)); };
  if constexpr (F::kBits == 8) return at(64 * vector + 32 * half);
  const __m256i nibbles = at(vector % 4 * 64 + 32 * half);
  const __m256i low = _mm256_and_si256(vector < 4 ? nibbles : _mm256_srli_epi16(nibbles, 4), _mm256_set1_epi8(15));
  if constexpr (F::kIsTable) return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kCodes))), low);
  if constexpr (F::kBits == 5) {
    int32_t fifths;  // byte b of the vector has the b-th bit
    std::memcpy(&fifths, values + kNibbleBytes + 8 * vector + 4 * half, sizeof fifths);
    const __m256i of_bytes = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i spread_out = _mm256_shuffle_epi8(_mm256_set1_epi32(fifths), of_bytes), own = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread_out, own), own);
    return _mm256_or_si256(low, _mm256_and_si256(is_set, _mm256_set1_epi8(16)));
  }
  if constexpr (F::kBits == 6) {
    const __m256i pairs = at(kNibbleBytes + 64 * (vector / 4) + 32 * half);
    const int place = vector % 4;  // of four pairs of bits in each byte
    const __m256i moved = place < 2 ? _mm256_slli_epi16(pairs, 4 - 2 * place) : _mm256_srli_epi16(pairs, 2 * place - 4);
    return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(48)));
  }
  return low;
}

inline __m256 halves_to_floats(const uint8_t* halves) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves))); }
inline __m128i load_8(const uint8_t* bytes) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)); }

struct HalfScales {
  __m256 scale[2], minimum;  // a scale a half of the chunk's inputs
};

// Those of eight outputs of a chunk.
template <typename F>
[[gnu::always_inline]] inline HalfScales half_scales(const uint8_t* header, int64_t chunk, int half) {
  HalfScales found{};
  const int lane = half * kLanes / 2;
  if constexpr (F::kScaling == Scaling::plain) {
    found.scale[0] = halves_to_floats(header + 2 * (chunk * kLanes + lane));
  } else if constexpr (F::kScaling == Scaling::power) {
    const __m128i powers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(header + 2 * lane));
    found.scale[0] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(powers), 16));
  } else if constexpr (F::kScaling == Scaling::affine) {
    found.scale[0] = halves_to_floats(header + 2 * (2 * chunk * kLanes + lane));
    found.minimum = halves_to_floats(header + 2 * ((2 * chunk + 1) * kLanes + lane));
  } else if constexpr (F::kScaling == Scaling::nested) {
    const uint8_t* multiples = header + (4 + 2 * chunk) * kLanes + lane;
    found.scale[0] = halves_to_floats(header + 2 * lane) * _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_8(multiples)));
    const __m256 whole = _mm256_setzero_ps() - halves_to_floats(header + 2 * (kLanes + lane));
    found.minimum = whole * _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_8(multiples + kLanes)));
  } else {
    const uint8_t* multiples = header + (2 + 2 * chunk) * kLanes + lane;
    for (int i = 0; i < 2; ++i)
      found.scale[i] = halves_to_floats(header + 2 * lane) * _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_8(multiples + i * kLanes)));
  }
  return found;
}

// A side of a chunk as it lies in memory: every use of a vector widens it.
template <typename F>
struct PackedSide {
  const uint8_t *header, *values;
  int64_t chunk;

  [[gnu::always_inline]] __m256i wide(int vector, int half) const { return widened<F>(values, vector, half); }
  [[gnu::always_inline]] HalfScales scales(int half) const { return half_scales<F>(header, chunk, half); }
};

// The same, widened once for all rows of a tile.
template <typename F>
class WideSide {
 public:
  [[gnu::always_inline]] WideSide(const PackedSide<F>& side, __m256i* memory) : memory_(memory) {
#pragma GCC unroll 16
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 16
      for (int vector = 0; vector < 8; ++vector) memory[2 * vector + half] = side.wide(vector, half);
      const HalfScales scales = side.scales(half);
      auto* floats = reinterpret_cast<float*>(memory + 16 + 3 * half);
      _mm256_store_ps(floats, scales.scale[0]);
      if constexpr (F::kScaling == Scaling::halved) _mm256_store_ps(floats + 8, scales.scale[1]);
      if constexpr (F::kHasMinimum) _mm256_store_ps(floats + 16, scales.minimum);
    }
    // NOTE: GCC would keep in registers what it has just stored, and spill it in turn with the sums.
    asm("" : "+r"(memory_) : : "memory");
  }

  [[gnu::always_inline]] __m256i wide(int vector, int half) const { return memory_[2 * vector + half]; }
  [[gnu::always_inline]] HalfScales scales(int half) const {
    const auto* floats = reinterpret_cast<const float*>(memory_ + 16 + 3 * half);
    return {{_mm256_load_ps(floats), _mm256_load_ps(floats + 8)}, _mm256_load_ps(floats + 16)};
  }

  static constexpr int kVectors = 22;

 private:
  __m256i* memory_;
};

#ifdef YGG_SHORT_VNNI
inline __m256i add_products_of_bytes(__m256i sums, __m256i values, __m256i inputs) {
#ifdef __AVXVNNI__
  return _mm256_dpbusd_avx_epi32(sums, values, inputs);
#else
  return _mm256_dpbusd_epi32(sums, values, inputs);
#endif
}

template <typename F>
constexpr bool kIsSigned = false;  // whether multiply_bytes takes the offset away from every value

// Products of vectors [First, Last) of H halves of a panel with R rows.
template <typename F, int R, int H, int First, int Last, typename Side>
[[gnu::always_inline]] inline void multiply_bytes(const Side& side, int first_half, const int8_t* x, __m256i (&dots)[H][R]) {
#pragma GCC unroll 16
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) dots[h][r] = _mm256_setzero_si256();
#pragma GCC unroll 16
  for (int v = First; v < Last; ++v) {
    __m256i wide[H];
#pragma GCC unroll 16
    for (int h = 0; h < H; ++h) wide[h] = side.wide(v, first_half + h);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, x + r * kChunk + 4 * v, sizeof four);
      const __m256i inputs = _mm256_set1_epi32(four);
#pragma GCC unroll 16
      for (int h = 0; h < H; ++h) dots[h][r] = add_products_of_bytes(dots[h][r], wide[h], inputs);
    }
  }
}

template <typename F>
constexpr int kHalvesAtOnce = 2;  // as many as sixteen registers hold sums for
#else
template <typename F>
constexpr bool kIsSigned = F::kBits == 8;
template <typename F>
constexpr int kHalvesAtOnce = F::kBits == 4 ? 2 : 1;

// Vectors whose products, two of them in each sum of 16 bits, cannot overflow.
template <typename F>
constexpr int kAddedInWords = 32767 / (2 * 127 * F::kMost);

// NOTE: additions of integers may come in any order, and GCC takes all products first, which leave the registers. A sum
// that it cannot see through keeps them in turn.
[[gnu::always_inline]] inline __m256i in_turn(__m256i sum) {
  asm("" : "+x"(sum));
  return sum;
}

// Products of vectors [First, Last) of H halves of a panel with R rows; values of 8 bits are signed ones here.
template <typename F, int R, int H, int First, int Last, typename Side>
[[gnu::always_inline]] inline void multiply_bytes(const Side& side, int first_half, const int8_t* x, __m256i (&dots)[H][R]) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i words[H][R];
#pragma GCC unroll 16
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) words[h][r] = dots[h][r] = _mm256_setzero_si256();
#pragma GCC unroll 16
  for (int v = First; v < Last; ++v) {
    __m256i wide[H], size[H];
#pragma GCC unroll 16
    for (int h = 0; h < H; ++h) {
      wide[h] = side.wide(v, first_half + h);
      if constexpr (F::kBits == 8) {  // a byte of each sign: the product takes the size of one, the other its sign
        wide[h] = _mm256_xor_si256(wide[h], _mm256_set1_epi8(static_cast<char>(F::kOffset)));
        size[h] = _mm256_abs_epi8(wide[h]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, x + r * kChunk + 4 * v, sizeof four);
      const __m256i inputs = _mm256_set1_epi32(four);
#pragma GCC unroll 16
      for (int h = 0; h < H; ++h) {
        if constexpr (F::kBits == 8) {
          const __m256i products = _mm256_maddubs_epi16(size[h], _mm256_sign_epi8(inputs, wide[h]));
          dots[h][r] = in_turn(_mm256_add_epi32(dots[h][r], _mm256_madd_epi16(products, ones)));
        } else {
          words[h][r] = in_turn(_mm256_add_epi16(words[h][r], _mm256_maddubs_epi16(wide[h], inputs)));
          if ((v - First + 1) % kAddedInWords<F> == 0 || v + 1 == Last) {
            dots[h][r] = in_turn(_mm256_add_epi32(dots[h][r], _mm256_madd_epi16(words[h][r], ones)));
            words[h][r] = _mm256_setzero_si256();
          }
        }
      }
    }
  }
}

#endif

// Adds a chunk of a panel to the sums of R rows, [R, lanes], eight or all of its outputs at a time.
template <typename F, int R, int H, typename Side>
[[gnu::always_inline]] inline void add_outputs(const Side& side, int first_half, uint8_t* input, int64_t rows, int64_t row, float* out) {
  constexpr bool kIsHalved = F::kScaling == Scaling::halved;
  const int8_t* x = InputChunk::values(input, rows) + row * kChunk;
  const int32_t* counts = InputChunk::counts(input, rows) + row;
  const float *row_scales = InputChunk::scales(input, rows) + row, *row_sums = InputChunk::sums(input, rows) + row;
  const auto weigh = [&](const __m256i(&dots)[H][R], int part, const int32_t* counts) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int h = 0; h < H; ++h) {
      const HalfScales scales = side.scales(first_half + h);
      float* sums = out + (first_half + h) * kLanes / 2;
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r, sums += kLanes) {
        __m256i dot = dots[h][r];
        if constexpr (F::kOffset != 0 && !kIsSigned<F>) dot = _mm256_add_epi32(dot, _mm256_set1_epi32(counts[r] << F::kOffsetBits));
        const __m256 scale = scales.scale[part] * _mm256_broadcast_ss(row_scales + r);
        __m256 sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, _mm256_load_ps(sums));
        if constexpr (F::kHasMinimum) sum = _mm256_fmadd_ps(scales.minimum, _mm256_broadcast_ss(row_sums + r), sum);
        _mm256_store_ps(sums, sum);
      }
    }
  };
  __m256i dots[H][R];
  multiply_bytes<F, R, H, 0, kIsHalved ? 4 : 8>(side, first_half, x, dots);
  weigh(dots, 0, counts + (kIsHalved ? rows : 0));
  if constexpr (kIsHalved) {
    multiply_bytes<F, R, H, 4, 8>(side, first_half, x, dots);
    weigh(dots, 1, counts + 2 * rows);
  }
}

template <typename F, int R, typename Side>
[[gnu::always_inline]] inline void add_rows(const Side& side, uint8_t* input, int64_t rows, int64_t row, float* out) {
  constexpr int kHalves = std::is_same_v<Side, WideSide<F>> ? 2 : kHalvesAtOnce<F>;
#pragma GCC unroll 2
  for (int half = 0; half < 2; half += kHalves) add_outputs<F, R, kHalves>(side, half, input, rows, row, out + row * kLanes);
}

template <typename F, int R>
void quantised_tile(const uint8_t* pair, uint8_t* input, int64_t groups, int64_t rows, float* out) {
  constexpr int64_t kShare = F::kGroup / F::kChunks;  // of the stream, fetched with every chunk
  __m256i memory[WideSide<F>::kVectors];
  std::fill(out, out + 2 * rows * kLanes, 0.0f);
  for (int64_t group = 0; group < groups; ++group, pair += F::kGroup) {
    for (int64_t chunk = 0; chunk < F::kChunks; ++chunk, input += rows * InputChunk::kBytes) {
      for (int64_t line = 0; line < kShare; line += 64) fetch_ahead(pair + chunk * kShare + kFetchAhead + line);
      for (int p = 0; p < 2; ++p) {
        const PackedSide<F> side{pair + F::header_place(p), pair + F::values_place(p, chunk), chunk};
        float* sums = out + p * rows * kLanes;
        if (rows == R) {
          add_rows<F, R>(side, input, rows, 0, sums);
        } else {
          const WideSide<F> wide(side, memory);
#pragma GCC unroll 1
          for (int64_t row = 0; row < rows; row += R) add_rows<F, R>(wide, input, rows, row, sums);
        }
      }
    }
  }
}
#endif

}  // namespace yggdrasil
