// Views of PyTorch tensors, independent of PyTorch's headers.
//
// Python (``calls.py``) passes pointers, sizes and strides. Therefore one library works with every version of PyTorch,
// and compiles much faster.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

extern "C" {
// A view in the C interface. Strides are in elements; `dim` is -1 for None.
struct YggdrasilTensor {
  void* data;
  int32_t dtype;  // PyTorch's ScalarType number
  int32_t dim;
  int64_t sizes[6], strides[6];
};
}

namespace yggdrasil {

constexpr int64_t kMaxDims = 6;

enum class DType : int32_t { uint8 = 0, int8 = 1, int64 = 4, float16 = 5, float32 = 6, float64 = 7, boolean = 11, bfloat16 = 15 };

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The upper half of a float32, rounded to nearest, ties to even; every NaN is mapped to one NaN.
struct BFloat16 {
  uint16_t x;

  BFloat16() = default;
  BFloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    x = value != value ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  operator float() const { return from_bits(static_cast<uint32_t>(x) << 16); }
};

inline float to_float(BFloat16 value) { return value; }
inline float to_float(float value) { return value; }

// float16 to float32, exactly.
inline float half_to_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
  if (exponent == 31) return from_bits(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(fraction) * 0x1p-24f;
  return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

template <typename T>
constexpr DType dtype_of = DType::uint8;
template <>
inline constexpr DType dtype_of<int8_t> = DType::int8;
template <>
inline constexpr DType dtype_of<int64_t> = DType::int64;
template <>
inline constexpr DType dtype_of<float> = DType::float32;
template <>
inline constexpr DType dtype_of<double> = DType::float64;
template <>
inline constexpr DType dtype_of<bool> = DType::boolean;
template <>
inline constexpr DType dtype_of<BFloat16> = DType::bfloat16;

inline int64_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::int64:
    case DType::float64: return 8;
    case DType::float32: return 4;
    case DType::float16:
    case DType::bfloat16: return 2;
    default: return 1;
  }
}

template <typename T>
class List;

inline void write_part(std::ostream& out, DType dtype) { out << "dtype " << static_cast<int32_t>(dtype); }
template <typename T>
void write_part(std::ostream& out, const T& part) {
  out << part;
}
template <typename T>
void write_part(std::ostream& out, const List<T>& parts) {
  out << '[';
  for (size_t i = 0; i < parts.size(); ++i) out << (i ? ", " : "") << parts[i];
  out << ']';
}

// Throws an error with the parts as one sentence. It is not inlined, because checks are part of every call.
template <typename... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void refuse(const Parts&... parts) {
  std::ostringstream sentence;
  (write_part(sentence, parts), ...);
  throw std::runtime_error(sentence.str());
}

#define YGG_CHECK(condition, ...) \
  do {                            \
    if (!(condition)) [[unlikely]] ::yggdrasil::refuse(__VA_ARGS__); \
  } while (false)

// A list of elements that it does not own.
template <typename T>
class List {
 public:
  List() = default;
  List(const T* data, size_t size) : data_(data), size_(size) {}
  List(const std::vector<T>& all) : data_(all.data()), size_(all.size()) {}
  List(std::initializer_list<T> all) : data_(all.begin()), size_(all.size()) {}  // only for arguments: the elements live as long as the call

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const T* data() const { return data_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  const T& operator[](size_t i) const { return data_[i]; }
  const T& at(size_t i) const {
    YGG_CHECK(i < size_, "there is no element ", i, " of ", size_);
    return data_[i];
  }
  const T& back() const { return data_[size_ - 1]; }
  List slice(size_t first, size_t count) const {
    YGG_CHECK(first + count <= size_, "there are no elements ", first, " to ", first + count, " of ", size_);
    return {data_ + first, count};
  }
  std::vector<T> vec() const { return {begin(), end()}; }
  bool operator==(const List& other) const { return std::equal(begin(), end(), other.begin(), other.end()); }

 private:
  const T* data_ = nullptr;
  size_t size_ = 0;
};

using Ints = List<int64_t>;

// A view of a tensor. It keeps no memory alive, except that of copies made by the library.
class Tensor {
 public:
  Tensor() { view_.dim = -1; }  // none
  explicit Tensor(const YggdrasilTensor& view) : view_(view) {}

  // Returns a dense tensor that owns its memory, which is not initialised.
  static Tensor empty(Ints sizes, DType dtype) {
    Tensor result;
    result.view_.dtype = static_cast<int32_t>(dtype);
    result.view_.dim = static_cast<int32_t>(sizes.size());
    std::copy(sizes.begin(), sizes.end(), result.view_.sizes);
    for (int64_t stride = 1, i = result.dim() - 1; i >= 0; --i) result.view_.strides[i] = stride, stride *= sizes[i];
    result.memory_ = {static_cast<char*>(::operator new(result.nbytes(), std::align_val_t(64))),
                    [](char* memory) { ::operator delete(memory, std::align_val_t(64)); }};
    result.view_.data = result.memory_.get();
    return result;
  }

  bool defined() const { return view_.dim >= 0; }
  int64_t dim() const { return view_.dim; }
  DType dtype() const { return static_cast<DType>(view_.dtype); }
  Ints sizes() const { return {view_.sizes, static_cast<size_t>(view_.dim)}; }
  Ints strides() const { return {view_.strides, static_cast<size_t>(view_.dim)}; }
  int64_t size(int64_t i) const { return view_.sizes[dim_index(i)]; }
  int64_t stride(int64_t i) const { return view_.strides[dim_index(i)]; }
  int64_t numel() const {
    int64_t count = 1;
    for (const int64_t size : sizes()) count *= size;
    return count;
  }
  int64_t element_size() const { return bytes_of(dtype()); }
  int64_t nbytes() const { return numel() * element_size(); }

  bool is_contiguous() const {
    int64_t dense = 1;
    for (int64_t i = dim() - 1; i >= 0; --i) {
      if (view_.sizes[i] == 0) return true;
      if (view_.sizes[i] != 1 && view_.strides[i] != dense) return false;
      dense *= view_.sizes[i];
    }
    return true;
  }

  const void* const_data_ptr() const { return view_.data; }
  void* mutable_data_ptr() const { return view_.data; }
  template <typename T>
  const T* const_data_ptr() const {
    return mutable_data_ptr<T>();
  }
  template <typename T>
  T* mutable_data_ptr() const {
    YGG_CHECK(dtype() == dtype_of<T>, "a tensor has ", dtype(), ", not ", dtype_of<T>);
    return static_cast<T*>(view_.data);
  }

  // Returns a dense tensor with the same values: the tensor itself if it is dense, else a copy.
  Tensor contiguous() const {
    if (!defined() || is_contiguous()) return *this;
    const Tensor copy = empty(sizes(), dtype());
    const int64_t unit = element_size();
    each([&](int64_t from, int64_t to) { std::memcpy(copy.bytes() + to * unit, bytes() + from * unit, unit); });
    return copy;
  }

  // Returns a dense float32 tensor with the values of a bfloat16 or float32 tensor; no tensor for none.
  Tensor floats() const {
    if (!defined() || dtype() == DType::float32) return contiguous();
    const auto* from = const_data_ptr<BFloat16>();
    Tensor copy = empty(sizes(), DType::float32);
    auto* to = copy.mutable_data_ptr<float>();
    each([&](int64_t source, int64_t target) { to[target] = to_float(from[source]); });
    return copy;
  }

 private:
  int64_t dim_index(int64_t i) const {
    YGG_CHECK(-dim() <= i && i < dim(), "a tensor of ", dim(), " dimensions has no dimension ", i);
    return i < 0 ? i + dim() : i;
  }
  char* bytes() const { return static_cast<char*>(view_.data); }
  

  // Calls body(offset by strides, dense offset) for every element.
  template <typename Body>
  void each(const Body& body) const {
    const int64_t count = numel();
    for (int64_t i = 0; i < count; ++i) {
      int64_t left = i, offset = 0;
      for (int64_t d = dim() - 1; d >= 0; --d) offset += left % view_.sizes[d] * view_.strides[d], left /= view_.sizes[d];
      body(offset, i);
    }
  }

  YggdrasilTensor view_{};
  std::shared_ptr<char[]> memory_;
};

// Returns a tensor's sizes with the last one replaced.
inline std::vector<int64_t> with_last(const Tensor& tensor, int64_t size) {
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes.back() = size;
  return sizes;
}

// Checks the size, dtype and density of a result, which the caller has allocated.
inline void check_result(const Tensor& result, Ints sizes, DType dtype) {
  YGG_CHECK(result.defined() && result.sizes() == sizes && result.dtype() == dtype && result.is_contiguous(), "a result has the sizes ", sizes, " and ", dtype);
}

// Calls run(T{}), where T is the dtype of the rows, bfloat16 or float32.
template <typename Run>
auto with_rows_of(const Tensor& rows, const Run& run) {
  if (rows.dtype() == DType::bfloat16) return run(BFloat16{});
  YGG_CHECK(rows.dtype() == DType::float32, "rows are bfloat16 or float32, not ", rows.dtype());
  return run(0.0f);
}

}  // namespace yggdrasil
