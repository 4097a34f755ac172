// Several linear layers over the same rows, in one parallel region.
#pragma once

#include <vector>

#include "linear/linear_output.h"
#include "common/scratch.h"
#include "common/threads.h"

namespace yggdrasil {

// StageOf<T> prepares rows of dtype T and multiplies them with the weights of all layers.
template <template <typename> class StageOf>
void run_linears(const Tensor& input, const FusedOps& fused_ops, List<Tensor> packed, const List<Tensor>& biases,
                               Ints out_features, Ints formats, int64_t num_threads, List<Tensor> results) {
  const LinearInput x(input, fused_ops);
  Outputs outputs(x, fused_ops, out_features, biases, results);
  const auto run = [&]<typename T>(const InputRows<T>& rows) {
    StageOf<T> stage(rows, scratch_words<Scratch::rows>(StageOf<T>::words(rows.rows, rows.inputs)), outputs.best());
    for (size_t i = 0; i < packed.size(); ++i) stage.add(packed[i], formats.empty() ? 0 : formats[i], outputs.of(i));
    Stages stages;
    stage.add_stages(stages, num_threads, /*is_first_stage=*/true);
    stages.run(num_threads);
  };
  x.is_bf16() ? run(x.as<BFloat16>()) : run(x.as<float>());
  outputs.finish();
}

}  // namespace yggdrasil
