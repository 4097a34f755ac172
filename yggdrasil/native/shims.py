"""The C signatures of the native operators, by which compiled steps call them without dispatch and boxed arguments."""

import re
import sys
from pathlib import Path

import torch
from torch._ops import OpOverload

from yggdrasil.native import is_native

_DECLARATION = re.compile(r"^(AOTITorchError aoti_torch_cpu_(\w+)\(.*\));$", re.MULTILINE)


def c_shims() -> dict[OpOverload, list[str]]:
    """AOTInductor's ``custom_ops_to_c_shims``; empty where packages cannot find the library's symbols."""
    if not is_native() or sys.platform != "linux":
        return {}
    header = (Path(__file__).parent / "common" / "shims.h").read_text()
    return {
        getattr(torch.ops.yggdrasil, name).default: [declaration] for declaration, name in _DECLARATION.findall(header)
    }
