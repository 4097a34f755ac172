// Rounds a step's rows to int8 for quantised linear layers, with one scale per block of 32 or 256 inputs, the block
// size of the weights' format.
//
// The rounding depends on the row alone, so it is the same at every width.
#pragma once

#include <cmath>
#include <limits>

#include "common/input_rows.h"
#include "quantised/quantised_format.h"

namespace yggdrasil {

constexpr int64_t kMaxTileRows = 16;  // rows of a tile, which are multiplied with a panel at once
constexpr int kLargeBlock = 256;   // inputs per scale in the larger kind of blocks

// Layout of a chunk of a tile of M rows: each item is an array with one element per row. Sums are stored negated, and
// fit in 16 bits.
struct InputChunk {
  static constexpr int64_t kBytes = kChunk + 4 * 4;  // a row

  static int8_t* values(uint8_t* chunk, int64_t) { return reinterpret_cast<int8_t*>(chunk); }
  static float* scales(uint8_t* chunk, int64_t m) { return reinterpret_cast<float*>(chunk + m * kChunk); }
  static float* sums(uint8_t* chunk, int64_t m) { return scales(chunk, m) + m; }  // sums of the rounded inputs times the scale
  // Negated sums of the values: of the whole chunk (int32), and of its first and second half (two int16).
  static int32_t* counts(uint8_t* chunk, int64_t m) { return reinterpret_cast<int32_t*>(sums(chunk, m) + m); }
  static int32_t* half_counts(uint8_t* chunk, int64_t m) { return counts(chunk, m) + m; }
  // Only for blocks of 256, instead of `counts`: the negated sums of the previous and of this chunk (two int16), valid
  // in odd chunks.
  static int32_t* pair_counts(uint8_t* chunk, int64_t m) { return counts(chunk, m); }
  // Only in quantised_vector.h and for blocks of 256, instead of `sums` and `half_counts`: the negated sums of a half, times
  // the offset of Q6_K. Without VNNI these and `counts` are two int16, the sums over the even and over the odd pairs of
  // values.
  static int32_t* half_offsets(uint8_t* chunk, int64_t m, int half) { return counts(chunk, m) + (half ? m : -m); }
};

#if defined(YGG_AVX512) && defined(__AVX512VNNI__)
#define YGG_VNNI 1
#elif defined(YGG_AVX2) && (defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__)))
#define YGG_SHORT_VNNI 1  // VNNI with 256-bit vectors (AVX-VNNI), as in desktop and laptop processors
#elif defined(YGG_AVX512)
#define YGG_WIDE_WORDS 1  // AVX-512 without VNNI, as in Skylake: 512-bit vectors, sums of products in 16 bits
#endif

#ifdef YGG_SHORT_VNNI
constexpr bool kMultipliesBytes = true;  // products of four bytes are summed to 32 bits without overflow
#else
constexpr bool kMultipliesBytes = false;
#endif

// Rounds a block of 32 or 256 inputs of up to four rows of a tile, from `row` on. If an input is not finite, the row's
// scale is NaN, and so are all outputs.
#ifdef YGG_VNNI
inline __m128i sums_of(const __m128i (&bytes)[4]) {  // sums of 16 bytes of each of four rows
  __m128i fours[4];
  for (int r = 0; r < 4; ++r) fours[r] = _mm_dpbusd_epi32(_mm_setzero_si128(), _mm_set1_epi8(1), bytes[r]);
  return _mm_hadd_epi32(_mm_hadd_epi32(fours[0], fours[1]), _mm_hadd_epi32(fours[2], fours[3]));
}

inline __m128i words_of(__m128i low, __m128i high) { return _mm_mask_blend_epi16(0xaa, low, _mm_slli_epi32(high, 16)); }

template <int Inputs>
void round_four(const float (&numbers)[4][Inputs], int64_t row, int64_t count, int64_t m, uint8_t* chunk) {
  const __m512 infinity = _mm512_set1_ps(std::numeric_limits<float>::infinity());
  __m512 row_max[4] = {};
  int has_nan = 0;
  for (int64_t r = 0; r < count; ++r) {
    int row_has_nan = 0;
    for (int i = 0; i < Inputs; i += 16) {
      const __m512 size = _mm512_abs_ps(_mm512_load_ps(numbers[r] + i));
      row_max[r] = _mm512_max_ps(row_max[r], size);
      row_has_nan |= _mm512_cmp_ps_mask(size, infinity, _CMP_NLT_UQ);
    }
    has_nan |= (row_has_nan != 0) << r;
  }
  const __m128 max_abs = reduce4(reduce_quads(row_max[0], row_max[1], row_max[2], row_max[3], Max{}), Max{});
  const __m128 max_value = _mm_set1_ps(127.0f), inverse = _mm_maskz_div_ps(_mm_cmp_ps_mask(max_abs, _mm_setzero_ps(), _CMP_GT_OQ), max_value, max_abs);
  const __m128 scale = _mm_mask_mov_ps(_mm_div_ps(max_abs, max_value), static_cast<__mmask8>(has_nan), _mm_set1_ps(std::numeric_limits<float>::quiet_NaN()));
  alignas(16) float inverses[4];
  _mm_store_ps(inverses, inverse);
  const auto valid = static_cast<__mmask8>((1 << count) - 1);
  const __m128i zero = _mm_setzero_si128();
  __m128i previous = zero;
  for (int first = 0; first < Inputs; first += kChunk, chunk += m * InputChunk::kBytes) {
    __m128i bytes[2][4] = {};
    for (int64_t r = 0; r < count; ++r) {
      auto* values = reinterpret_cast<__m128i*>(InputChunk::values(chunk, m) + (row + r) * kChunk);
      for (int half = 0; half < 2; ++half) {
        const __m512 scaled = _mm512_mul_ps(_mm512_load_ps(numbers[r] + first + 16 * half), _mm512_set1_ps(inverses[r]));
        bytes[half][r] = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(scaled));
        _mm_storeu_si128(values + half, bytes[half][r]);
      }
    }
    const __m128i halves[2] = {_mm_sub_epi32(zero, sums_of(bytes[0])), _mm_sub_epi32(zero, sums_of(bytes[1]))};
    const __m128i whole = _mm_add_epi32(halves[0], halves[1]);
    _mm_mask_storeu_ps(InputChunk::scales(chunk, m) + row, valid, scale);
    _mm_mask_storeu_ps(InputChunk::sums(chunk, m) + row, valid, _mm_mul_ps(scale, _mm_cvtepi32_ps(_mm_sub_epi32(zero, whole))));
    _mm_mask_storeu_epi32(InputChunk::counts(chunk, m) + row, valid, Inputs == kChunk ? whole : words_of(previous, whole));
    _mm_mask_storeu_epi32(InputChunk::half_counts(chunk, m) + row, valid, words_of(halves[0], halves[1]));
    previous = whole;
  }
}
#elif defined(YGG_AVX2)
inline int32_t words_of(int32_t low, int32_t high) { return (low & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(high) << 16); }

// Writes a row's scale and sums to a chunk. `previous` is the negated sum of the previous chunk, and is set to that of
// this chunk.
template <int Inputs>
void store_row_sums(uint8_t* chunk, int64_t m, int64_t row, float scale, __m256i values, int32_t& previous) {
  __m256i words = _mm256_maddubs_epi16(_mm256_set1_epi8(1), values);
  words = _mm256_add_epi16(words, _mm256_shuffle_epi32(words, 0x4e));
  words = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_add_epi16(words, _mm256_shuffle_epi32(words, 0xb1)));
  const __m256i numbers = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
  const int32_t whole = _mm256_extract_epi32(numbers, 0) + _mm256_extract_epi32(numbers, 4);
  InputChunk::scales(chunk, m)[row] = scale;
  if constexpr (Inputs == kChunk) {
    const __m256i both = _mm256_add_epi16(words, _mm256_permute2x128_si256(words, words, 1));
    InputChunk::sums(chunk, m)[row] = scale * static_cast<float>(-whole);
    InputChunk::counts(chunk, m)[row] = kMultipliesBytes ? whole : _mm256_extract_epi32(both, 0);
  } else {
    constexpr int kBits = Q6_K::kOffsetBits;
    const __m256i offsets = kMultipliesBytes ? _mm256_slli_epi32(numbers, kBits) : _mm256_slli_epi16(words, kBits);
    InputChunk::pair_counts(chunk, m)[row] = words_of(previous, whole);
    InputChunk::half_offsets(chunk, m, 0)[row] = _mm256_extract_epi32(offsets, 0);
    InputChunk::half_offsets(chunk, m, 1)[row] = _mm256_extract_epi32(offsets, 4);
  }
  previous = whole;
}

template <int Inputs>
void round_four(const float (&numbers)[4][Inputs], int64_t row, int64_t count, int64_t m, uint8_t* tile) {
  const __m256 abs_mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)), infinity = _mm256_set1_ps(std::numeric_limits<float>::infinity());
  for (int64_t r = 0; r < count; ++r) {
    __m256 row_max = _mm256_setzero_ps(), has_nan = _mm256_setzero_ps();
    for (int i = 0; i < Inputs; i += 8) {
      const __m256 size = _mm256_and_ps(_mm256_load_ps(numbers[r] + i), abs_mask);
      row_max = _mm256_max_ps(row_max, size);
      has_nan = _mm256_or_ps(has_nan, _mm256_cmp_ps(size, infinity, _CMP_NLT_UQ));
    }
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(row_max), _mm256_extractf128_ps(row_max, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    const float max_abs = _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
    const float scale = _mm256_movemask_ps(has_nan) ? std::numeric_limits<float>::quiet_NaN() : max_abs / 127.0f;
    const __m256 inverse = _mm256_set1_ps(max_abs > 0.0f ? 127.0f / max_abs : 0.0f);
    int32_t previous = 0;
    uint8_t* chunk = tile;
    for (int first = 0; first < Inputs; first += kChunk, chunk += m * InputChunk::kBytes) {
      const auto whole = [&](int i) { return _mm256_cvtps_epi32(_mm256_load_ps(numbers[r] + first + 8 * i) * inverse); };
      const __m256i words[2] = {_mm256_packs_epi32(whole(0), whole(1)), _mm256_packs_epi32(whole(2), whole(3))};
      const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // pack instructions interleave the 128-bit halves of registers
      const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[0], words[1]), in_order);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(InputChunk::values(chunk, m) + (row + r) * kChunk), bytes);
      store_row_sums<Inputs>(chunk, m, row + r, scale, bytes, previous);
    }
  }
}
#else
template <int Inputs>
void round_four(const float (&numbers)[4][Inputs], int64_t row, int64_t count, int64_t m, uint8_t* tile) {
  for (int64_t r = 0; r < count; ++r) {
    float max_abs = 0.0f;
    bool is_finite = true;
    for (int i = 0; i < Inputs; ++i) {
      max_abs = std::max(max_abs, std::abs(numbers[r][i]));
      is_finite = is_finite && std::isfinite(numbers[r][i]);
    }
    const float inverse = max_abs > 0.0f ? 127.0f / max_abs : 0.0f;
    const float scale = is_finite ? max_abs / 127.0f : std::numeric_limits<float>::quiet_NaN();
    uint8_t* chunk = tile;
    for (int first = 0; first < Inputs; first += kChunk, chunk += m * InputChunk::kBytes) {
      int8_t* values = InputChunk::values(chunk, m) + (row + r) * kChunk;
      int32_t whole = 0;
      for (int i = 0; i < kChunk; ++i) {
        values[i] = is_finite ? static_cast<int8_t>(std::nearbyint(numbers[r][first + i] * inverse)) : 0;
        whole += values[i];
      }
      InputChunk::scales(chunk, m)[row + r] = scale;
      InputChunk::sums(chunk, m)[row + r] = scale * static_cast<float>(whole);
    }
  }
}
#endif

// Rounds block `block_index` of a tile of `m` rows. Row i < count of the tile is row row_of(i) of the input, with the
// inverse RMS inverses[i]; the other rows are zeros.
template <int Inputs, typename T, typename RowOf>
void round_rows(const InputRows<T>& input, const RowOf& row_of, int64_t count, const float* inverses, int64_t m, int64_t block_index, uint8_t* tile) {
  uint8_t* block = tile + block_index * Inputs / kChunk * m * InputChunk::kBytes;
  if (count < m) std::memset(block, 0, Inputs / kChunk * m * InputChunk::kBytes);
  for (int64_t row = 0; row < count; row += 4) {
    const int64_t num_rows = std::min<int64_t>(4, count - row);
    alignas(64) float numbers[4][Inputs];
    for (int64_t r = 0; r < num_rows; ++r) input.read(row_of(row + r), block_index * Inputs, Inputs, inverses[row + r], numbers[r]);
    round_four(numbers, row, num_rows, m, block);
  }
}

}  // namespace yggdrasil
