// Layer bytecode: the operations of a layer, stage by stage.
//
// A compiled graph calls an operator for each linear layer; between calls one thread allocates and frees tensors while
// the others wait, 20 % of the time in small models. Bytecode refers to operands by number, so nothing but thread
// synchronisation happens between stages. It is a list of integers:
//
//   linears      0, input, gate, gelu, norm, plus one, residual, number of layers, then for each layer: packed, bias, outputs, format
//                (-1: not quantised)
//   attention    1, query, key, value, query norm, key norm, cos, sin, key cache, value cache, sinks, offsets, tree mask, window, plus one,
//                turn, gated
//   norm         2, input, norm, plus one, residual
//   convolution  3, input, factor, gate, weight, bias, text's inputs, tree's inputs, offsets, parents, silu
//   recurrence   4, mixed, decay, beta, gate, bias, rate, skip, norm, state, decays, strengths, offsets, parents, norm first
//   experts      5, input, logits, correction, shared, shared gate, residual, sigmoid, normed, top k, inner, activation, gate, up, down,
//                gate bias, up bias, down bias, their formats (three; -1: not quantised)
//
// and three floats per stage: eps of the norm, scale, softcap; of a recurrence eps, smallest and largest time step; of
// experts the scale, and the limit and alpha of a clamped gate. The scale of linears multiplies their outputs before a
// residual is added. `gelu` is the Activation of a gate. `plus one` is 0 (the normalised value is rounded, then
// multiplied by the weight), 1 (multiplied by weight + 1, rounded once) or 2 (multiplied by the weight, rounded once).
// `turn` is the rotary embedding: 0 (pairs (i, i + D/2), every operation rounded), 1 (the same in float32 with float32
// cos and sin, rounded once) or 2 (as 1, with pairs (2i, 2i + 1)). Operand numbers begin with the tensors, followed by
// the outputs of stages, one per linear layer or other stage; -1 is none. Queries are normalised and rotated in place,
// so no other stage may read them.
#pragma once

#include <vector>

#include "common/tensor.h"

namespace yggdrasil {

struct Program {
  Ints code;
  List<double> numbers;
};

struct LinearsCode {
  int64_t input, gate, gelu, norm, plus_one, residual;
  Ints layers;  // four numbers each
  double eps, scale;
};

struct AttentionCode {
  int64_t query, key, value, query_norm, key_norm, cos, sin, key_cache, value_cache, sinks, offsets, mask, window, plus_one, turn, gated;
  double eps, scale, softcap;
};

struct NormCode {
  int64_t input, norm, plus_one, residual;
  double eps;
};

// As in TreeConvolution.
struct ConvolutionCode {
  int64_t input, factor, gate, weight, bias, window, inputs, offsets, parents, silu;
};

// As in RecurrentLayer.
struct RecurrenceCode {
  int64_t mixed, decay, beta, gate, bias, rate, skip, norm, state, decays, strengths, offsets, parents, norm_first;
  double eps, min_time, max_time;
};

// As in ProgramExperts. If gate and up have the same number, both are packed in one tensor, or there is no gate (relu).
struct ExpertsCode {
  int64_t input, logits, correction, shared, shared_gate, residual, sigmoid, normed, top_k, inner, activation, gate, up, down, gate_bias, up_bias, down_bias;
  int64_t formats[3];
  double scale, limit, alpha;
};

// Calls visit(code) for each stage, with the code of its kind.
template <typename Visit>
void read_program(const Program& program, const Visit& visit) {
  size_t at = 0;
  const auto take = [&] {
    YGG_CHECK(at < program.code.size(), "a program ends within a stage");
    return program.code[at++];
  };
  for (size_t stage = 0; at < program.code.size(); ++stage) {
    YGG_CHECK(3 * stage + 2 < program.numbers.size(), "a program has three numbers a stage");
    const double* numbers = program.numbers.data() + 3 * stage;
    const int64_t kind = take();
    if (kind == 0) {
      LinearsCode code{take(), take(), take(), take(), take(), take(), {}, numbers[0], numbers[1]};
      const auto count = static_cast<size_t>(4 * take());
      YGG_CHECK(at + count <= program.code.size(), "a program ends within a stage");
      code.layers = program.code.slice(at, count);
      at += count;
      visit(code);
    } else if (kind == 1) {
      visit(AttentionCode{take(), take(), take(), take(), take(), take(), take(), take(), take(), take(), take(), take(), take(), take(), take(),
                          take(), numbers[0], numbers[1], numbers[2]});
    } else if (kind == 2) {
      visit(NormCode{take(), take(), take(), take(), numbers[0]});
    } else if (kind == 3) {
      visit(ConvolutionCode{take(), take(), take(), take(), take(), take(), take(), take(), take(), take()});
    } else if (kind == 5) {
      visit(ExpertsCode{take(), take(), take(), take(), take(), take(), take(), take(), take(), take(), take(), take(), take(), take(), take(), take(), take(),
                        {take(), take(), take()}, numbers[0], numbers[1], numbers[2]});
    } else {
      YGG_CHECK(kind == 4, "a program has no stage of the kind ", kind);
      visit(RecurrenceCode{take(), take(), take(), take(), take(), take(), take(), take(), take(), take(), take(), take(), take(), take(),
                           numbers[0], numbers[1], numbers[2]});
    }
  }
}

}  // namespace yggdrasil
