"""Multi-token prediction (MTP): modules that are stored with their target's tensors."""
