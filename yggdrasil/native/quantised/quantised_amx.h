// Linear layers over quantised weights with AMX: a chunk of a panel, unpacked to signed bytes, is multiplied with up to
// 16 rows at once.
//
// A group's products are accumulated as integers, then scaled and added as in quantised_linear.h. The results are
// bitwise equal, so the number of rows may decide which kernel is used.
#pragma once

#include "common/amx.h"
#include "quantised/quantised_linear.h"

namespace yggdrasil {

#if defined(YGG_AMX) && defined(YGG_VNNI)
#define YGG_AMX_INT8 1
constexpr int64_t kMinAmxRows = 6;  // AMX is faster from this number of rows on

// Formats with a scale for each half of a chunk would need twice as many tile operations of half the size, which takes
// longer than AVX-512.
template <typename F>
constexpr bool kSuitsAmx = F::kScaling != Scaling::halved;

// Multiplies a tile of rows with pairs of panels, one chunk per step, as a software pipeline. While the products of a
// step are computed, the sums of the previous step are stored, the sums of the step before are scaled and added, and
// the next chunk is unpacked. So no instruction depends on the one just before it.
template <typename F, int R>
class AmxSteps {
 public:
  // `tile` has `rows` rounded rows, a multiple of R. The first `count` of them are the layer's rows from `row` on.
  AmxSteps(const QuantisedJob& job, uint8_t* tile, int64_t rows, int64_t row, int64_t count)
      : job_(job), tile_(tile), rows_(rows), row_(row), count_(count), chunks_(job.inputs / kChunk) {}

  void run(int64_t begin, int64_t end) {
    // Tiles 0 and 1 hold inputs and weights, 2 and 3 the sums of both sides in even steps, 4 and 5 in odd steps.
    AmxTiles amx;
    amx.shape(0, rows_, kChunk);
    amx.shape(1, kChunk / 4, kTileBytes);
    for (const int sums : {2, 3, 4, 5}) amx.shape(sums, rows_, kTileBytes);
    amx.configure();
    stream_ = job_.packed + begin * F::groups(job_.inputs) * F::kGroup;
    steps_ = (end - begin) * chunks_;
    pair_ = begin;
    unpack<0>(0);
    unpack<1>(0);
    for (int64_t step = 0; step < steps_ + 2; step += 2) {
      run_step<0, 0>(step);
      run_step<0, 1>(step);
      run_step<1, 0>(step + 1);
      run_step<1, 1>(step + 1);
    }
  }

 private:
  // One side of a step. The steps after the last chunk drain the pipeline.
  template <int Parity, int Side>
  [[gnu::always_inline]] void run_step(int64_t step) {
    if (step < steps_) {
      if constexpr (Side == 0) load_tile<0>(InputChunk::values(input_of(multiplied_), rows_), kChunk);
      load_tile<1>(unpacked_[Parity][Side], kTileBytes);
      zero_tile<2 + 2 * Parity + Side>();
      add_int8_products<2 + 2 * Parity + Side, 0, 1>();
      if constexpr (Side == 1) multiplied_ = multiplied_ + 1 < chunks_ ? multiplied_ + 1 : 0;
    }
    store_tile<4 - 2 * Parity + Side>(sums_[1 - Parity][Side], kTileBytes);
    if (step + 1 < steps_) unpack<Side>(step + 1);
    if (step >= 2 && step - 2 < steps_) {
      scale_sums<Side>(step - 2, sums_[Parity][Side]);
      if (Side == 1 && ++scaled_ == chunks_) store_outputs();
    }
  }

  const uint8_t* group_of(int64_t step) const { return stream_ + step / F::kChunks * F::kGroup; }
  uint8_t* input_of(int64_t chunk) const { return tile_ + chunk * rows_ * InputChunk::kBytes; }

  template <int Side>
  [[gnu::always_inline]] void unpack(int64_t step) {
    if constexpr (Side == 0) prefetch_chunk<F, R>(stream_ + step * (F::kGroup / F::kChunks));
    __m512i unpacked[8];
    unpack_chunk<F>(group_of(step) + F::values_offset(Side, step % F::kChunks), unpacked);
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) {
      if constexpr (F::kOffset != 0) unpacked[v] = _mm512_sub_epi8(unpacked[v], _mm512_set1_epi8(static_cast<char>(F::kOffset)));
      _mm512_store_si512(unpacked_[step % 2][Side] + v * kTileBytes, unpacked[v]);
    }
  }

  template <int Side>
  [[gnu::always_inline]] void scale_sums(int64_t step, const int32_t* sums) {
    const uint8_t* header = group_of(step) + F::header_offset(Side);
    const int64_t chunk = step % F::kChunks;
    const ChunkScales scales = load_chunk_scales<F>(header, chunk);
    // NOTE: vector stores may alias members, so the compiler would reload members after each store; hence the local
    // copies.
    const int64_t rows = rows_;
    const auto has_previous = static_cast<__mmask16>(scaled_ == 0 ? 0 : 0xffff);
    const float *row_scales = InputChunk::scales(input_of(scaled_), rows), *row_sums = InputChunk::sums(input_of(scaled_), rows);
    float* out = out_ + Side * rows * kLanes;
    if constexpr (F::kIsNested) {
      int32_t* group = group_ + Side * rows * kLanes;
      const auto has_group_sums = static_cast<__mmask16>(chunk == 0 ? 0 : 0xffff);
      for (int64_t offset = 0; offset < rows * kLanes; offset += kLanes) {
        const __m512i products = _mm512_mullo_epi32(_mm512_load_si512(sums + offset), scales.multiples[0]);
        _mm512_store_si512(group + offset, _mm512_add_epi32(products, _mm512_maskz_load_epi32(has_group_sums, group + offset)));
      }
      if (scaled_ + 1 == F::kChunks) std::fill(out, out + rows * kLanes, 0.0f);  // the first group
      if (chunk + 1 == F::kChunks) add_group<F>(header, input_of(scaled_ - chunk), rows, group, out);
      return;
    }
#pragma GCC unroll 1
    for (int64_t row = 0; row < rows; row += R, row_scales += R, row_sums += R, sums += R * kLanes, out += R * kLanes) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const __m512 scale = _mm512_mul_ps(scales.scale, _mm512_set1_ps(row_scales[r])), previous = _mm512_maskz_load_ps(has_previous, out + r * kLanes);
        __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums + r * kLanes)), scale, previous);
        if constexpr (F::kHasMinimum) sum = _mm512_fmadd_ps(scales.minimum, _mm512_set1_ps(row_sums[r]), sum);
        _mm512_store_ps(out + r * kLanes, sum);
      }
    }
  }

  [[gnu::noinline]] void store_outputs() {
    store_pair(job_, row_, count_, rows_, pair_++, out_);
    scaled_ = 0;
  }

  const QuantisedJob& job_;
  uint8_t* tile_;
  int64_t rows_, row_, count_, chunks_, steps_ = 0;
  const uint8_t* stream_ = nullptr;  // packed weights, from the first pair on
  int64_t pair_ = 0, multiplied_ = 0, scaled_ = 0;  // the pair whose sums are scaled; the chunks of inputs of the multiply and the scale stage
  alignas(64) float out_[2 * kMaxTileRows * kLanes];
  alignas(64) int32_t group_[F::kIsNested ? 2 * kMaxTileRows * kLanes : 1];  // sums of a group
  alignas(64) uint8_t unpacked_[2][2][kChunk * kLanes];      // unpacked weights of two chunks, both sides: [inputs / 4, lanes, 4]
  alignas(64) int32_t sums_[2][2][kTileRows * kLanes];  // integer sums of two steps, both sides
};
#endif

}  // namespace yggdrasil
