"""A decoder from whatever names a model: a plan, or the model itself, calibrated quickly where no plan fits."""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from yggdrasil.artifacts import current_machine, list_plans, resolve_plan, search_roots
from yggdrasil.artifacts.fork import in_fork
from yggdrasil.artifacts.gguf import is_gguf
from yggdrasil.artifacts.homes import expanded
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.checkpoints.source import Source
from yggdrasil.compiler.compiled import Backend
from yggdrasil.compiler.packages import any_is_open
from yggdrasil.drafters.named import FREE, NGRAM, USUAL, named_drafters, names_of
from yggdrasil.drafters.ngram import NGramDrafter
from yggdrasil.drafters.shipped import whole_name
from yggdrasil.engine import decoder as engine
from yggdrasil.engine.opened import DtypeName
from yggdrasil.errors import ArgumentTypeError, ArgumentValueError, ArtifactError, YggdrasilError
from yggdrasil.prompts import PROBE, encode_chat, usual_prompts
from yggdrasil.scheduling.plan import Plan

if TYPE_CHECKING:
    from yggdrasil.calibration.reporter import Reporter


class Decoder(engine.Decoder):
    """Decodes one request at a time with a fixed model, drafter, policy and set of shapes."""

    @classmethod
    def from_pretrained(  # noqa: PLR0913 - one argument for each option
        cls,
        source: str | Path,
        *,
        drafter: str | Path | Sequence[str] | None = None,
        keep_drafter: bool = False,
        dtype: DtypeName | None = None,
        backend: Backend | None = None,
        force_machine: bool = False,
        max_length: int | None = None,
        chat: bool = False,
        reporter: "Reporter | None" = None,
    ) -> engine.Decoder:
        """Load a model (a folder, a GGUF file or a hub id), or what a plan's name or file names.

        The model's plan for this machine is found by its content: the newest, or the newest with ``drafter`` ("text",
        "table", "recycling", "ngram", "none", or another model; several guess in one tree). Where there is none a quick
        calibration makes one in the user's cache first, and says so on standard error; ``reporter`` shows how far it
        is. It leaves a model out that does not surely save time beside guesses that cost no pass, unless
        ``keep_drafter``. With a plan, "ngram" stands in for its own drafter, and ``force_machine`` takes one of another
        machine.
        ``chat``: a model without a chat template is refused, before anything is compiled.

        Raises:
            YggdrasilError: no such plan or model, or one that cannot be decoded with.
        """
        if dtype is not None and dtype not in get_args(DtypeName):
            raise ArgumentValueError(f"dtype must be one of {', '.join(get_args(DtypeName))}, not {dtype!r}")
        if not isinstance(source, str | Path):
            raise ArgumentTypeError(f"the model is {source!r}; it must be a name or a path")
        reporter = reporter or _Lines()
        drafters = _drafters_of(drafter)
        if keep_drafter and named_drafters(drafters or USUAL).drafter is None:
            raise ArgumentValueError("keep_drafter is for a draft model or a head, and drafter names none")
        if is_plan(source):
            if drafters not in (None, (NGRAM,)):
                asked = " and ".join(drafters or ())
                raise YggdrasilError(f"the plan {source} has its drafter; calibrate for {asked}, or give {NGRAM}")
            tokenizer = load_tokenizer(_target_of(source, force_machine=force_machine)) if chat else None
            if tokenizer is not None:
                encode_chat(tokenizer, PROBE)
            stand_in = NGramDrafter() if drafters else None
            return cls.from_plan(
                source,
                dtype=dtype,
                drafter=stand_in,
                backend=backend,
                force_machine=force_machine,
                max_length=max_length,
                tokenizer=tokenizer,
                phase=reporter.phase,
            )
        found = Source.find(source)
        tokenizer = load_tokenizer(found) if chat else None
        if tokenizer is not None:
            encode_chat(tokenizer, PROBE)
        plan = find_plan(found, drafters, dtype, keeps_drafter=keep_drafter)
        if plan is None:
            plan = _calibrated(found, drafters, dtype or "bfloat16", reporter, keeps_drafter=keep_drafter)
        return cls.from_plan(
            plan, target=found.given, backend=backend, max_length=max_length, tokenizer=tokenizer, phase=reporter.phase
        )


def _drafters_of(given: object) -> tuple[str, ...] | None:
    if isinstance(given, str | Path):
        return (str(given),)
    if given is None:
        return None
    if isinstance(given, bytes) or not isinstance(given, Sequence) or not all(isinstance(e, str | Path) for e in given):
        raise ArgumentTypeError(f"drafter is {given!r}; it must be a name or a path, or a list of them")
    return tuple(map(str, given)) or None


def _target_of(plan: str | Path, *, force_machine: bool) -> str:
    """Where the target of a plan lies."""
    return Plan.load(resolve_plan(plan, current_machine(), force=force_machine)).target.path()


def is_plan(given: str | Path) -> bool:
    """Whether this names a plan, not a model: a file that is no GGUF file, or a name that is no path."""
    path = expanded(given)
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        return not is_gguf(path)
    is_name = path.name == str(given)
    return is_name and (not path.is_dir() or bool(_listed(str(given))))


def _listed(name: str) -> list[object]:
    try:
        return list(list_plans(name))
    except ArtifactError:  # nothing that a plan may be called
        return []


def find_plan(
    model: Source, drafters: Sequence[str] | None, dtype: DtypeName | None, *, keeps_drafter: bool = False
) -> Path | None:
    """The newest plan for this machine that decodes with just this model; None where there is none.

    It has all ``drafters`` that are named, or has left them out because they do not pay unless ``keeps_drafter``, and
    no model that is not. One on the blocks of a file as they are comes before any other.
    """
    machine, digits = current_machine(), model.fingerprint()
    wanted = {name if name in FREE else Source.find(whole_name(name)).fingerprint() for name in drafters or ()}
    fitting = []
    for entry in list_plans():
        try:
            plan = Plan.load(entry.path) if entry.fits(machine) else None
        except ArtifactError:
            continue
        if plan is None or plan.target.fingerprint != digits or _rounds(plan):
            continue
        if not wanted:  # one that was made for drafters that were tried once is not meant where none is named
            is_meant = not entry.name.startswith(f"{_automatic_name(model, None, plan.dtype)}-")
        else:
            tried = _model_of(plan) if keeps_drafter else _considered(plan)
            is_meant = _model_of(plan) <= wanted <= tried | names_of(plan.free)
            is_meant &= keeps_drafter or entry.name != _automatic_name(model, drafters, plan.dtype, keeps_drafter=True)
        if dtype in (None, plan.dtype) and is_meant:
            fitting.append((plan.target.weights == "file", entry.path.stat().st_mtime_ns, entry.path))
    return max(fitting)[-1] if fitting else None


def _rounds(plan: Plan) -> bool:
    """Whether a model of it is another than the one that was named: rounded when it is loaded."""
    models = [plan.target] if plan.drafter is None else [plan.target, plan.drafter]
    return any(model.weights not in ("full", "file") for model in models)


def _model_of(plan: Plan) -> set[str]:
    """The model that drafts, by its fingerprint."""
    return set() if plan.drafter is None else {plan.drafter.fingerprint}


def _considered(plan: Plan) -> set[str]:
    """The model that drafts, or did not pay."""
    return _model_of(plan) | (set() if plan.left_out is None else {plan.left_out.drafter.fingerprint})


def plan_name(model: str | Path) -> str:
    """What a plan of this model is called unless told otherwise: the last part of its place, as a name may be."""
    path = expanded(model)
    last = path.stem if is_gguf(path) else path.resolve().name if path.exists() else path.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).lstrip(".-") or "model"


def shipped_prompts(model: str | Path | Source) -> tuple[Path, bool]:
    """The prompts to calibrate ``model`` on where none are given, and whether they are chats (``usual_prompts``)."""
    return usual_prompts(load_tokenizer(model))


def _calibrated(
    model: Source, drafters: Sequence[str] | None, dtype: DtypeName, reporter: "Reporter", *, keeps_drafter: bool
) -> Path:
    """The plan that a calibration makes, in a fork: it takes twice the memory that decoding does.

    A fork has none of the threads that steps ran on: where some did, the calibration is done here.
    """

    def work() -> str:
        try:
            return str(_calibrate(model, drafters, dtype, reporter, keeps_drafter=keeps_drafter))
        finally:
            reporter.close()

    return Path(work() if any_is_open() else in_fork(work))


def _calibrate(
    model: Source, drafters: Sequence[str] | None, dtype: DtypeName, reporter: "Reporter", *, keeps_drafter: bool
) -> Path:
    from yggdrasil.calibration.pair import usual_drafter_weights, usual_length
    from yggdrasil.calibration.pipeline import calibrate
    from yggdrasil.calibration.settings import FIRST, FIRST_WIDTHS, CalibrationSettings, PairSource
    from yggdrasil.checkpoints.usual_weights import usual_weights  # brings transformers' models along
    from yggdrasil.scheduling.plan import Shapes

    print(  # noqa: T201
        f"yggdrasil: no plan of this machine is for {model.given}; making one, once (`yggdrasil calibrate` makes a "
        "better one)",
        file=sys.stderr,
    )
    named = named_drafters(drafters or USUAL)
    draft_widths, verify_widths = FIRST_WIDTHS
    shapes = Shapes(
        max_length=usual_length(model.given, named.drafter),
        draft_widths=() if named.drafter is None else draft_widths,
        verify_widths=(1,) if named.is_plain else verify_widths,
    )
    weights = usual_weights(model, dtype, "cpu"), usual_drafter_weights(named.drafter, dtype, "cpu")
    pair = PairSource(model.given, named.drafter, dtype, 0, 0, shapes, *weights, free=named.free)
    prompts, chat = shipped_prompts(model)
    settings = CalibrationSettings(
        pair, prompts, _automatic_name(model, drafters, dtype, keeps_drafter=keeps_drafter), search_roots()[-1], FIRST,
        chat=chat, keeps_drafter=keeps_drafter,
    )  # fmt: skip
    return calibrate(settings, reporter)


def _automatic_name(
    model: Source, drafters: Sequence[str] | None, dtype: DtypeName, *, keeps_drafter: bool = False
) -> str:
    """Of a plan that is made because there is none: one for every choice of drafters."""
    named = "".join(f"-{plan_name(drafter)}" for drafter in drafters or ())
    return f"{plan_name(model.given)}-{model.fingerprint()[:8]}-{dtype}{named}{'-kept' if keeps_drafter else ''}"


class _Lines:
    """Progress as one line a phase, for those who show none."""

    def phase(self, title: str) -> Callable[[float], None]:
        print(f"yggdrasil: {title}", file=sys.stderr)  # noqa: T201
        return lambda _: None

    def close(self) -> None:
        """Nothing is open."""
