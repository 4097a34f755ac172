// Concatenate the hidden states of a pass's rows at several layers, as input of a draft head.
#pragma once

#include <cstring>
#include <utility>

#include "common/tensor.h"

namespace yggdrasil {

class StateRows {
 public:
  // `buffer` [n, layers * H] receives the rows. `mail` holds the first row to write, the number of rows, the address of
  // each layer's states [W, H], and the rows to copy.
  StateRows(Tensor buffer, int64_t layers, Tensor mail) : buffer_(std::move(buffer)), mail_(std::move(mail)), layers_(layers) {
    YGG_CHECK(layers > 0 && buffer_.dim() == 2 && buffer_.is_contiguous() && buffer_.size(1) % layers == 0, "the buffer must be [n, layers * H]");
  }

  void keep() {
    const auto* mail = mail_.const_data_ptr<int64_t>();
    const int64_t row_bytes = buffer_.size(1) / layers_ * buffer_.element_size(), count = mail[1], *layers = mail + 2, *rows = layers + layers_;
    YGG_CHECK(mail[0] >= 0 && mail[0] + count <= buffer_.size(0), "more rows than the buffer holds");
    auto* target = static_cast<char*>(buffer_.mutable_data_ptr()) + mail[0] * layers_ * row_bytes;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t layer = 0; layer < layers_; ++layer, target += row_bytes)
        std::memcpy(target, reinterpret_cast<const char*>(layers[layer]) + rows[i] * row_bytes, row_bytes);
  }

 private:
  Tensor buffer_, mail_;
  int64_t layers_;
};

}  // namespace yggdrasil
