"""What the documents say can be done: every command is one that the program takes, every Python block runs.

Blocks name placeholders in the place of the reader's own files; ``PLACEHOLDERS`` says what stands for each here. A new
command or script must be named in ``RUN_BY`` or ``STANDS_ON``.
"""

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
import typer
from documents import PAGES, ROOT, blocks, commands

import yggdrasil
from yggdrasil import Decoder
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.cli.app import make_app
from yggdrasil.engine.assembly import assemble
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.runtime.loading import load_model
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.tree.shape import TreeShape

ASSETS = ROOT / "yggdrasil" / "assets" / "tiny"
SCRIPTS = ROOT / "scripts"
PLACEHOLDERS = {"my/model": ASSETS / "target", "my/drafter": ASSETS / "drafter", "mine": "tiny"}
READERS_OWN = {"prompts.jsonl", "unseen.jsonl", "mismatches.jsonl"}  # files that the reader has or gets
# Scripts that another script runs: its name stands in that file.
RUN_BY = {"scripts/check_equality.py": "scripts/measure_results.py", "scripts/test": ".ci/run"}
# Commands that compile or take minutes: read here to their last option; these test what they call.
STANDS_ON = {
    "calibrate": "tests/test_end_to_end.py",
    "train": "tests/test_end_to_end.py",
    "generate": "tests/test_end_to_end.py",
    "chat": "tests/test_end_to_end.py",
    "serve": "tests/serving/test_server.py",
    "bench": "tests/test_end_to_end.py",
    "search": "tests/test_end_to_end.py",
    "report": "tests/test_end_to_end.py",
    "plans": "tests/artifacts/test_names.py",
    "cache": "tests/cli/test_cache.py",
    "parity": "tests/test_end_to_end.py",
    "scripts/check_server.py": "tests/serving/test_server.py",
    "scripts/check_schedules.py": "tests/engine/test_schedules.py",
    "scripts/profile_steps.py": "tests/test_end_to_end.py",
    "scripts/compare_rules.py": "tests/test_end_to_end.py",
    "scripts/compare_trees.py": "tests/scripts/test_compare_trees.py",
    "scripts/paper_figures.py": "tests/scripts/test_paper_figures.py",
    "scripts/widen": "tests/scripts/test_widening.py",
    "scripts/demo": "tests/scripts",
    "scripts/check_export": "tests/scripts/test_check_export.py",
    "scripts/check_lm_eval.py": "tests/scripts/test_check_lm_eval.py",
    "scripts/check_llama_tests.py": "tests/scripts/test_check_llama_tests.py",
}


def placed(words):
    """A command with the placeholders filled in."""
    return [str(PLACEHOLDERS.get(word, word)) for word in words]


def parse(command, name, words):
    """Read ``words`` as the program would, without running anything; returns the names of what would run."""
    context = command.make_context(name, list(words))
    rest = [*context._protected_args, *context.args]
    if not hasattr(command, "commands") or not rest:
        return []
    sub_name, sub_command, left = command.resolve_command(context, rest)
    return [sub_name, *parse(sub_command, sub_name, left)]


def script_command(path, monkeypatch):
    """The command of a script that typer runs; the shell wrapper of the same name only starts it."""
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    own = typer.Typer()
    own.command()(importlib.import_module(path.stem).main)
    return typer.main.get_command(own)


@pytest.fixture
def in_a_readers_folder(tmp_path, monkeypatch):
    """A working directory with the files that a reader has, and the checkout's folders."""
    monkeypatch.chdir(tmp_path)
    for name in READERS_OWN:
        Path(name).write_text('{"prompt": "Hello"}\n')
    for name in ("yggdrasil", "scripts"):
        Path(name).symlink_to(ROOT / name)


@pytest.mark.usefixtures("in_a_readers_folder")
@pytest.mark.parametrize(("place", "words"), commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_command_is_taken(place, words, monkeypatch):
    program, rest = words[0], placed(words[1:])
    if program == "yggdrasil":
        name = " ".join(parse(typer.main.get_command(make_app()), "yggdrasil", rest))
    else:
        name, path = program, ROOT / program
        assert path.stat().st_mode & 0o100, f"{program} cannot be run"
        if path.with_suffix(".py").exists():
            parse(script_command(path.with_suffix(".py"), monkeypatch), program, rest)
        else:  # a shell script: what it takes stands in it
            text = path.read_text()
            assert all(word in text for word in rest if word.startswith("--"))

    assert name in RUN_BY or name in STANDS_ON, f"say which test or script runs `{name}`"
    if name in RUN_BY:
        assert Path(name).name in (ROOT / RUN_BY[name]).read_text(encoding="utf-8")
    else:
        assert (ROOT / STANDS_ON[name]).exists()


def test_unknown_options_would_be_noticed():
    with pytest.raises(Exception, match="No such option"):
        parse(typer.main.get_command(make_app()), "yggdrasil", ["bench", "x", "--no-such-option"])
    with pytest.raises(Exception, match="No such command"):
        parse(typer.main.get_command(make_app()), "yggdrasil", ["calibrat"])


def test_named_files_are_shipped_or_the_readers_own():
    for page in PAGES:
        for name in re.findall(r"[\w./-]+\.jsonl", page.read_text(encoding="utf-8")):
            shipped = name in READERS_OWN or (ROOT / name).exists()
            assert shipped, f"{page.name} names {name}, which is nowhere; ship it, or say whose it is"


def test_links_lead_somewhere():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), f"{page.name} links to {target}"
            if anchor:
                titles = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
                anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
                assert anchor in anchors, f"{page.name} links to {target}"


def test_the_named_tests_and_scripts_exist():
    for page in PAGES:
        for name in re.findall(r"`((?:tests|scripts)/[\w./]+)`", page.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_what_installs_a_release_is_told_for_a_checkout_too():
    """A reader of these pages has a checkout; a release is not on every index."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for extra in re.findall(r"yggdrasil-decode\[(\w+)\]", text):
            assert f"pip install -e '.[{extra}]'" in text, f"{page.name} names {extra} of a release alone"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_every_package_is_named():
    package = Path(yggdrasil.__file__).parent
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(yggdrasil/[\w/]+)` \|", text, re.MULTILINE))
    packages = {str(path.parent.relative_to(package.parent)) for path in package.glob("*/**/__init__.py")}

    assert named == packages | {"yggdrasil/assets"}


@pytest.fixture(scope="module")
def bundled():
    """The bundled pair on eager steps, speculating at every step: made as a plan would be, without a calibration."""
    tokenizer = load_tokenizer(ASSETS / "target")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    models = [load_model(ASSETS / name, torch.float32, torch.device("cpu"), 1) for name in ("target", "drafter")]
    shapes = Shapes(max_length=512, draft_widths=(1, 2), max_depth=3, verify_widths=(1, 2, 4, 8))

    def make(drafter=None):
        assembly = assemble(models[0], drafter or models[1], shapes, "eager")
        return Decoder(assembly, tokenizer, FixedPolicy(TreeShape(2, 3, 8)), frozenset({tokenizer.eos_token_id}))

    return make


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.name)
def test_every_python_block_runs(block, bundled, monkeypatch, capsys):
    sources = []

    def stand_in(name):
        signature = inspect.signature(getattr(Decoder, name))

        def make(*arguments, **options):
            given = signature.bind(*arguments, **options).arguments
            source = next(iter(given.values()))
            assert source in PLACEHOLDERS, f"{source} stands for nothing; add it to PLACEHOLDERS"
            sources.append(source)
            return bundled(given.get("drafter"))

        return make

    for name in ("from_plan", "from_pretrained"):
        monkeypatch.setattr(Decoder, name, stand_in(name))
    exec(compile(block.text, block.name, "exec"), {"__name__": "a_document"})

    assert sources
    assert capsys.readouterr().out.strip()


def test_the_changelog_is_short():
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 80
