"""What ``scripts/test --fast`` leaves out is there, so nothing is left out by a name that went away."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_what_is_left_out_is_there():
    listed = re.search(r"LEFT_OUT=\(\n(.*?)\n\)", (ROOT / "scripts" / "test").read_text(), re.DOTALL)[1].split()

    assert len(listed) > 10
    for name in listed:
        file, _, test = name.partition("::")
        path = ROOT / "tests" / file
        assert path.exists(), name
        assert not test or f"def {test}(" in path.read_text(), name
