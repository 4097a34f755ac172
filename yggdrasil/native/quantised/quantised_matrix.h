// Linear layers over quantised weights with AMX: a chunk of a panel, unpacked to signed bytes, is multiplied with up to 16
// rows at once.
//
// A group's products are summed as integers, then scaled and added as in quantised_linear.h, with bitwise the same results,
// so the number of rows may decide which kernel is used.
#pragma once

#include "common/amx.h"
#include "quantised/quantised_linear.h"

namespace yggdrasil {

#if defined(YGG_AMX) && defined(YGG_VNNI)
#define YGG_AMX_INT8 1
constexpr int64_t kMatrixRows = 6;  // from which on AMX is faster

// Halves of a chunk with a scale each would take twice the steps of half the work: more time than AVX-512.
template <typename F>
constexpr bool kFitsAmx = F::kScaling != Scaling::halved;

// A tile of rows meets pairs of panels, a chunk a step, pair behind pair. While the products of a step are under way, the
// sums of the one before are stored, those of the one before that are weighed, and the next chunk is widened: no
// instruction waits for the one before it.
template <typename F, int R>
class MatrixSteps {
 public:
  // The first `count` rows of a tile of `rows`, a multiple of R, are those of the layer from `row` on.
  MatrixSteps(const QuantisedJob& job, uint8_t* tile, int64_t rows, int64_t row, int64_t count)
      : job_(job), tile_(tile), rows_(rows), row_(row), count_(count), chunks_(job.inputs / kChunk) {}

  void run(int64_t begin, int64_t end) {
    // Tiles 0 and 1 hold inputs and weights, 2 and 3 the sums of both sides in even steps, 4 and 5 those in odd ones.
    AmxTiles unit;
    unit.shape(0, rows_, kChunk);
    unit.shape(1, kChunk / 4, kTileBytes);
    for (const int sums : {2, 3, 4, 5}) unit.shape(sums, rows_, kTileBytes);
    unit.take_shapes();
    stream_ = job_.packed + begin * F::groups(job_.inputs) * F::kGroup;
    steps_ = (end - begin) * chunks_;
    pair_ = begin;
    widen<0>(0);
    widen<1>(0);
    for (int64_t step = 0; step < steps_ + 2; step += 2) {
      take<0, 0>(step);
      take<0, 1>(step);
      take<1, 0>(step + 1);
      take<1, 1>(step + 1);
    }
  }

 private:
  // A side of a step; those beyond the last chunk only finish what is under way.
  template <int Parity, int Side>
  [[gnu::always_inline]] void take(int64_t step) {
    if (step < steps_) {
      if constexpr (Side == 0) load_tile<0>(InputChunk::values(input_of(multiplied_), rows_), kChunk);
      load_tile<1>(wide_[Parity][Side], kTileBytes);
      zero_tile<2 + 2 * Parity + Side>();
      add_int8_products<2 + 2 * Parity + Side, 0, 1>();
      if constexpr (Side == 1) multiplied_ = multiplied_ + 1 < chunks_ ? multiplied_ + 1 : 0;
    }
    store_tile<4 - 2 * Parity + Side>(sums_[1 - Parity][Side], kTileBytes);
    if (step + 1 < steps_) widen<Side>(step + 1);
    if (step >= 2 && step - 2 < steps_) {
      weigh<Side>(step - 2, sums_[Parity][Side]);
      if (Side == 1 && ++weighed_ == chunks_) finish();
    }
  }

  const uint8_t* group_of(int64_t step) const { return stream_ + step / F::kChunks * F::kGroup; }
  uint8_t* input_of(int64_t chunk) const { return tile_ + chunk * rows_ * InputChunk::kBytes; }

  template <int Side>
  [[gnu::always_inline]] void widen(int64_t step) {
    if constexpr (Side == 0) fetch_share<F, R>(stream_ + step * (F::kGroup / F::kChunks));
    __m512i wide[8];
    widen_chunk<F>(group_of(step) + F::values_place(Side, step % F::kChunks), wide);
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) {
      if constexpr (F::kOffset != 0) wide[v] = _mm512_sub_epi8(wide[v], _mm512_set1_epi8(static_cast<char>(F::kOffset)));
      _mm512_store_si512(wide_[step % 2][Side] + v * kTileBytes, wide[v]);
    }
  }

  template <int Side>
  [[gnu::always_inline]] void weigh(int64_t step, const int32_t* sums) {
    const uint8_t* header = group_of(step) + F::header_place(Side);
    const int64_t chunk = step % F::kChunks;
    const WideScales scales = wide_scales<F>(header, chunk);
    // NOTE: stores of vectors may alias members, which would be read again behind each.
    const int64_t rows = rows_;
    const auto before = static_cast<__mmask16>(weighed_ == 0 ? 0 : 0xffff);
    const float *row_scales = InputChunk::scales(input_of(weighed_), rows), *row_sums = InputChunk::sums(input_of(weighed_), rows);
    float* out = out_ + Side * rows * kLanes;
    if constexpr (F::kIsNested) {
      int32_t* group = group_ + Side * rows * kLanes;
      const auto is_later = static_cast<__mmask16>(chunk == 0 ? 0 : 0xffff);
      for (int64_t place = 0; place < rows * kLanes; place += kLanes) {
        const __m512i products = _mm512_mullo_epi32(_mm512_load_si512(sums + place), scales.multiples[0]);
        _mm512_store_si512(group + place, _mm512_add_epi32(products, _mm512_maskz_load_epi32(is_later, group + place)));
      }
      if (weighed_ + 1 == F::kChunks) std::fill(out, out + rows * kLanes, 0.0f);  // the first group
      if (chunk + 1 == F::kChunks) add_group<F>(header, input_of(weighed_ - chunk), rows, group, out);
      return;
    }
#pragma GCC unroll 1
    for (int64_t row = 0; row < rows; row += R, row_scales += R, row_sums += R, sums += R * kLanes, out += R * kLanes) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const __m512 scale = _mm512_mul_ps(scales.scale, _mm512_set1_ps(row_scales[r])), known = _mm512_maskz_load_ps(before, out + r * kLanes);
        __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums + r * kLanes)), scale, known);
        if constexpr (F::kHasMinimum) sum = _mm512_fmadd_ps(scales.minimum, _mm512_set1_ps(row_sums[r]), sum);
        _mm512_store_ps(out + r * kLanes, sum);
      }
    }
  }

  [[gnu::noinline]] void finish() {
    store_pair(job_, row_, count_, rows_, pair_++, out_);
    weighed_ = 0;
  }

  const QuantisedJob& job_;
  uint8_t* tile_;
  int64_t rows_, row_, count_, chunks_, steps_ = 0;
  const uint8_t* stream_ = nullptr;  // of weights, from the first pair on
  int64_t pair_ = 0, multiplied_ = 0, weighed_ = 0;  // the pair whose sums are weighed; chunks of its rows, of both stages
  alignas(64) float out_[2 * kMostRows * kLanes];
  alignas(64) int32_t group_[F::kIsNested ? 2 * kMostRows * kLanes : 1];  // sums of a group
  alignas(64) uint8_t wide_[2][2][kChunk * kLanes];      // of two chunks, both sides: [inputs / 4, lanes, 4]
  alignas(64) int32_t sums_[2][2][kTileRows * kLanes];  // of two steps, both sides
};
#endif

}  // namespace yggdrasil
