// Several linear layers over the same rows, in one parallel region.
#pragma once

#include <vector>

#include "linear/linear_output.h"
#include "common/scratch.h"
#include "common/threads.h"

namespace yggdrasil {

// StageOf<T> prepares the rows of dtype T for its layers, and multiplies them.
template <template <typename> class StageOf>
void run_linears(const Tensor& input, const Around& around, List<Tensor> packed, const List<Tensor>& biases,
                               Ints out_features, Ints formats, int64_t num_threads, List<Tensor> results) {
  const RowsOf x(input, around);
  Outputs outputs(x, around, out_features, biases, results);
  const auto run = [&]<typename T>(const InputRows<T>& rows) {
    StageOf<T> stage(rows, scratch_words<Scratch::rows>(StageOf<T>::words(rows.rows, rows.inputs)), outputs.best());
    for (size_t i = 0; i < packed.size(); ++i) stage.add(packed[i], formats.empty() ? 0 : formats[i], outputs.of(i));
    Stages stages;
    stage.share_out(stages, num_threads, /*is_alone=*/true);
    stages.run(num_threads);
  };
  x.is_bf16() ? run(x.as<BFloat16>()) : run(x.as<float>());
  outputs.finish();
}

}  // namespace yggdrasil
