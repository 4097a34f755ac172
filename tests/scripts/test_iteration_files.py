"""The files that an iteration enters: a reader follows it through few of them."""

import pytest
from iteration_files import files_by_kind

from yggdrasil.native import is_native

MOST = 15


@pytest.mark.skipif(not is_native(), reason="no compiler here")
def test_an_iteration_enters_few_files():
    found = files_by_kind("tiny")

    assert "drafted, fixed shape" in found
    assert {kind: sorted(files) for kind, files in found.items() if len(files) > MOST} == {}
    assert all("engine/loop.py" in files for files in found.values())
