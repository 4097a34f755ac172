"""Modules for multi-token prediction (MTP) that lie among their target's own tensors."""
