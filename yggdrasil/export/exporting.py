"""Exports a plan: measures an engine's costs and chooses its speculation settings."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from yggdrasil.artifacts import current_machine, resolve_plan
from yggdrasil.artifacts.homes import expanded
from yggdrasil.calibration.measurement.costs import rounded
from yggdrasil.calibration.own_text import Document, read_documents, text_file
from yggdrasil.calibration.reporter import Reporter
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.drafters.heads.kinds import kind_of
from yggdrasil.errors import YggdrasilError
from yggdrasil.export.choosing import ModelDrafter, choose_draft_model, choose_look_up, refuse_unknown_head
from yggdrasil.export.costs import EngineCosts
from yggdrasil.export.llama_server import LlamaServer
from yggdrasil.export.settings import ENGINES, EngineName, Settings, unsupported_features
from yggdrasil.predictor.bundle import Learned
from yggdrasil.prompts import encode_prompts, read_prompts, spread_over
from yggdrasil.scheduling.plan import ModelRef, Plan, check_plan
from yggdrasil.scheduling.search import AcceptedLengths

_OWN_MODULE = "the engine finds the module in the target's own folder"
_OWN_DOCUMENTS = 96  # answers of the target's own text that are used, evenly spread
_ANSWERS_SECONDS = 240.0  # after which the server is asked for no further answer


@dataclass(frozen=True)
class Request:
    """The arguments of an export."""

    plan: str
    engine: EngineName
    url: str | None = None  # of a running llama-server with the target
    drafter_url: str | None = None  # of a llama-server with the draft model
    costs: Path | None = None  # a file of costs, instead of measuring on servers
    prompts: Path | None = None  # for the server, whose answers lookups are simulated on; None: the target's text
    chat: bool = False
    limit: int = 24  # prompts that the server answers
    tokens: int = 128  # of each answer
    prompt_tokens: int = 256  # kept of each prompt, its last ones
    force_machine: bool = False


@dataclass(frozen=True)
class Exported:
    """The chosen settings, the costs they were chosen by, and remarks for the user."""

    settings: Settings
    costs: EngineCosts
    remarks: tuple[str, ...]
    not_said: tuple[str, ...]  # features of the plan for which the engine has no option

    def as_dict(self) -> dict[str, Any]:
        """Return settings, costs, remarks and unsupported features as a dictionary for ``json.dumps``."""
        chosen = self.settings
        return {
            "engine": chosen.engine,
            "documents": ENGINES[chosen.engine].documents,
            "method": chosen.method,
            "options": chosen.options,
            "command_line": chosen.line,
            "predicted": vars(chosen.predicted),
            "costs": vars(self.costs),
            "remarks": list(self.remarks),
            "not_said": list(self.not_said),
        }


def export(request: Request, reporter: Reporter) -> Exported:
    """Choose another engine's speculation settings for a plan, with the engine's pass times.

    Tokens per pass are those that the plan's calibration recorded for its draft model or head; for other plans, n-gram
    lookups are simulated on text. Files are read before servers are asked.

    Raises:
        YggdrasilError: costs or text are missing or unusable, a server fails, or the plan is unsupported.
    """
    machine = current_machine()
    path = resolve_plan(request.plan, machine, force=request.force_machine)
    _check(request)
    plan = Plan.load(path)
    check_plan(plan, machine, force_machine=request.force_machine)
    by_model = isinstance(plan.drafter, ModelRef)
    if isinstance(plan.drafter, ModelRef):
        settings, costs, remarks = _by_model(request, plan, plan.drafter, path, reporter)
    else:
        settings, costs, remarks = _by_look_ups(request, plan, reporter)
    of = [f"options of {ENGINES[request.engine].documents}"]
    answers = request.prompts is not None and not by_model
    asked_for = [what for what, is_asked in (("costs", request.costs is None), ("text", answers)) if is_asked]
    if request.url is not None and asked_for:
        of.append(f"{' and '.join(asked_for)} of {LlamaServer(request.url).describe()} at {request.url}")
    return Exported(settings, costs, (*of, *remarks), unsupported_features(request.engine, by_model=by_model))


def _by_model(
    request: Request, plan: Plan, drafter: ModelRef, path: Path, reporter: Reporter
) -> tuple[Settings, EngineCosts, list[str]]:
    """Choose settings of a draft model or head, by the accepted lengths that the plan's calibration recorded."""
    learned = Learned.load(path.parent / plan.predictor)
    lengths = AcceptedLengths(learned.mean_survival, learned.ratios, plan.shapes.verify_widths)
    named, remarks = _named(request.engine, drafter)
    refuse_unknown_head(request.engine, named)
    if request.costs is None and request.drafter_url is None:
        raise YggdrasilError(f"{plan.name} drafts with a model, which costs time too; give its --drafter-url")
    costs = _costs(request, reporter)
    settings = choose_draft_model(request.engine, costs, lengths, learned.acceptance, named)
    return settings, costs, [*remarks, "accepted lengths are those the plan's calibration recorded"]


def _by_look_ups(request: Request, plan: Plan, reporter: Reporter) -> tuple[Settings, EngineCosts, list[str]]:
    """Choose settings of a lookup, simulated on the server's answers or on text that the target wrote before."""
    if request.drafter_url is not None:
        raise YggdrasilError(f"--drafter-url is for plans with a draft model, and {plan.name} has none")
    if request.prompts is None or request.url is None:
        documents = _own_answers(plan)
        costs = _costs(request, reporter)
        wrote = f"{len(documents)} answers of the target from calibration"
    else:
        prompts = _prompts(request, request.prompts, plan)
        costs = _costs(request, reporter)
        documents = _answers(LlamaServer(request.url), prompts, request, reporter)
        wrote = f"the server's answers to {len(documents)} prompts of {request.prompts.name}"
        if len(documents) < len(prompts):
            wrote += f" (of {len(prompts)}; {_ANSWERS_SECONDS:.0f} s had passed)"
    return choose_look_up(request.engine, costs, documents), costs, [f"lookups were simulated on {wrote}"]


def _check(request: Request) -> None:
    """Raise YggdrasilError if arguments are missing or incompatible, before the plan is read."""
    if request.costs is None and request.engine != "llama-server":
        raise YggdrasilError(
            f"costs are measured on llama-server only; give those of {request.engine} with --costs FILE"
        )
    if request.prompts is not None and request.url is None:
        raise YggdrasilError("--prompts needs --url of a llama-server, which answers them")


def _costs(request: Request, reporter: Reporter) -> EngineCosts:
    """Load the costs from the given file, or measure them on the servers."""
    if request.costs is not None:
        return EngineCosts.load(request.costs)
    assert request.url is not None
    target = LlamaServer(request.url).pass_ms(reporter.phase("measuring passes of the target"))
    drafter: dict[int, float] = {}
    if request.drafter_url is not None:
        drafter = LlamaServer(request.drafter_url).pass_ms(reporter.phase("measuring passes of the draft model"))
    return EngineCosts(*({width: rounded(ms) for width, ms in each.items()} for each in (target, drafter)))


def _named(engine: EngineName, drafter: ModelRef) -> tuple[ModelDrafter, list[str]]:
    """Return the drafter as the engine's options name it, and remarks on what the user has to do first."""
    path = drafter.path()
    kind = kind_of(expanded(path))
    if kind is not None:
        return ModelDrafter(path, kind), [_OWN_MODULE] if kind == "mtp" else []
    if engine == "llama-server" and not path.endswith(".gguf"):
        remark = f"convert {path} with llama.cpp's convert_hf_to_gguf.py first"
        return ModelDrafter(f"{Path(path).name}.gguf"), [remark]
    if engine != "llama-server" and path.endswith(".gguf"):
        return ModelDrafter(path), [f"{engine} drafts with checkpoint folders; {path} may have to be converted"]
    return ModelDrafter(path), []


def _own_answers(plan: Plan) -> list[Document]:
    """Return up to ``_OWN_DOCUMENTS`` answers of the target from calibration, evenly spread."""
    own = read_documents(text_file(plan.target.fingerprint, plan.target.weights))
    if not own:
        raise YggdrasilError(
            "there is no text of this target to simulate lookups on; calibrate it, which lets it write some, or give "
            "--prompts, and --url of a running llama-server"
        )
    return spread_over(own, _OWN_DOCUMENTS)


def _prompts(request: Request, file: Path, plan: Plan) -> list[list[int]]:
    """Tokens of prompts that are spread over the file, which often has its kinds in blocks, in random order."""
    found = read_prompts(file, chat=request.chat)
    tokenizer = load_tokenizer(plan.target.path())
    spread = spread_over(found, request.limit)
    random.Random(0).shuffle(spread)
    return [text[-request.prompt_tokens :] for text in encode_prompts(tokenizer, spread)]


def _answers(
    server: LlamaServer, prompts: Sequence[Sequence[int]], request: Request, reporter: Reporter
) -> list[Document]:
    """Return the server's answers to ``prompts`` in order, until ``_ANSWERS_SECONDS`` have passed; at least one."""
    report, documents = reporter.phase(f"letting the server answer {len(prompts)} prompts"), []
    began = monotonic()
    for prompt in prompts:
        documents.append(server.answer(prompt, request.tokens))
        report(len(documents) / len(prompts))
        if monotonic() - began > _ANSWERS_SECONDS:
            break
    report(1.0)
    return documents
