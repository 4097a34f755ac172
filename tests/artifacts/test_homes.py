"""A home that is not there is one sentence, wherever a path or a cache asks for it."""

from pathlib import Path

import pytest

from yggdrasil.artifacts import current_machine, resolve_plan, search_roots
from yggdrasil.artifacts.cache import cache_root
from yggdrasil.artifacts.homes import expanded
from yggdrasil.checkpoints.source import Source
from yggdrasil.drafters.heads.kinds import is_head
from yggdrasil.errors import ArtifactError
from yggdrasil.pretrained import is_plan, plan_name

NOBODY = "~no-such-user/x"


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """HOME is unset, and the system's list of users does not know this one."""
    for name in ("HOME", "XDG_CACHE_HOME", "YGGDRASIL_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def unknown(*_: object) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", unknown)


def test_a_home_is_put_in_the_place_of_its_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")

    assert [str(expanded(path)) for path in ("~/a", Path("~"), "a/~b")] == ["/home/me/a", "/home/me", "a/~b"]


@pytest.mark.parametrize(
    "use", [expanded, Source.find, is_plan, plan_name, is_head, lambda path: resolve_plan(path, current_machine())]
)
def test_a_user_that_is_not_there_is_named(use) -> None:
    with pytest.raises(ArtifactError, match=rf"^{NOBODY}: there is no user no-such-user; .* is \./{NOBODY}$"):
        use(NOBODY)


def test_without_a_home_what_to_set_is_said(homeless: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactError, match=r"^~/x: your home folder is not known; set HOME"):
        expanded("~/x")
    for use in (cache_root, search_roots):
        with pytest.raises(ArtifactError, match="set HOME or XDG_CACHE_HOME"):
            use()

    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_root() == Path("/cache/yggdrasil")
    assert search_roots()[-1] == Path("/cache/yggdrasil/artifacts")
