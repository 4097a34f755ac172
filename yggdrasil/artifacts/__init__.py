"""Artefacts: versioned files with checksums, fingerprints of models and machines, and lookup of plans by name.

Importing this package does not import torch, transformers or pandas.
"""

from yggdrasil.artifacts.atomic import atomic_directory, check_writable, shown, write_atomic
from yggdrasil.artifacts.machine import MOST_THREADS, Machine, current_machine
from yggdrasil.artifacts.models import (
    OWN_HEADS,
    PICKLED_HEAD,
    check_weights,
    head_files,
    model_fingerprint,
    tokenizer_fingerprint,
)
from yggdrasil.artifacts.names import (
    PlanEntry,
    list_plans,
    plan_path,
    predictor_directory,
    profile_directory,
    profile_of_plan,
    resolve_plan,
    search_roots,
    validate_name,
)
from yggdrasil.artifacts.parsing import parse_dataclass
from yggdrasil.artifacts.plain import parse_json, parse_yaml, to_plain
from yggdrasil.artifacts.store import read_csv, read_tensors, read_yaml, write_csv, write_tensors, write_yaml

__all__ = [
    "MOST_THREADS",
    "OWN_HEADS",
    "PICKLED_HEAD",
    "Machine",
    "PlanEntry",
    "atomic_directory",
    "check_weights",
    "check_writable",
    "current_machine",
    "head_files",
    "list_plans",
    "model_fingerprint",
    "parse_dataclass",
    "parse_json",
    "parse_yaml",
    "plan_path",
    "predictor_directory",
    "profile_directory",
    "profile_of_plan",
    "read_csv",
    "read_tensors",
    "read_yaml",
    "resolve_plan",
    "search_roots",
    "shown",
    "to_plain",
    "tokenizer_fingerprint",
    "validate_name",
    "write_atomic",
    "write_csv",
    "write_tensors",
    "write_yaml",
]
