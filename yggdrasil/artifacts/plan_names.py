"""Tell whether a name on the command line is a plan or a model, and report names that are neither."""

from difflib import get_close_matches
from pathlib import Path

from yggdrasil.artifacts import list_plans
from yggdrasil.artifacts.gguf import is_gguf
from yggdrasil.artifacts.homes import expanded
from yggdrasil.errors import ArtifactError, YggdrasilError, listed

_PLAN_SUFFIXES = (".yaml", ".yml")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_PLAN_START = b"kind: plan"
_MOST = 8  # names that a message lists


def is_plan(given: str | Path) -> bool:
    """Return whether ``given`` is a plan (a name or a file), not a model (a folder, a .gguf file or a hub id).

    ``owner/name`` that is not on this machine counts as a hub id, without a request to the hub. A plan's name takes
    precedence over a folder of that name in the working directory.

    Raises:
        YggdrasilError: ``given`` is a file that is neither plan nor model, or it does not exist and cannot be a hub id.
            No hub id is: the name of a .yaml or .gguf file; a path that is absolute, begins with "." or "~", or has
            more than one slash; a name without a slash that no plan has.
    """
    path, text = expanded(given), str(given)
    if path.is_file():
        return not is_gguf(path) and _is_plan_file(path, text)
    if path.suffix in _PLAN_SUFFIXES:
        raise YggdrasilError(f"there is no plan file {text}; {_there_is(path)}")
    if path.suffix.lower() == ".gguf":
        raise YggdrasilError(f"there is no file {text}; {_there_is(path)}")
    if path.name != text:  # a path or a hub id
        if not path.exists() and (path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1):
            raise YggdrasilError(f"there is no folder or file {text}; {_there_is(path)}")
        return False
    if _has_plan(text):
        return True
    if path.is_dir():
        return False
    raise YggdrasilError(f"there is no plan, folder or file {text}; {_there_is(path)}")


def _is_plan_file(path: Path, text: str) -> bool:
    if path.suffix.lower() in _WEIGHT_SUFFIXES:
        raise YggdrasilError(f"{text} is one file of a checkpoint; give its folder: `{path.parent}`")
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except OSError as error:
        raise YggdrasilError(f"{text} cannot be read ({error.strerror}); check its permissions") from error
    if path.suffix in _PLAN_SUFFIXES or start.startswith(_PLAN_START):
        return True
    raise YggdrasilError(
        f"{text} is neither a model nor a plan; give a checkpoint folder, a .gguf file, a hub id (owner/name) or a "
        "plan's .yaml file"
    )


def _has_plan(name: str) -> bool:
    try:
        return bool(list_plans(name))
    except ArtifactError:  # not a valid name of a plan
        return False


def _there_is(path: Path) -> str:
    """Return the end of a message with names that could be meant: .gguf files in the same folder, and plans."""
    folder = path.parent
    files = sorted(file.name for file in folder.glob("*.gguf")) if folder.is_dir() else []
    plans = sorted({entry.name for entry in list_plans()})
    near = get_close_matches(path.name, [*files, *plans], n=1)
    kinds = (("model files there", files), ("plans", plans))
    said = [f"{what}: {listed(names, _MOST)}" for what, names in kinds if names]
    hint = f"did you mean {near[0]}? " if near else ""
    return hint + "; ".join([*said, "a model is a folder, a .gguf file or a hub id (owner/name)"])
