// Rounding of a step's rows to int8 for quantised linear layers, with one scale per block of the weights' format, 32 or 256
// inputs.
//
// The rounding depends on the row alone, so it is the same at every width.
#pragma once

#include <cmath>
#include <limits>

#include "common/input_rows.h"
#include "quantised/quantised_format.h"

namespace yggdrasil {

constexpr int64_t kMostRows = 16;  // that meet a panel together
constexpr int kLargeBlock = 256;   // inputs of one scale in the larger of the two kinds of blocks

// A tile of M rows is a sequence of chunks; in a chunk every item lies M times, once a row. Negative sums of values fit a word.
struct InputChunk {
  static constexpr int64_t kBytes = kChunk + 4 * 4;  // a row

  static int8_t* values(uint8_t* chunk, int64_t) { return reinterpret_cast<int8_t*>(chunk); }
  static float* scales(uint8_t* chunk, int64_t m) { return reinterpret_cast<float*>(chunk + m * kChunk); }
  static float* sums(uint8_t* chunk, int64_t m) { return scales(chunk, m) + m; }  // of the rounded inputs, scaled
  // Sums of the values, negative: of the whole chunk; and two words, of its first and second half.
  static int32_t* counts(uint8_t* chunk, int64_t m) { return reinterpret_cast<int32_t*>(sums(chunk, m) + m); }
  static int32_t* half_counts(uint8_t* chunk, int64_t m) { return counts(chunk, m) + m; }
  // Blocks of 256 alone, in place of `counts`: two words, of the chunk before and of this one, where its number is odd.
  static int32_t* pair_counts(uint8_t* chunk, int64_t m) { return counts(chunk, m); }
  // Vectors of 256 bits and blocks of 256 alone, in place of `sums` and `half_counts`: the sums of a half, negative, times the
  // offset of Q6_K. Without VNNI these, and `counts`, are two words: the sums of the half's even and of its odd pairs of values.
  static int32_t* half_starts(uint8_t* chunk, int64_t m, int half) { return counts(chunk, m) + (half ? m : -m); }
};

#if defined(YGG_AVX512) && defined(__AVX512VNNI__)
#define YGG_VNNI 1
#elif defined(YGG_AVX2) && (defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__)))
#define YGG_SHORT_VNNI 1  // vectors of 256 bits, as processors for desktops and laptops have them
#endif

#ifdef YGG_SHORT_VNNI
constexpr bool kMultipliesBytes = true;  // of any size, four at a time
#else
constexpr bool kMultipliesBytes = false;
#endif

// Rounds a block of up to four rows of a tile, from `row` on; where a number is not finite the row's scale is not a
// number, and so is every output. Blocks are of 32 or 256 inputs.
#ifdef YGG_VNNI
inline __m128i sums_of(const __m128i (&bytes)[4]) {  // of each row's 16
  __m128i fours[4];
  for (int r = 0; r < 4; ++r) fours[r] = _mm_dpbusd_epi32(_mm_setzero_si128(), _mm_set1_epi8(1), bytes[r]);
  return _mm_hadd_epi32(_mm_hadd_epi32(fours[0], fours[1]), _mm_hadd_epi32(fours[2], fours[3]));
}

inline __m128i words_of(__m128i low, __m128i high) { return _mm_mask_blend_epi16(0xaa, low, _mm_slli_epi32(high, 16)); }

template <int Inputs>
void round_four(const float (&numbers)[4][Inputs], int64_t row, int64_t count, int64_t m, uint8_t* chunk) {
  const __m512 infinite = _mm512_set1_ps(std::numeric_limits<float>::infinity());
  __m512 largest_of[4] = {};
  int odd = 0;
  for (int64_t r = 0; r < count; ++r) {
    int is_odd = 0;
    for (int i = 0; i < Inputs; i += 16) {
      const __m512 size = _mm512_abs_ps(_mm512_load_ps(numbers[r] + i));
      largest_of[r] = _mm512_max_ps(largest_of[r], size);
      is_odd |= _mm512_cmp_ps_mask(size, infinite, _CMP_NLT_UQ);
    }
    odd |= (is_odd != 0) << r;
  }
  const __m128 largest = reduce4(quads_of(largest_of[0], largest_of[1], largest_of[2], largest_of[3], Larger{}), Larger{});
  const __m128 most = _mm_set1_ps(127.0f), inverse = _mm_maskz_div_ps(_mm_cmp_ps_mask(largest, _mm_setzero_ps(), _CMP_GT_OQ), most, largest);
  const __m128 scale = _mm_mask_mov_ps(_mm_div_ps(largest, most), static_cast<__mmask8>(odd), _mm_set1_ps(std::numeric_limits<float>::quiet_NaN()));
  alignas(16) float inverses[4];
  _mm_store_ps(inverses, inverse);
  const auto there = static_cast<__mmask8>((1 << count) - 1);
  const __m128i zero = _mm_setzero_si128();
  __m128i before = zero;
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
    _mm_mask_storeu_ps(InputChunk::scales(chunk, m) + row, there, scale);
    _mm_mask_storeu_ps(InputChunk::sums(chunk, m) + row, there, _mm_mul_ps(scale, _mm_cvtepi32_ps(_mm_sub_epi32(zero, whole))));
    _mm_mask_storeu_epi32(InputChunk::counts(chunk, m) + row, there, Inputs == kChunk ? whole : words_of(before, whole));
    _mm_mask_storeu_epi32(InputChunk::half_counts(chunk, m) + row, there, words_of(halves[0], halves[1]));
    before = whole;
  }
}
#elif defined(YGG_AVX2)
inline int32_t words_of(int32_t low, int32_t high) { return (low & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(high) << 16); }

// Writes what a chunk keeps of a row beside its values; `before` is minus the sum of the chunk before it, and then of this one.
template <int Inputs>
void note_row(uint8_t* chunk, int64_t m, int64_t row, float scale, __m256i values, int32_t& before) {
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
    const __m256i starts = kMultipliesBytes ? _mm256_slli_epi32(numbers, kBits) : _mm256_slli_epi16(words, kBits);
    InputChunk::pair_counts(chunk, m)[row] = words_of(before, whole);
    InputChunk::half_starts(chunk, m, 0)[row] = _mm256_extract_epi32(starts, 0);
    InputChunk::half_starts(chunk, m, 1)[row] = _mm256_extract_epi32(starts, 4);
  }
  before = whole;
}

template <int Inputs>
void round_four(const float (&numbers)[4][Inputs], int64_t row, int64_t count, int64_t m, uint8_t* tile) {
  const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)), infinite = _mm256_set1_ps(std::numeric_limits<float>::infinity());
  for (int64_t r = 0; r < count; ++r) {
    __m256 largest_of = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
    for (int i = 0; i < Inputs; i += 8) {
      const __m256 size = _mm256_and_ps(_mm256_load_ps(numbers[r] + i), no_sign);
      largest_of = _mm256_max_ps(largest_of, size);
      odd = _mm256_or_ps(odd, _mm256_cmp_ps(size, infinite, _CMP_NLT_UQ));
    }
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(largest_of), _mm256_extractf128_ps(largest_of, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    const float largest = _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
    const float scale = _mm256_movemask_ps(odd) ? std::numeric_limits<float>::quiet_NaN() : largest / 127.0f;
    const __m256 inverse = _mm256_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
    int32_t before = 0;
    uint8_t* chunk = tile;
    for (int first = 0; first < Inputs; first += kChunk, chunk += m * InputChunk::kBytes) {
      const auto whole = [&](int i) { return _mm256_cvtps_epi32(_mm256_load_ps(numbers[r] + first + 8 * i) * inverse); };
      const __m256i words[2] = {_mm256_packs_epi32(whole(0), whole(1)), _mm256_packs_epi32(whole(2), whole(3))};
      const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packs take turns between halves of registers
      const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[0], words[1]), in_order);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(InputChunk::values(chunk, m) + (row + r) * kChunk), bytes);
      note_row<Inputs>(chunk, m, row + r, scale, bytes, before);
    }
  }
}
#else
template <int Inputs>
void round_four(const float (&numbers)[4][Inputs], int64_t row, int64_t count, int64_t m, uint8_t* tile) {
  for (int64_t r = 0; r < count; ++r) {
    float largest = 0.0f;
    bool is_finite = true;
    for (int i = 0; i < Inputs; ++i) {
      largest = std::max(largest, std::abs(numbers[r][i]));
      is_finite = is_finite && std::isfinite(numbers[r][i]);
    }
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    const float scale = is_finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
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

// The block of this number of a tile of m rows, of which there are `count`, the i-th of them row_of(i) of the input; inverses
// are those of the rows. Rows that are not there are zeros.
template <int Inputs, typename T, typename RowOf>
void round_rows(const InputRows<T>& input, const RowOf& row_of, int64_t count, const float* inverses, int64_t m, int64_t number, uint8_t* tile) {
  uint8_t* block = tile + number * Inputs / kChunk * m * InputChunk::kBytes;
  if (count < m) std::memset(block, 0, Inputs / kChunk * m * InputChunk::kBytes);
  for (int64_t row = 0; row < count; row += 4) {
    const int64_t some = std::min<int64_t>(4, count - row);
    alignas(64) float numbers[4][Inputs];
    for (int64_t r = 0; r < some; ++r) input.read(row_of(row + r), number * Inputs, Inputs, inverses[row + r], numbers[r]);
    round_four(numbers, row, some, m, block);
  }
}

}  // namespace yggdrasil
