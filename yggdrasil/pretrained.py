"""``Decoder.from_pretrained``: opens a decoder from a model or from a calibrated plan."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from yggdrasil.artifacts import (
    check_weights,
    current_machine,
    plan_path,
    predictor_directory,
    resolve_plan,
    search_roots,
    shown,
)  # fmt: skip
from yggdrasil.artifacts.fork import in_fork
from yggdrasil.artifacts.homes import expanded
from yggdrasil.artifacts.lock import tell
from yggdrasil.artifacts.plan_names import is_plan
from yggdrasil.calibration.measurement.pauses import has_pause
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.checkpoints.source import Source
from yggdrasil.compiler.compiled import Backend
from yggdrasil.drafters.model_free_options import NGramOptions
from yggdrasil.drafters.registry import NGRAM, TABLE, USUAL, is_own, make_drafter, named_drafters, own_drafter
from yggdrasil.drafters.shipped_assets import table_folder
from yggdrasil.drafters.statistics.shipped_table import LEAST_BYTES
from yggdrasil.engine import decoder as engine
from yggdrasil.engine.assembly import best_device, open_device
from yggdrasil.engine.loading import DtypeName
from yggdrasil.engine.online_estimates import restore_estimates, was_busy
from yggdrasil.engine.plan_lookup import USUAL_DTYPE, automatic_name, find_plan, plan_name
from yggdrasil.errors import ArgumentTypeError, ArgumentValueError, YggdrasilError
from yggdrasil.native import is_native
from yggdrasil.prompts import PROBE, encode_chat
from yggdrasil.scheduling.plan import DeviceName, Plan

if TYPE_CHECKING:
    from yggdrasil.calibration.reporter import Reporter
    from yggdrasil.checkpoints.tokenizer import Tokenizer
    from yggdrasil.drafters.protocol import Drafter
    from yggdrasil.engine.assembly import Assembly


class Decoder(engine.Decoder):
    """Decoder of one request at a time, with a target model, drafters, and a policy that picks each tree's shape."""

    @classmethod
    def from_pretrained(  # noqa: PLR0913 - one argument for each option
        cls,
        source: str | Path,
        *,
        drafter: str | Path | Sequence[str] | None = None,
        dtype: DtypeName | None = None,
        backend: Backend | None = None,
        force_machine: bool = False,
        max_length: int | None = None,
        device: DeviceName | None = None,
        chat: bool = False,
        reporter: "Reporter | None" = None,
    ) -> engine.Decoder:
        """Open a decoder for a model, or for a plan: the YAML file of a calibration, with step costs and tree shapes.

        For a model, the plan calibrated for it on this machine is looked up by the model's fingerprint. If there is
        none, the first use times the model's steps for a few seconds, starts from shipped acceptance statistics, and
        stores both as a provisional plan in the user's cache. Later generations refine that plan.

        Args:
            source: a checkpoint folder, GGUF file or hub id, or the name or file of a plan.
            drafter: "text" (n-gram statistics of the prompt), "table" (of text that the target wrote), "ngram" (prompt
                look-up), "none", "module:Class" for your own class, or a draft model or draft head; a list combines
                several in one tree. For a model, a plan with these drafters is used (``find_plan``), or else made; with
                None, any calibrated plan is used, or else one with "text" and "table" is made. For a plan, only "ngram"
                or "module:Class" is allowed, and replaces the plan's drafters.
            dtype: arithmetic of the models, "bfloat16" or "float32"; None: the plan's, or "bfloat16" on first use.
            backend: how steps run, see ``Backend``; None: chosen automatically.
            force_machine: accept a plan that was calibrated on another machine.
            max_length: tokens of prompt and output together; None: the plan's.
            device: "cpu" or "cuda". None: the plan's; for a model, a GPU if there is one.
            chat: check that the model has a chat template before its weights are read.
            reporter: receives progress; None: one line per phase is written to standard error.

        Raises:
            YggdrasilError: there is no such plan or model, or it is unsupported.
        """
        if dtype is not None and dtype not in get_args(DtypeName):
            raise ArgumentValueError(f"dtype must be one of {', '.join(get_args(DtypeName))}, not {dtype!r}")
        if not isinstance(source, str | Path):
            raise ArgumentTypeError(f"the model is {source!r}; it must be a name or a path")
        reporter = reporter or _Lines()
        drafters = _drafters_of(drafter)
        named_drafters(drafters or USUAL)  # raises if the names exclude each other
        if device is not None and device not in get_args(DeviceName):
            raise ArgumentValueError(f"device must be one of {', '.join(get_args(DeviceName))}, not {device!r}")
        if is_plan(source):
            _check_device(source, device, force_machine=force_machine)
            stand_in = _stand_in(source, drafters)
            return cls.from_plan(
                source, dtype=dtype, drafter=stand_in, backend=backend,
                force_machine=force_machine, max_length=max_length, phase=reporter.phase,
                tokenizer=_chat_tokenizer(_target_of(source, force_machine=force_machine)) if chat else None,
            )  # fmt: skip
        found = Source.find(source)
        if found.gguf is None:
            check_weights(found.folder)
        tokenizer = _chat_tokenizer(found) if chat else None
        device = device or best_device()
        open_device(device)  # raises where there is no GPU, before anything is timed
        path = find_plan(found, drafters, dtype, device)
        if path is None:
            open_loaded = partial(cls.from_loaded, backend=backend, max_length=max_length, check=_check_attention)
            return _first_use(open_loaded, found, drafters, dtype or USUAL_DTYPE, backend, device, reporter, tokenizer)
        decoder = cls.from_plan(
            path, target=found.given, backend=backend, max_length=max_length, tokenizer=tokenizer, phase=reporter.phase
        )
        plan = decoder.plan
        if plan is not None and plan.is_provisional and (has_pause(plan.costs[0].verify_ms) or was_busy(path)):
            tell("the machine was busy when the steps were timed; they are timed again")
            _time_steps(decoder, plan, decoder.tokenizer, path, reporter)
        _keep_estimates(decoder, path, found)
        return decoder


def _stand_in(plan: str | Path, drafters: tuple[str, ...] | None) -> "Drafter | None":
    """Return the drafter that replaces the drafters of ``plan``; None to use the plan's own.

    Raises:
        YggdrasilError: ``drafters`` can be used only after a calibration.
    """
    if drafters is None:
        return None
    if drafters == (NGRAM,):
        return make_drafter(NGramOptions())
    if len(drafters) == 1 and is_own(drafters[0]):
        return own_drafter(drafters[0])
    raise YggdrasilError(
        f"the plan {plan} has other drafters; calibrate for {' and '.join(drafters)}, or give {NGRAM} or module:Class"
    )


def _drafters_of(given: object) -> tuple[str, ...] | None:
    """Return the ``drafter`` argument as a tuple of names; None if it is None or an empty list."""
    if isinstance(given, str | Path):
        return (str(given),)
    if given is None:
        return None
    if isinstance(given, bytes) or not isinstance(given, Sequence) or not all(isinstance(e, str | Path) for e in given):
        raise ArgumentTypeError(f"drafter is {given!r}; it must be a name or a path, or a list of them")
    return tuple(map(str, given)) or None


def _chat_tokenizer(source: "str | Source") -> "Tokenizer":
    """Load the tokenizer of ``source``. Raises YggdrasilError if it has no chat template."""
    tokenizer = load_tokenizer(source)
    encode_chat(tokenizer, PROBE)
    return tokenizer


def _target_of(plan: str | Path, *, force_machine: bool) -> str:
    """Return the path of the target model that ``plan`` records."""
    return Plan.load(resolve_plan(plan, current_machine(), force=force_machine)).target.path()


def _first_use(
    open_loaded: Callable[..., engine.Decoder],
    model: Source,
    drafters: Sequence[str] | None,
    dtype: DtypeName,
    backend: Backend | None,
    device: DeviceName,
    reporter: "Reporter",
    tokenizer: "Tokenizer | None",
) -> engine.Decoder:
    """Open a decoder with a new provisional plan, whose step costs are measured for a few seconds, and save the plan.

    ``open_loaded`` is ``Decoder.from_loaded`` with the other options; ``tokenizer`` is the model's if already loaded.
    """
    from yggdrasil.calibration.first_use import first_plan
    from yggdrasil.drafters.heads.kinds import module_note

    root, name = search_roots()[-1], automatic_name(model, drafters, dtype, device)
    path = plan_path(root, name, current_machine())
    if path.exists():
        tell(f"{shown(path)} is damaged, of an older version or of another draft head; it is created again")
    tell(
        f"first use of {model.given}: its steps are timed for a few seconds, and later use refines the estimates; "
        f"`yggdrasil calibrate {model.given}` measures more and makes a predictor and an n-gram table"
    )
    if TABLE in (drafters or ()) and table_folder(model.fingerprint()) is None:
        tell(f"there is no n-gram table of {model.given} yet; `yggdrasil calibrate` makes one")
    if drafters is None and (note := module_note(model.gguf or model.folder)) is not None:
        tell(note)
    named = named_drafters(drafters or USUAL)
    agreement = _agreement(named.drafter, model)
    plan, tokenizer = first_plan(model, named, dtype, name, root, device, agreement, tokenizer)
    folder = predictor_directory(root, name, current_machine())
    decoder = open_loaded(plan, folder, tokenizer=tokenizer, phase=reporter.phase)
    if backend is None and decoder.assembly.target.backend == "eager" and is_native():  # else the library says why
        tell(
            "native steps do not cover its architecture, so PyTorch runs its passes uncompiled; `--backend inductor` "
            "and `yggdrasil calibrate` compile them, which takes minutes"
        )
    _time_steps(decoder, plan, tokenizer, path, reporter)
    _keep_estimates(decoder, path, model)
    return decoder


def _agreement(drafter: str | None, model: Source) -> tuple[float, ...]:
    """Return the held-out agreement of a head with ``model`` by its training on this machine; empty if not known."""
    if drafter is None:
        return ()
    from yggdrasil.training.settings import work_folder
    from yggdrasil.training.state import held_out_agreement

    return held_out_agreement(work_folder(expanded(drafter).absolute()), model.fingerprint())


def _time_steps(decoder: engine.Decoder, plan: Plan, tokenizer: "Tokenizer", path: Path, reporter: "Reporter") -> None:
    """Measure the step costs of ``plan``, use them, and write the plan to ``path``."""
    from yggdrasil.calibration.first_use import with_measured_costs

    report = reporter.phase("timing steps")
    timed = with_measured_costs(plan, decoder.assembly, tokenizer, report)
    decoder.use_costs(timed)
    report(1.0)
    timed.save(path)


def _keep_estimates(decoder: engine.Decoder, path: Path, model: Source) -> None:
    """If the plan is provisional, refine its estimates while decoding and store them in the file ``path``.

    Targets of at least ``LEAST_BYTES`` also draft from the shipped n-gram text.
    """
    if decoder.plan is not None and decoder.plan.is_provisional:
        if sum(tensor.nbytes for tensor in decoder.assembly.target.loaded.tensors.values()) >= LEAST_BYTES:
            decoder.use_shipped_text(model.folder / "tokenizer.json", decoder.plan.tokenizer)
        restore_estimates(path, decoder.plan, partial(_go_on, decoder.policy))
        decoder.keep_estimates(path)


def _go_on(policy: Any, state: Mapping[str, Any]) -> None:
    """Restore the acceptance estimates of ``policy``; its latency scales stay, since the plan's costs are current."""
    if hasattr(policy, "restore") and state:
        policy.restore({**state, "scales": policy.state()["scales"]})


def _check_device(plan: str | Path, device: DeviceName | None, *, force_machine: bool) -> None:
    """Raise YggdrasilError if ``plan`` was calibrated for another device than ``device``."""
    if device is None:
        return
    found = Plan.load(resolve_plan(plan, current_machine(), force=force_machine)).device
    if found != device:
        raise YggdrasilError(f"the plan {plan} is for the device {found}; calibrate one with --device {device}")


def _check_attention(assembly: "Assembly") -> None:
    """Check tree attention against the target's own attention; on a CPU in a fork, which returns its memory."""
    from yggdrasil.runtime.selfcheck import check_tree_attention

    def check() -> str:
        check_tree_attention(assembly.target.loaded)
        return "the same"

    if assembly.target.loaded.device.type == "cpu":
        in_fork(check)
    else:
        check()


class _Lines:
    """Reporter that writes one line per phase to standard error."""

    def phase(self, title: str) -> Callable[[float], None]:
        tell(title)
        return lambda _: None

    def close(self) -> None:
        """Do nothing: progress lines need no closing."""


__all__ = ["Decoder", "find_plan", "is_plan", "plan_name"]
