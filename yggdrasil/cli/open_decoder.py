"""Opens the decoder, or finds the plan, that a command's argument MODEL names."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from yggdrasil.artifacts.machine import may_have_accelerator
from yggdrasil.cli.shared_options import Dtype
from yggdrasil.cli.start_up import without_garbage_collection, work_ahead
from yggdrasil.errors import YggdrasilError

if TYPE_CHECKING:
    from yggdrasil.acceptance.sampling import SamplingParams
    from yggdrasil.acceptance.speculation import Speculation
    from yggdrasil.compiler.compiled import Backend
    from yggdrasil.engine.decoder import Decoder
    from yggdrasil.scheduling.plan import DeviceName


def check_source(source: str, *, chat: bool = False) -> None:
    """Check a command's argument MODEL before anything large is imported or read.

    Raises:
        YggdrasilError: the name is empty, the folder has no weights, or with ``chat`` the model has no chat template
            (the message says if a GGUF file holds no language model).
    """
    from yggdrasil.artifacts import check_weights
    from yggdrasil.artifacts.gguf import is_gguf, read_gguf_header
    from yggdrasil.artifacts.homes import expanded
    from yggdrasil.artifacts.plan_names import is_plan
    from yggdrasil.artifacts.templates import lacks_chat_template
    from yggdrasil.prompts import NO_TEMPLATE

    if not source:
        raise YggdrasilError("the model's name is empty; give a folder, a .gguf file, a hub id or a plan")
    folder = expanded(source)
    if not is_plan(source) and folder.is_dir() and (folder / "config.json").exists():
        check_weights(folder)
    if chat and not is_plan(source) and folder.exists() and lacks_chat_template(folder):
        if is_gguf(folder):
            from yggdrasil.checkpoints.gguf.kinds import refuse_other_kinds

            refuse_other_kinds(read_gguf_header(folder))
        raise YggdrasilError(NO_TEMPLATE)


def open_decoder(
    source: str,
    dtype: Dtype | None,
    drafter: str = "plan",
    *,
    force_machine: bool,
    device: "DeviceName | None" = None,
    backend: "Backend | None" = None,
    max_length: int | None = None,
    chat: bool = False,
    grow_table: bool | None = False,
    train: Path | None = None,
) -> "Decoder":
    """Open the decoder of a plan or a model, with progress on the terminal.

    A warning goes to standard error if ``max_length`` exceeds the length that the plan was calibrated for.

    Args:
        source: name or file of a plan, or a model.
        dtype, device, max_length: replace the plan's; None: the plan's, or the default of a model's first use.
        drafter: "plan", "ngram", a user's "module:Class" or, for a model, the folder of a head, which drafts together
            with the n-gram table.
        force_machine: whether a plan of another machine is allowed.
        backend: builder of the steps; None: the default.
        chat: whether a model without a chat template is refused.
        grow_table: whether counts of the answers are added to the model's n-gram table; None: only if it has one.
        train: folder in which a head is trained. If an earlier training wrote a head for the model to it, that head
            drafts, provided that ``drafter`` is "plan" and the model is not calibrated.

    Raises:
        YggdrasilError: there is no such plan or model, it is unsupported, or with ``chat`` it has no chat template; or
            the plan is of another machine or device, and ``force_machine`` is False.
    """
    check_source(source, chat=chat)
    go_on = work_ahead(source, packs=device == "cpu" or (device is None and not may_have_accelerator()))
    with without_garbage_collection():
        from yggdrasil.cli.progress import PhaseProgress
        from yggdrasil.pretrained import Decoder

    go_on()
    if drafter == "plan" and train is not None and _has_useful_head(train, source):
        drafter = str(train)
    with PhaseProgress() as progress:
        decoder = Decoder.from_pretrained(
            source, drafter=_drafters(drafter), dtype=dtype, device=device, backend=backend,
            force_machine=force_machine, max_length=max_length, chat=chat, reporter=progress,
        )  # fmt: skip
    if grow_table or (grow_table is None and decoder.has_table):
        decoder.grow_table()
    plan = decoder.plan
    if max_length is not None and plan is not None and not plan.is_provisional and max_length > plan.shapes.max_length:
        say(
            f"the plan was calibrated for {plan.shapes.max_length} tokens; its costs are kept for {max_length}, so the "
            "chosen trees may not be the fastest"
        )
    return decoder


def _drafters(drafter: str) -> list[str] | None:
    """Return the ``drafter`` argument of ``Decoder.from_pretrained`` for an option's value; None for "plan".

    A head is combined with the n-gram table.
    """
    from yggdrasil.drafters.registry import TABLE, is_model_free_name

    if drafter == "plan":
        return None
    return [drafter] if is_model_free_name(drafter) else [drafter, TABLE]


def _has_useful_head(train: Path, source: str) -> bool:
    """Return whether ``train`` holds a head trained for the model ``source``, and the model has no calibrated plan.

    A provisional plan does not count, because it is made anew in seconds. A calibrated plan keeps its drafters.
    """
    from yggdrasil.artifacts.plan_names import is_plan
    from yggdrasil.checkpoints.source import Source
    from yggdrasil.engine.plan_lookup import find_plan
    from yggdrasil.scheduling.plan import Plan
    from yggdrasil.training.publish import is_ours
    from yggdrasil.training.settings import work_folder
    from yggdrasil.training.state import held_out_agreement

    if is_plan(source) or not is_ours(train):
        return False
    model = Source.find(source)
    if not held_out_agreement(work_folder(train.absolute()), model.fingerprint()):
        return False
    path = find_plan(model, None, None)
    return path is None or Plan.load(path).is_provisional


def plan_of(source: str) -> str:
    """Return the plan that a command's argument MODEL names: a plan itself, or for a model the file of its plan.

    Raises:
        YggdrasilError: there is no such plan or model, or the model has no plan on this machine.
    """
    from yggdrasil.artifacts.plan_names import is_plan

    if is_plan(source):
        return source
    from yggdrasil.checkpoints.source import Source
    from yggdrasil.engine.plan_lookup import find_plan

    path = find_plan(Source.find(source), None, None)
    if path is None:
        raise YggdrasilError(f"{source} has no plan on this machine yet; make one with `yggdrasil calibrate {source}`")
    return str(path)


def train_beside(decoder: "Decoder", out: Path) -> None:
    """Start a process that trains a head for the decoder's target in the folder ``out``, and say so on standard error.

    Raises:
        YggdrasilError: as ``yggdrasil.training.beside.start_training``.
    """
    from yggdrasil.artifacts import shown
    from yggdrasil.training.beside import start_training

    started = start_training(decoder, out)
    say(
        f"a head is trained in {shown(out)} at low priority while this command runs (process {started.process}, log "
        f"{shown(started.log)}); answers are kept beside it for the next start"
    )
    if started.drafts:
        say(f"the head in {shown(out)} drafts where it pays; the next start uses what it learns now")
    elif started.is_unmeasured and decoder.plan is not None:
        target = decoder.plan.target.source
        say(
            f"no plan has measured the head in {shown(out)}; after this command, `yggdrasil calibrate {target} --quick "
            f"--drafter {shown(out)} --drafter table --name NAME` keeps it where it pays, and later starts use it then"
        )


def prepare_sampling(decoder: "Decoder", sampling: "SamplingParams", speculation: "Speculation | None" = None) -> None:
    """Build the steps for requests with ``sampling`` and ``speculation``; show progress if that takes long."""
    from yggdrasil.acceptance.speculation import DEFAULT
    from yggdrasil.cli.progress import PhaseProgress

    with PhaseProgress() as progress:
        report = progress.phase("building the steps that sampling and constraints need")
        decoder.prepare_sampling(sampling, speculation or DEFAULT)
        report(1.0)


def say(sentence: str) -> None:
    """Print one sentence after "yggdrasil: " to standard error."""
    print(f"yggdrasil: {' '.join(sentence.splitlines())}", file=sys.stderr, flush=True)
