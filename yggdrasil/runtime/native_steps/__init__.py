"""Steps of models whose layers the native library runs as they are described: made from the configuration, in a moment.

``families`` reads a configuration, ``layers`` writes each layer as a program over the model's tensors, ``call`` runs
embedding, layers, norm and head. No model code of transformers and no compiler takes part.
"""
