"""The tracked tree stays small: artefacts of machines and raw samples are not committed."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_BYTES = 24_000_000
MOST_FOLDER = {
    "yggdrasil/assets/tiny/target": 8_000_000,
    "yggdrasil/assets/heads": 10_000_000,
    "docs/results": 1_000_000,
}


def tracked(folder="."):
    """The sizes of tracked files below ``folder``, by path."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", folder]
    listed = subprocess.run(command, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    names = [name for name in listed.stdout.decode().split("\0") if name]
    return {name: (ROOT / name).lstat().st_size for name in names if (ROOT / name).exists()}


def test_the_tracked_tree_is_small():
    sizes = tracked()
    largest = sorted(sizes, key=sizes.__getitem__)[-5:]

    assert sum(sizes.values()) <= MOST_BYTES, f"the largest files are {', '.join(largest)}"


@pytest.mark.parametrize("folder", MOST_FOLDER)
def test_folders_of_artefacts_are_small(folder):
    assert sum(tracked(folder).values()) <= MOST_FOLDER[folder]


def test_of_calibrations_only_the_bundled_pairs_is_tracked():
    names = [*tracked("plans"), *tracked("predictors"), *tracked("profiles")]

    assert {Path(name).parts[1] for name in names} <= {"tiny"}
    assert len(list(tracked("plans"))) <= 1
