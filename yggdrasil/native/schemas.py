"""PyTorch schemas of the operators, by name."""

# Operations fused with linear layers: gate and norm of the input, residual of the output.
_AROUND = "Tensor? gate, bool gelu, Tensor? norm, bool plus_one, float eps, Tensor? residual"

_ALL = (
    "packed_shape(Tensor weight) -> int[]",
    "pack_linear(Tensor weight, Tensor(a!) packed) -> ()",
    "packed_linear(Tensor input, Tensor packed, Tensor? bias, int out_features, int num_threads) -> Tensor",
    "plain_linear(Tensor input, Tensor weight, Tensor? bias, int num_threads) -> Tensor",
    "packed_experts(Tensor input, Tensor chosen, Tensor shares, Tensor gate_up, Tensor down, Tensor[] biases, "
    "int inner_features, bool gelu, float[] clamp, int num_threads) -> Tensor",
    f"packed_linears(Tensor input, {_AROUND}, Tensor[] packed, Tensor?[] biases, int[] out_features, int num_threads) "
    "-> Tensor[]",
    "norm_rows(Tensor input, Tensor norm, bool plus_one, float eps, Tensor? residual, int num_threads) -> Tensor",
    "packed_best(Tensor input, Tensor packed, Tensor? bias, int out_features, int num_threads) -> (Tensor, Tensor)",
    "quantised_best(Tensor input, Tensor packed, Tensor? bias, int out_features, int format, int num_threads) "
    "-> (Tensor, Tensor)",
    "has_byte_products() -> bool",
    "bounded_argmax(Tensor input, Tensor packed, Tensor? bias, Tensor copy, Tensor factors, int out_features, "
    "int num_threads) -> (Tensor, Tensor)",
    "quantised_shape(Tensor rows, int format, int inputs) -> int[]",
    "pack_quantised(Tensor rows, int format, int inputs, Tensor(a!) packed) -> ()",
    "quantised_linear(Tensor input, Tensor packed, Tensor? bias, int out_features, int format, int num_threads) "
    "-> Tensor",
    f"quantised_linears(Tensor input, {_AROUND}, Tensor[] packed, Tensor?[] biases, int[] out_features, int[] formats, "
    "int num_threads) -> Tensor[]",
    "quantised_experts(Tensor input, Tensor chosen, Tensor shares, Tensor[] packed, int[] formats, "
    "Tensor[] biases, int inner_features, bool gelu, float[] clamp, int num_threads) -> Tensor",
    "quantised_rows(Tensor ids, Tensor packed, int format, int inputs, int num_rows, ScalarType dtype) -> Tensor",
    "tree_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor offsets, Tensor tree_mask, float scale, int window, float softcap, Tensor? sinks, "
    "int num_threads) -> Tensor",
    "rows_attention(Tensor query, Tensor keys, Tensor values, Tensor lengths, float scale, int window, float softcap, "
    "int num_threads) -> Tensor",
    "tree_convolution(Tensor input, Tensor weight, Tensor? bias, Tensor window, Tensor(a!) inputs, Tensor offsets, "
    "Tensor parents, int num_threads) -> Tensor",
    "tree_recurrence(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta, Tensor state, "
    "Tensor(a!) keys, Tensor(b!) updates, Tensor(c!) decays, Tensor offsets, Tensor parents, int num_threads) "
    "-> Tensor",
    "commit_states(Tensor(a!)[] windows, Tensor[] inputs, Tensor(b!)[] states, Tensor[] keys, Tensor[] updates, "
    "Tensor[] decays, int[] slots, int num_threads) -> ()",
    "best_tokens(Tensor logits, int num_threads) -> (Tensor, Tensor)",
    "top_candidates(Tensor values, SymInt k) -> (Tensor, Tensor)",
    "keep_stack(Tensor[] tensors, int[] kinds, int[] places, int[] code, int[] code_sizes, float[] numbers, "
    "int[] sizes) -> int",  # ``layer_stack.h``
    "run_stack(int number, Tensor carried, Tensor[] shared, int[] kept, int num_threads) -> Tensor[]",
    "move_rows(Tensor(a!)[] caches, int[] sources, int destination) -> ()",
    "keep_rows(Tensor(a!)[] caches, Tensor start, Tensor rows, Tensor count) -> ()",
    "rank_nodes(Tensor scores, Tensor(a!) order, Tensor(b!) expected) -> ()",
    "read_words(Tensor buffer, int num_threads) -> int",
)
SCHEMAS = {schema.split("(", 1)[0]: schema for schema in _ALL}
