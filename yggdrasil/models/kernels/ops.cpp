// CPU kernels of the static-shape steps: packed linear, tree attention over a static cache, cache row moves.
//
// Two properties matter more than peak rate:
//  * cost follows the weights' bytes for narrow steps (W up to about 16) and the context's real length, never the
//    cache's capacity;
//  * a row's result does not depend on how many rows travel with it. Every output is accumulated over K, and over the
//    keys in order of position, in one fixed order. Verifying a tree of W tokens therefore gives the same bits as W
//    plain steps, which is what makes bf16 output independent of the plan.
//
// Dims: W rows of a step, K inputs, N outputs, P panels of 16 outputs, Hq query heads, Hkv key heads, D head size,
//       S cache capacity, T tree slots.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define YGG_AVX512 1
#endif

namespace {

using at::BFloat16;
using at::Tensor;

constexpr int kPanel = 16;    // outputs of a packed panel: one 512-bit register of float32
constexpr int kKeyBlock = 64;  // keys that stay in the first-level cache while all rows visit them

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float widen(BFloat16 value) { return from_bits(static_cast<uint32_t>(value.x) << 16); }
inline float widen(float value) { return value; }

// ==== threads =========================================================================================================

// A step has dozens of parallel regions of a few microseconds. Chunks are claimed one by one, so a worker that the
// operating system is not running just now delays nobody: the caller takes all chunks itself. (An OpenMP region waits
// for every thread to arrive, which on a busy machine costs a scheduler's time slice, a thousand times the work.)
class Team {
 public:
  static Team& instance() {
    static Team* team = new Team;  // never destroyed: workers may outlive static destructors
    return *team;
  }

  void run(int64_t chunks, int64_t num_threads, void (*body)(void*, int64_t), void* context) {
    const std::lock_guard<std::mutex> one_region(region_);
    while (static_cast<int64_t>(workers_) < num_threads - 1) std::thread(&Team::work, this, workers_++).detach();
    body_ = body;
    context_ = context;
    wanted_.store(num_threads - 1, std::memory_order_relaxed);
    finished_.store(0, std::memory_order_relaxed);
    const uint64_t epoch = (ticket_.load(std::memory_order_relaxed) >> kEpochShift) + 1;
    ticket_.store(epoch << kEpochShift | static_cast<uint64_t>(chunks) << kCountShift, std::memory_order_release);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) ticket_.notify_all();
    claim_all(epoch);
    while (finished_.load(std::memory_order_acquire) < chunks) pause();
  }

 private:
  static constexpr int kCountShift = 20, kEpochShift = 40;  // next chunk, number of chunks, epoch
  static constexpr uint64_t kField = (1u << 20) - 1;
  // A worker waits awake through a whole drafting phase: waking a halted virtual processor costs as much as a small step.
  static constexpr std::chrono::milliseconds kAwake{5};

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  void claim_all(uint64_t epoch) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (ticket >> kEpochShift == epoch && (ticket & kField) < (ticket >> kCountShift & kField)) {
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      // The region cannot end before this chunk does, so body and context are the ones of this epoch.
      body_(context_, static_cast<int64_t>(ticket & kField));
      finished_.fetch_add(1, std::memory_order_release);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void work(int64_t id) {
    uint64_t seen = 0;
    for (;;) {
      uint64_t ticket = ticket_.load(std::memory_order_acquire);
      const auto deadline = std::chrono::steady_clock::now() + kAwake;
      while (ticket >> kEpochShift == seen && std::chrono::steady_clock::now() < deadline) {
        for (int spin = 0; spin < 64 && ticket >> kEpochShift == seen; ++spin) {
          pause();
          ticket = ticket_.load(std::memory_order_acquire);
        }
      }
      if (ticket >> kEpochShift == seen) {
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        ticket_.wait(ticket, std::memory_order_acquire);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        continue;
      }
      seen = ticket >> kEpochShift;
      if (id < wanted_.load(std::memory_order_relaxed)) claim_all(seen);
    }
  }

  std::mutex region_;
  int64_t workers_ = 0;
  void (*body_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> finished_{0};
  alignas(64) std::atomic<int64_t> wanted_{0};
  std::atomic<int> sleepers_{0};
};

// Calls body(begin, end) over [0, count) in about four chunks a thread.
template <typename Function>
void parallel(int64_t count, int64_t num_threads, const Function& body) {
  const int64_t chunks = std::min(count, 4 * num_threads);
  if (num_threads <= 1 || chunks <= 1) {
    body(0, count);
    return;
  }
  struct Region {
    const Function& body;
    int64_t count, chunks;
  } region{body, count, chunks};
  Team::instance().run(
      chunks, num_threads,
      [](void* context, int64_t chunk) {
        const Region& r = *static_cast<Region*>(context);
        r.body(r.count * chunk / r.chunks, r.count * (chunk + 1) / r.chunks);
      },
      &region);
}

// ==== packed linear ===================================================================================================
// bf16: [P, K/2, 16, 2] (pairs along K beside each other); float32: [P, K, 16].

#ifdef YGG_AVX512
inline __m512 fma_pair(__m512 acc, __m512i weights, __m512i x) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(acc, (__m512bh)weights, (__m512bh)x);
#else
  const __m512i high_mask = _mm512_set1_epi32(0xffff0000);
  acc = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(weights, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), acc);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_epi32(weights, high_mask)), _mm512_castsi512_ps(_mm512_and_epi32(x, high_mask)), acc);
#endif
}

template <int M, int NB>
void tile(const uint32_t* packed, const uint32_t* x, int64_t k_steps, bool is_bf16, int64_t panel_words, float* out) {
  __m512 acc[NB][M];
  for (int n = 0; n < NB; ++n)
    for (int m = 0; m < M; ++m) acc[n][m] = _mm512_setzero_ps();
  if (is_bf16) {
    for (int64_t k = 0; k < k_steps; ++k) {
      __m512i weights[NB];
      for (int n = 0; n < NB; ++n) weights[n] = _mm512_loadu_si512(packed + n * panel_words + k * kPanel);
      for (int m = 0; m < M; ++m) {
        const __m512i broadcast = _mm512_set1_epi32(static_cast<int>(x[m * k_steps + k]));
        for (int n = 0; n < NB; ++n) acc[n][m] = fma_pair(acc[n][m], weights[n], broadcast);
      }
    }
  } else {
    const float* floats = reinterpret_cast<const float*>(x);
    for (int64_t k = 0; k < k_steps; ++k) {
      __m512 weights[NB];
      for (int n = 0; n < NB; ++n)
        weights[n] = _mm512_loadu_ps(reinterpret_cast<const float*>(packed) + n * panel_words + k * kPanel);
      for (int m = 0; m < M; ++m) {
        const __m512 broadcast = _mm512_set1_ps(floats[m * k_steps + k]);
        for (int n = 0; n < NB; ++n) acc[n][m] = _mm512_fmadd_ps(weights[n], broadcast, acc[n][m]);
      }
    }
  }
  for (int n = 0; n < NB; ++n)
    for (int m = 0; m < M; ++m) _mm512_storeu_ps(out + (n * M + m) * kPanel, acc[n][m]);
}
#else
template <int M, int NB>
void tile(const uint32_t* packed, const uint32_t* x, int64_t k_steps, bool is_bf16, int64_t panel_words, float* out) {
  std::fill(out, out + NB * M * kPanel, 0.0f);
  for (int n = 0; n < NB; ++n) {
    const uint32_t* panel = packed + n * panel_words;
    float* block = out + n * M * kPanel;
    for (int64_t k = 0; k < k_steps; ++k) {
      for (int m = 0; m < M; ++m) {
        const uint32_t word = x[m * k_steps + k];
        float* row = block + m * kPanel;
        if (is_bf16) {
          const float low = from_bits(word << 16), high = from_bits(word & 0xffff0000u);
#pragma omp simd
          for (int j = 0; j < kPanel; ++j) {
            const uint32_t pair = panel[k * kPanel + j];
            row[j] += low * from_bits(pair << 16) + high * from_bits(pair & 0xffff0000u);
          }
        } else {
          const float value = from_bits(word);
#pragma omp simd
          for (int j = 0; j < kPanel; ++j) row[j] += value * from_bits(panel[k * kPanel + j]);
        }
      }
    }
  }
}
#endif

template <int M>
constexpr int panels_at_once() { return M <= 6 ? 4 : 3; }  // at most 24 accumulators

struct LinearJob {
  const uint32_t* packed;
  const uint32_t* x;  // [W, K words]: two bf16 or one float32 a word
  const float* bias;  // nullable
  void* out;          // [W, N]
  int64_t rows, k_steps, outputs, panel_words;
  bool is_bf16;
};

inline void store_row(const LinearJob& job, int64_t row, int64_t panel, const float* values) {
  const int64_t begin = panel * kPanel, count = std::min<int64_t>(kPanel, job.outputs - begin);
  float sums[kPanel];
  for (int j = 0; j < count; ++j) sums[j] = job.bias ? values[j] + job.bias[begin + j] : values[j];
  if (job.is_bf16) {
    BFloat16* out = static_cast<BFloat16*>(job.out) + row * job.outputs + begin;
#if defined(YGG_AVX512) && defined(__AVX512BF16__)
    if (count == kPanel) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(sums)));
      return;
    }
#endif
    for (int j = 0; j < count; ++j) out[j] = BFloat16(sums[j]);
  } else {
    std::memcpy(static_cast<float*>(job.out) + row * job.outputs + begin, sums, count * sizeof(float));
  }
}

template <int M, int NB>
void run_tile(const LinearJob& job, int64_t row, int64_t panel) {
  alignas(64) float out[NB * M * kPanel];
  tile<M, NB>(job.packed + panel * job.panel_words, job.x + row * job.k_steps, job.k_steps, job.is_bf16, job.panel_words, out);
  for (int n = 0; n < NB; ++n)
    for (int m = 0; m < M; ++m) store_row(job, row + m, panel + n, out + (n * M + m) * kPanel);
}

template <int M>
void run_panels(const LinearJob& job, int64_t row, int64_t begin, int64_t end) {
  constexpr int NB = panels_at_once<M>();
  int64_t panel = begin;
  for (; panel + NB <= end; panel += NB) run_tile<M, NB>(job, row, panel);
  for (; panel < end; ++panel) run_tile<M, 1>(job, row, panel);
}

constexpr int kMaxTile = 8;
using PanelRunner = void (*)(const LinearJob&, int64_t, int64_t, int64_t);
constexpr PanelRunner kRunners[kMaxTile + 1] = {nullptr,       run_panels<1>, run_panels<2>, run_panels<3>, run_panels<4>,
                                                run_panels<5>, run_panels<6>, run_panels<7>, run_panels<8>};

std::vector<int64_t> tile_sizes(int64_t rows) {
  const int64_t tiles = (rows + kMaxTile - 1) / kMaxTile;
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < tiles; ++i) sizes.push_back(rows * (i + 1) / tiles - rows * i / tiles);
  return sizes;
}

// Scratch that outlives a call: a step makes hundreds of calls, and none may allocate.
uint32_t* scratch_words(int64_t count) {
  static thread_local std::vector<uint32_t> words;
  if (static_cast<int64_t>(words.size()) < count) words.resize(count);
  return words.data();
}

Tensor pack_linear(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2, "weight must be [N, K]");
  TORCH_CHECK(weight.scalar_type() == at::kBFloat16 || weight.scalar_type() == at::kFloat, "weight must be bfloat16 or float32");
  const int64_t n = weight.size(0), k = weight.size(1), panels = (n + kPanel - 1) / kPanel;
  Tensor padded = at::zeros({panels * kPanel, k}, weight.options());
  padded.narrow(0, 0, n).copy_(weight);
  if (weight.scalar_type() == at::kFloat) return padded.view({panels, kPanel, k}).permute({0, 2, 1}).contiguous();
  TORCH_CHECK(k % 2 == 0, "bfloat16 packing needs an even number of inputs");
  return padded.view({panels, kPanel, k / 2, 2}).permute({0, 2, 1, 3}).contiguous();
}

// Panels that all tiles visit before the next ones, so that they are read from memory once.
constexpr int64_t kGroup = 12;

// Several layers over one input in one parallel region.
std::vector<Tensor> packed_linears(const Tensor& input, at::TensorList packed, const c10::List<std::optional<Tensor>>& biases,
                                   at::IntArrayRef out_features, int64_t num_threads) {
  const Tensor x = input.contiguous();
  const bool is_bf16 = x.scalar_type() == at::kBFloat16;
  const int64_t k = x.size(-1), rows = x.numel() / k, k_steps = is_bf16 ? k / 2 : k;
  const auto tiles = tile_sizes(rows);
  const uint32_t* words = static_cast<const uint32_t*>(x.const_data_ptr());
  std::vector<Tensor> outputs, bias_floats(packed.size());
  std::vector<LinearJob> jobs;
  std::vector<int64_t> first_group{0};
  for (size_t i = 0; i < packed.size(); ++i) {
    TORCH_CHECK(packed[i].scalar_type() == x.scalar_type(), "input and packed weights must have one dtype");
    auto sizes = x.sizes().vec();
    sizes.back() = out_features[i];
    outputs.push_back(at::empty(sizes, x.options()));
    const std::optional<Tensor> bias = biases.get(i);
    if (bias) bias_floats[i] = bias->to(at::kFloat).contiguous();
    jobs.push_back({static_cast<const uint32_t*>(packed[i].const_data_ptr()), words,
                    bias ? bias_floats[i].const_data_ptr<float>() : nullptr, outputs[i].mutable_data_ptr(), rows, k_steps,
                    out_features[i], k_steps * kPanel, is_bf16});
    const int64_t panels = (out_features[i] + kPanel - 1) / kPanel;
    first_group.push_back(first_group.back() + (panels + kGroup - 1) / kGroup);
  }
  parallel(first_group.back(), num_threads, [&](int64_t begin, int64_t end) {
    size_t i = std::upper_bound(first_group.begin(), first_group.end(), begin) - first_group.begin() - 1;
    for (int64_t group = begin; group < end; ++group) {
      while (group >= first_group[i + 1]) ++i;
      const LinearJob& job = jobs[i];
      const int64_t panel = (group - first_group[i]) * kGroup, panels = (job.outputs + kPanel - 1) / kPanel;
      int64_t first = 0;
      for (const int64_t size : tiles) {
        kRunners[size](job, first, panel, std::min(panel + kGroup, panels));
        first += size;
      }
    }
  });
  return outputs;
}

Tensor packed_linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t out_features, int64_t num_threads) {
  c10::List<std::optional<Tensor>> biases;
  biases.push_back(bias);
  return packed_linears(input, {packed}, biases, {out_features}, num_threads)[0];
}

// ==== tree attention ==================================================================================================

#ifdef YGG_AVX512
inline __m512 exp16(__m512 x) {  // Cephes polynomial; x <= 0 after the maximum is subtracted
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.3f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}
inline __m512 load16(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 load16(const BFloat16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
#endif

// Dot products of one query with four keys. One and the same order of additions for every key, wherever it lies.
#ifdef YGG_AVX512
inline __m128 reduce4(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 quads = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))),
                                     _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))));
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quads), _mm512_extractf32x8_ps(quads, 1));
  return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

inline __m512 dot_step(__m512 acc, const float* query, const float* key) {
  return _mm512_fmadd_ps(_mm512_loadu_ps(query), _mm512_loadu_ps(key), acc);
}
constexpr int64_t dot_width(const float*) { return 16; }
#ifdef __AVX512BF16__
inline __m512 dot_step(__m512 acc, const BFloat16* query, const BFloat16* key) {
  return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(query), (__m512bh)_mm512_loadu_si512(key));
}
constexpr int64_t dot_width(const BFloat16*) { return 32; }
#else
inline __m512 dot_step(__m512 acc, const BFloat16* query, const BFloat16* key) {
  return _mm512_fmadd_ps(load16(query), load16(key), acc);
}
constexpr int64_t dot_width(const BFloat16*) { return 16; }
#endif
#endif

template <typename T>
inline void dot4(const T* query, const T* const keys[4], int64_t size, float* out) {
  int64_t d = 0;
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#ifdef YGG_AVX512
  const int64_t width = dot_width(query);
  __m512 acc[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  for (; d + width <= size; d += width)
    for (int j = 0; j < 4; ++j) acc[j] = dot_step(acc[j], query + d, keys[j] + d);
  _mm_storeu_ps(sums, reduce4(acc[0], acc[1], acc[2], acc[3]));
#endif
  for (int j = 0; j < 4; ++j) {
    for (int64_t i = d; i < size; ++i) sums[j] += widen(query[i]) * widen(keys[j][i]);
    out[j] = sums[j];
  }
}

template <typename T>
inline void accumulate(float* acc, float weight, const T* value, int64_t size) {
  int64_t d = 0;
#ifdef YGG_AVX512
  const __m512 w = _mm512_set1_ps(weight);
  for (; d + 16 <= size; d += 16) _mm512_storeu_ps(acc + d, _mm512_fmadd_ps(w, load16(value + d), _mm512_loadu_ps(acc + d)));
#endif
  for (; d < size; ++d) acc[d] += weight * widen(value[d]);
}

#ifdef YGG_AVX512
// The common head sizes keep their accumulators in registers over a whole block of keys.
template <typename T, int R>
inline void accumulate_block(float* acc, const float* weights, const T* values, int64_t count) {
  __m512 sums[R];
  for (int r = 0; r < R; ++r) sums[r] = _mm512_loadu_ps(acc + 16 * r);
  for (int64_t i = 0; i < count; ++i) {
    const __m512 w = _mm512_set1_ps(weights[i]);
    for (int r = 0; r < R; ++r) sums[r] = _mm512_fmadd_ps(w, load16(values + i * R * 16 + 16 * r), sums[r]);
  }
  for (int r = 0; r < R; ++r) _mm512_storeu_ps(acc + 16 * r, sums[r]);
}
#endif

template <typename T>
inline void accumulate_keys(float* acc, const float* weights, const T* values, int64_t count, int64_t size) {
#ifdef YGG_AVX512
  if (size == 64) return accumulate_block<T, 4>(acc, weights, values, count);
  if (size == 128) return accumulate_block<T, 8>(acc, weights, values, count);
#endif
  for (int64_t i = 0; i < count; ++i) accumulate(acc, weights[i], values + i * size, size);
}

// Turns scores into weights in place and returns their sum. Lanes are fixed by the index alone.
inline float softmax_weights(float* scores, int64_t count) {
  float maximum = -std::numeric_limits<float>::infinity();
  float sum = 0.0f;
  int64_t i = 0;
#ifdef YGG_AVX512
  __m512 largest = _mm512_set1_ps(maximum);
  for (; i + 16 <= count; i += 16) largest = _mm512_max_ps(largest, _mm512_loadu_ps(scores + i));
  maximum = _mm512_reduce_max_ps(largest);
#endif
  for (; i < count; ++i) maximum = std::max(maximum, scores[i]);
  i = 0;
#ifdef YGG_AVX512
  __m512 lanes = _mm512_setzero_ps();
  for (; i < count; i += 16) {
    const __mmask16 mask = count - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (count - i)) - 1);
    const __m512 weight = _mm512_maskz_mov_ps(mask, exp16(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, scores + i), _mm512_set1_ps(maximum))));
    _mm512_mask_storeu_ps(scores + i, mask, weight);
    lanes = _mm512_add_ps(lanes, weight);
  }
  sum = _mm512_reduce_add_ps(lanes);
#else
  for (; i < count; ++i) sum += scores[i] = std::exp(scores[i] - maximum);
#endif
  return sum;
}

struct AttentionJob {
  int64_t rows, query_heads, group, head_dim, capacity, context, context_stride;
  int64_t query_head_stride, query_row_stride;
  float scale, softcap;
  const int64_t* first_key;                        // [W] first context key each row sees (its window)
  const std::vector<std::vector<int64_t>>* slots;  // [W] tree slots each row sees, in order of depth
};

inline float finish_score(const AttentionJob& job, float score) {
  score *= job.scale;
  return job.softcap > 0.0f ? job.softcap * std::tanh(score / job.softcap) : score;
}

// Scores of ``count`` keys, in fours; a last group repeats its last key.
template <typename T, typename SlotOf>
inline void score_keys(const AttentionJob& job, const T* query, const T* keys, int64_t count, const SlotOf& slot_of, float* scores) {
  for (int64_t i = 0; i < count; i += 4) {
    const T* four[4];
    float out[4];
    for (int64_t j = 0; j < 4; ++j) four[j] = keys + slot_of(std::min(i + j, count - 1)) * job.head_dim;
    dot4(query, four, job.head_dim, out);
    for (int64_t j = 0; j < std::min<int64_t>(4, count - i); ++j) scores[i + j] = finish_score(job, out[j]);
  }
}

template <typename T>
void attend_head(const AttentionJob& job, const T* query, const T* keys, const T* values, T* out, float* scratch) {
  const int64_t d = job.head_dim;
  float* sums = scratch;                          // [W, D]
  float* inverse = sums + job.rows * d;           // [W] one over the sum of weights
  float* widened = inverse + job.rows;            // [kKeyBlock, D] values of a block, for all rows
  float* weights = widened + kKeyBlock * d;       // [W, context + T], compact: context keys seen, then tree keys seen
  std::fill(sums, sums + job.rows * d, 0.0f);

  for (int64_t begin = 0; begin < job.context; begin += kKeyBlock) {
    const int64_t end = std::min(begin + kKeyBlock, job.context);
    for (int64_t row = 0; row < job.rows; ++row) {
      const int64_t first = std::max(begin, job.first_key[row]);
      float* scores = weights + row * job.context_stride - job.first_key[row];
      if (first < end)
        score_keys(job, query + row * job.query_row_stride, keys, end - first, [&](int64_t i) { return first + i; }, scores + first);
    }
  }
  for (int64_t row = 0; row < job.rows; ++row) {
    const auto& slots = (*job.slots)[row];
    const int64_t seen = job.context - job.first_key[row], count = static_cast<int64_t>(slots.size());
    float* scores = weights + row * job.context_stride;
    score_keys(job, query + row * job.query_row_stride, keys, count, [&](int64_t i) { return slots[i]; }, scores + seen);
    inverse[row] = 1.0f / softmax_weights(scores, seen + count);
  }
  for (int64_t begin = 0; begin < job.context; begin += kKeyBlock) {
    const int64_t end = std::min(begin + kKeyBlock, job.context);
    const bool is_shared = job.rows > 1;  // widening the values once pays from the second row on; the numbers are the same
    if (is_shared)
      for (int64_t i = 0; i < (end - begin) * d; ++i) widened[i] = widen(values[begin * d + i]);
    for (int64_t row = 0; row < job.rows; ++row) {
      const int64_t first = std::max(begin, job.first_key[row]);
      if (first >= end) continue;
      const float* seen_weights = weights + row * job.context_stride + first - job.first_key[row];
      if (is_shared)
        accumulate_keys(sums + row * d, seen_weights, widened + (first - begin) * d, end - first, d);
      else
        accumulate_keys(sums + row * d, seen_weights, values + first * d, end - first, d);
    }
  }
  for (int64_t row = 0; row < job.rows; ++row) {
    const auto& slots = (*job.slots)[row];
    const float* tail = weights + row * job.context_stride + job.context - job.first_key[row];
    for (size_t t = 0; t < slots.size(); ++t) accumulate_keys(sums + row * d, tail + t, values + slots[t] * d, 1, d);
    T* target = out + row * job.query_heads * d;
    for (int64_t j = 0; j < d; ++j) target[j] = static_cast<T>(sums[row * d + j] * inverse[row]);
  }
}

template <typename T>
void write_rows(const Tensor& rows, Tensor& cache, int64_t start) {  // rows [1, H, W, D] -> cache [H, S, D]
  const int64_t heads = rows.size(1), width = rows.size(2), d = rows.size(3), capacity = cache.size(1);
  const T* source = rows.const_data_ptr<T>();
  T* target = cache.mutable_data_ptr<T>();
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t w = 0; w < width; ++w)
      std::memcpy(target + (h * capacity + start + w) * d, source + h * rows.stride(1) + w * rows.stride(2), d * sizeof(T));
}

Tensor with_dense_rows(const Tensor& tensor) { return tensor.stride(-1) == 1 ? tensor : tensor.contiguous(); }

Tensor tree_attention(const Tensor& query, const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache,
                      const Tensor& offsets, const Tensor& tree_mask, double scale, int64_t window, double softcap, int64_t num_threads) {
  const Tensor q = with_dense_rows(query), k = with_dense_rows(key), v = with_dense_rows(value);
  const int64_t context = offsets.const_data_ptr<int64_t>()[0], start = offsets.const_data_ptr<int64_t>()[1];
  const int64_t rows = q.size(2), tree_slots = tree_mask.size(-1), capacity = key_cache.size(1);
  TORCH_CHECK(k.sizes() == v.sizes() && k.size(1) == key_cache.size(0) && k.size(3) == key_cache.size(2) &&
                  key_cache.sizes() == value_cache.sizes() && q.size(3) == k.size(3) && q.size(1) % k.size(1) == 0,
              "keys and values do not have the cache's heads and head size: keys ", k.sizes(), ", values ", v.sizes(), ", cache ",
              key_cache.sizes());
  TORCH_CHECK(context >= 0 && start >= context && start + rows <= capacity, "step does not fit the cache: context ", context,
              ", write start ", start, ", width ", rows, ", capacity ", capacity);
  TORCH_CHECK(start + rows - context <= tree_slots, "rows are written outside the tree's slots");

  std::vector<std::vector<int64_t>> slots(rows);
  std::vector<int64_t> first_key(rows);
  const bool* mask = tree_mask.const_data_ptr<bool>();
  for (int64_t row = 0; row < rows; ++row) {
    auto& seen = slots[row];
    for (int64_t t = 0; t < tree_slots && context + t < capacity; ++t)
      if (mask[row * tree_slots + t]) seen.push_back(context + t);
    // A path's keys lie in order of position, so a window is the last `window` of them.
    const int64_t hidden = window > 0 ? std::max<int64_t>(0, context + static_cast<int64_t>(seen.size()) - window) : 0;
    first_key[row] = std::min(hidden, context);
    if (hidden > context) seen.erase(seen.begin(), seen.begin() + (hidden - context));
  }

  AttentionJob job{};
  job.rows = rows;
  job.query_heads = q.size(1);
  job.group = q.size(1) / key_cache.size(0);
  job.head_dim = q.size(3);
  job.capacity = capacity;
  job.context = context;
  job.context_stride = context + tree_slots;
  job.query_head_stride = q.stride(1);
  job.query_row_stride = q.stride(2);
  job.scale = static_cast<float>(scale);
  job.softcap = static_cast<float>(softcap);
  job.first_key = first_key.data();
  job.slots = &slots;
  Tensor out = at::empty({1, rows, job.query_heads, job.head_dim}, q.options());

  const auto run = [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    write_rows<T>(k, key_cache, start);
    write_rows<T>(v, value_cache, start);
    const int64_t words = rows * (job.head_dim + 1 + job.context_stride) + kKeyBlock * job.head_dim;
    parallel(job.query_heads, num_threads, [&](int64_t begin, int64_t end) {
      float* scratch = reinterpret_cast<float*>(scratch_words(words));
      for (int64_t head = begin; head < end; ++head) {
        const int64_t offset = head / job.group * capacity * job.head_dim;
        attend_head<T>(job, q.const_data_ptr<T>() + head * job.query_head_stride, key_cache.const_data_ptr<T>() + offset,
                       value_cache.const_data_ptr<T>() + offset, out.mutable_data_ptr<T>() + head * job.head_dim, scratch);
      }
    });
  };
  if (q.scalar_type() == at::kBFloat16) {
    run(static_cast<BFloat16*>(nullptr));
  } else {
    TORCH_CHECK(q.scalar_type() == at::kFloat, "tree_attention serves bfloat16 and float32");
    run(static_cast<float*>(nullptr));
  }
  return out;
}

// ==== candidates =======================================================================================================

// The k greatest values of each row, best first, ties to the lower index. k is small: one pass with a threshold, where
// nearly every block of 16 values is dismissed by one comparison.
std::tuple<Tensor, Tensor> top_candidates(const Tensor& values, int64_t k) {
  const Tensor input = values.contiguous();
  TORCH_CHECK(input.scalar_type() == at::kFloat && input.dim() == 2, "values must be [W, V] float32");
  const int64_t rows = input.size(0), size = input.size(1);
  TORCH_CHECK(k >= 1 && k <= size, "k must be in 1..", size);
  Tensor best = at::empty({rows, k}, input.options()), index = at::empty({rows, k}, input.options().dtype(at::kLong));
  for (int64_t row = 0; row < rows; ++row) {
    const float* source = input.const_data_ptr<float>() + row * size;
    float* top = best.mutable_data_ptr<float>() + row * k;
    int64_t* place = index.mutable_data_ptr<int64_t>() + row * k;
    std::fill(top, top + k, -std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < k; ++i) place[i] = i;
    const auto offer = [&](int64_t i) {
      int64_t at = k - 1;
      for (; at > 0 && source[i] > top[at - 1]; --at) top[at] = top[at - 1], place[at] = place[at - 1];
      top[at] = source[i], place[at] = i;
    };
    int64_t i = 0;
#ifdef YGG_AVX512
    for (; i + 16 <= size; i += 16) {
      unsigned mask = _mm512_cmp_ps_mask(_mm512_loadu_ps(source + i), _mm512_set1_ps(top[k - 1]), _CMP_GT_OQ);
      for (; mask; mask &= mask - 1) {
        const int64_t candidate = i + __builtin_ctz(mask);
        if (source[candidate] > top[k - 1]) offer(candidate);
      }
    }
#endif
    for (; i < size; ++i)
      if (source[i] > top[k - 1]) offer(i);
  }
  return {best, index};
}

// ==== commit ==========================================================================================================

void move_rows(at::TensorList caches, const Tensor& sources, int64_t destination) {
  // Rows sources[i] -> destination + i. Sources ascend and never lie below their destination, so no row is lost.
  const int64_t* source = sources.const_data_ptr<int64_t>();
  const int64_t count = sources.numel();
  for (const Tensor& cache : caches) {
    const int64_t heads = cache.size(0), bytes = cache.size(2) * cache.element_size(), head_bytes = cache.size(1) * bytes;
    char* data = static_cast<char*>(cache.mutable_data_ptr());
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < count; ++i)
        if (source[i] != destination + i) std::memcpy(data + h * head_bytes + (destination + i) * bytes, data + h * head_bytes + source[i] * bytes, bytes);
  }
}

}  // namespace

// Schemas live in kernels/__init__.py, beside the portable implementations.
TORCH_LIBRARY_IMPL(yggdrasil, CPU, m) {
  m.impl("pack_linear", &pack_linear);
  m.impl("packed_linear", &packed_linear);
  m.impl("packed_linears", &packed_linears);
  m.impl("tree_attention", &tree_attention);
  m.impl("top_candidates", &top_candidates);
  m.impl("move_rows", &move_rows);
}
