"""Words that were retired for the field's own do not come back.

``RETIRED`` says what to write instead (docs/structure.md has the glossary). ``STILL`` lists, for each package, the
retired words that its code has not lost yet: it may shrink and must not grow.
"""

import re
from pathlib import Path

import pytest
from documents import PAGES, ROOT

RETIRED = {
    "worth": "value, gain",
    "promise": "prediction",
    "promises": "predictions",
    "promised": "predicted",
    "honest": "acceptance calibration",
    "lift": "correction factor",
    "lookout": "discount of a plain step",
    "paces": "latency scale",
    "machine speed": "latency scale",
    "free guesses": "model-free drafts",
    "free trees": "model-free drafts",
    "free drafter": "model-free drafter",
    "followers": "continuations",
    "belief": "n-gram scorer",
    "beliefs": "n-gram scorers",
    "evidence": "features",
    "turned": "rotated",
    "crossed": "rotate_half",
    "head turn": "rotary embedding",
    "matrix unit": "AMX",
    "vector unit": "AVX-512, AVX2",
    "screened": "bounded argmax",
    "stand ins": "the noun of the file's content",
    "foreseen": "predicted",
}
STILL: dict[str, list[str]] = {}
GENERATED = ("tuned-numbers.md", "results.md")
SOURCES = (".py", ".h", ".cpp")


def words_of(text):
    """The words of a text or of code, identifiers split, lower case, between single spaces."""
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", re.sub(r"[^\w\s-]", " ", text))
    words = " ".join(re.sub("[_-]", " ", parted).lower().split())
    return f" {words.replace('model free', 'modelfree')} "  # which is a word to write


def retired_in(text):
    """The retired words of a text."""
    found = words_of(text)
    return {word for word in RETIRED if f" {word} " in found}


def test_identifiers_are_split():
    assert retired_in("class FreeDrafter: machine_speed = HeadTurn.is_worth") == {
        "free drafter", "machine speed", "head turn", "worth",
    }  # fmt: skip
    assert not retired_in("returned worthwhile pacesetter")


@pytest.mark.parametrize("package", sorted(path.name for path in (ROOT / "yggdrasil").iterdir() if path.is_dir()))
def test_packages_use_no_other_retired_words(package):
    found = {}
    for file in sorted((ROOT / "yggdrasil" / package).rglob("*")):
        if file.suffix in SOURCES:
            for word in retired_in(f"{file.stem} {file.read_text(encoding='utf-8')}") - set(STILL.get(package, [])):
                found.setdefault(word, str(file.relative_to(ROOT)))

    assert not found, "; ".join(f"{file} says {word!r}: write {RETIRED[word]}" for word, file in found.items())


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_documents_use_none(page):
    if page.name in GENERATED:
        pytest.skip("written by a script")
    text = page.read_text(encoding="utf-8")
    if page.name == "structure.md":
        text = text[: text.index("## Glossary")]  # which names other words for each idea

    assert not {word: RETIRED[word] for word in retired_in(text)}


def test_the_glossary_has_the_words_to_write_instead():
    glossary = (Path(ROOT) / "docs" / "structure.md").read_text(encoding="utf-8").partition("## Glossary")[2]
    for word in ("n-gram scorer", "model-free drafter", "continuation", "features", "regret budget", "latency scale"):
        assert f"| {word} |" in glossary
