"""From names to files."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from yggdrasil.artifacts import names
from yggdrasil.artifacts.machine import Machine
from yggdrasil.artifacts.names import (
    list_plans,
    plan_path,
    predictor_directory,
    profile_directory,
    resolve_plan,
    search_roots,
    validate_name,
)
from yggdrasil.artifacts.store import write_yaml
from yggdrasil.errors import ArtifactError

HERE = Machine("AMD EPYC", "26.2", "x86_64", ("avx2",), 2, 24, None, "Linux 6.1")
THERE = dataclasses.replace(HERE, cores=8)
ELSEWHERE = dataclasses.replace(HERE, accelerator="NVIDIA H200")


def make_plan(root: Path, name: str, machine: Machine) -> Path:
    path = plan_path(root, name, machine)
    write_yaml(path, "plan", 1, {"machine": machine})
    return path


def fault(name: str, root: Path, force: bool = False) -> str:
    with pytest.raises(ArtifactError) as caught:
        resolve_plan(name, HERE, [root], force)
    return str(caught.value)


def test_layout(tmp_path: Path) -> None:
    assert plan_path(tmp_path, "demo", HERE) == tmp_path / "plans" / "demo" / f"{HERE.slug}.yaml"
    assert profile_directory(tmp_path, "demo", HERE) == tmp_path / "profiles" / "demo" / HERE.slug
    assert predictor_directory(tmp_path, "demo", HERE) == tmp_path / "predictors" / "demo" / HERE.slug


@pytest.mark.parametrize("name", ["demo", "a.b_c-1", "7b"])
def test_good_names(name: str) -> None:
    assert validate_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a b", "a\n", "ä", "*"])
def test_bad_names(name: str) -> None:
    with pytest.raises(ArtifactError, match="cannot name a plan; use letters, digits"):
        validate_name(name)


def test_a_name_means_the_plan_of_this_machine(tmp_path: Path) -> None:
    make_plan(tmp_path, "demo", THERE)
    here = make_plan(tmp_path, "demo", HERE)

    assert resolve_plan("demo", HERE, [tmp_path]) == here
    assert resolve_plan("demo", HERE, [tmp_path], force=True) == here


def test_a_plan_is_found_by_fingerprint_under_another_readable_part(tmp_path: Path) -> None:
    renamed = tmp_path / "plans" / "demo" / f"older-naming-{HERE.fingerprint}.yaml"
    make_plan(tmp_path, "demo", HERE).rename(renamed)

    assert resolve_plan("demo", HERE, [tmp_path]) == renamed


def test_an_existing_path_is_taken_as_given(tmp_path: Path) -> None:
    there = make_plan(tmp_path, "demo", THERE)

    assert resolve_plan(there, HERE, []) == there
    assert resolve_plan(str(there), HERE, []) == there


def test_a_path_is_whole_wherever_it_is_given_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profile and predictor lie beside it, and the working directory may be another then."""
    there = make_plan(tmp_path, "demo", THERE)
    monkeypatch.chdir(there.parent)

    assert resolve_plan(there.name, HERE, []) == there
    assert resolve_plan(f"../demo/{there.name}", HERE, []) == there


def test_an_earlier_root_wins(tmp_path: Path) -> None:
    first = make_plan(tmp_path / "a", "demo", HERE)
    make_plan(tmp_path / "b", "demo", HERE)
    other = make_plan(tmp_path / "b", "demo", THERE)

    assert resolve_plan("demo", HERE, [tmp_path / "a", tmp_path / "b"]) == first
    assert [entry.path for entry in list_plans("demo", [tmp_path / "a", tmp_path / "b"])] == [first, other]


def test_a_root_that_may_not_be_looked_into_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    glob, mine = Path.glob, make_plan(tmp_path / "mine", "demo", HERE)

    def refuse(folder: Path, pattern: str) -> Iterator[Path]:
        if folder == tmp_path / "theirs" / "plans":
            raise PermissionError(13, "Permission denied", str(folder))
        return glob(folder, pattern)

    monkeypatch.setattr(Path, "glob", refuse)
    assert resolve_plan("demo", HERE, [tmp_path / "theirs", tmp_path / "mine"]) == mine


def test_nothing_fits_lists_the_machines_and_the_ways_out(tmp_path: Path) -> None:
    there, elsewhere = make_plan(tmp_path, "demo", THERE), make_plan(tmp_path, "demo", ELSEWHERE)
    message = fault("demo", tmp_path)

    assert message.startswith(f"no plan named 'demo' fits this machine ({HERE.describe()})")
    assert "`yggdrasil calibrate MODEL --name demo`" in message
    assert "the path of one of these in its place, with `--force-machine`" in message
    assert f"demo for {THERE.describe()} [{there}]" in message
    assert f"demo for {ELSEWHERE.describe()} [{elsewhere}]" in message


def test_force_takes_the_only_plan_and_refuses_to_choose(tmp_path: Path) -> None:
    there = make_plan(tmp_path, "demo", THERE)
    assert resolve_plan("demo", HERE, [tmp_path], force=True) == there

    make_plan(tmp_path, "demo", ELSEWHERE)
    assert "the path of one of these in its place, with `--force-machine`" in fault("demo", tmp_path, force=True)


def test_unknown_name(tmp_path: Path) -> None:
    assert "there is no plan named 'demo'; make one with `yggdrasil calibrate" in fault("demo", tmp_path)
    assert fault("demo", tmp_path).endswith("there are none yet.")  # and of others the names alone

    make_plan(tmp_path, "demo", THERE)
    assert "there is no plan named 'demoo' (did you mean 'demo'?)" in fault("demoo", tmp_path)
    assert fault("demoo", tmp_path).endswith("the plans are: demo.")


@pytest.mark.parametrize("path", ["plans/x.yaml", "x.yaml", "./demo", "../demo"])
def test_a_path_that_is_not_there(tmp_path: Path, path: str) -> None:
    assert f"there is no plan file {path}; check the path" in fault(path, tmp_path)


def test_bad_name(tmp_path: Path) -> None:
    assert "'de*mo' cannot name a plan" in fault("de*mo", tmp_path)


@pytest.mark.parametrize("content", ["machine: [1", "machine: 3", "[]", "", "machine: {cpu: 1}", "[" * 100_000])
def test_damaged_plans_are_listed_by_their_slug(tmp_path: Path, content: str) -> None:
    path = make_plan(tmp_path, "demo", THERE)
    path.write_text(content)

    (entry,) = list_plans(None, [tmp_path])
    assert entry.machine is None
    assert entry.describe() == f"demo for {THERE.slug} [{path}]"


def test_hidden_leftovers_are_not_plans(tmp_path: Path) -> None:
    path = make_plan(tmp_path, "demo", THERE)
    path.with_name(".demo.0a1b2c3d.yaml").write_text("")

    assert len(list_plans(None, [tmp_path])) == 1


def test_search_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, checkout, cache = tmp_path / "work", tmp_path / "checkout", tmp_path / "cache"
    work.mkdir()
    (checkout / "plans").mkdir(parents=True)
    monkeypatch.chdir(work)
    monkeypatch.setattr(names, "_PACKAGE_ROOT", checkout)
    monkeypatch.delenv("YGGDRASIL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    user = cache / "yggdrasil" / "artifacts"
    assert search_roots() == [checkout, user]

    (work / "plans").mkdir()
    assert search_roots() == [work, checkout, user]

    monkeypatch.chdir(checkout)
    assert search_roots() == [checkout, user]

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert search_roots()[-1] == tmp_path / ".cache" / "yggdrasil" / "artifacts"

    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "own"))
    assert search_roots()[-1] == tmp_path / "own" / "artifacts"


def test_installed_packages_are_no_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site-packages" / "plans").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(names, "_PACKAGE_ROOT", tmp_path / "site-packages")

    assert len(search_roots()) == 1
