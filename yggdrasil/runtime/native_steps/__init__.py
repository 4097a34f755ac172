"""Native steps: passes built from a model's configuration, without transformers' model code and without a compiler.

``families`` and ``description`` read a configuration, ``mixers`` and ``mixtures`` write each layer as bytecode that the
native library runs over the model's tensors, ``call`` runs embedding, layers, norm and LM head.
"""
