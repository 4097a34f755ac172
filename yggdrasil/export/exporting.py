"""Exports a plan to another engine: measures the engine's costs and chooses the engine's speculation settings."""

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
_OWN_DOCUMENTS = 96  # most answers that are simulated, evenly spread over the target's text
_ANSWERS_SECONDS = 240.0  # after this time, the server gets no further prompt


@dataclass(frozen=True)
class Request:
    """The arguments of an export."""

    plan: str  # name or file
    engine: EngineName
    url: str | None = None  # address of a running llama-server with the target
    drafter_url: str | None = None  # address of a llama-server with the draft model
    costs: Path | None = None  # a file of costs, instead of measuring on servers
    prompts: Path | None = None  # the server answers these; None: simulate on text from calibration
    chat: bool = False  # read ``prompts`` as chats
    limit: int = 24  # most prompts that the server answers
    tokens: int = 128  # number of tokens of each answer
    prompt_tokens: int = 256  # number of tokens of each prompt, from its end
    force_machine: bool = False


@dataclass(frozen=True)
class Exported:
    """The chosen settings, the costs that decided the choice, and remarks for the user."""

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

    Tokens per pass come from the plan's calibration if a draft model or head drafts. For other plans, n-gram lookups
    are simulated on text. Files are read before a server gets a request.

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
    """Choose settings for the plan's draft model or head from the accepted lengths that calibration recorded."""
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
    """Choose settings of a lookup, simulated on the server's answers or on the target's text from calibration."""
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
    """Load the costs from the file ``request.costs``, or measure them on the servers of the request."""
    if request.costs is not None:
        return EngineCosts.load(request.costs)
    assert request.url is not None
    target = LlamaServer(request.url).pass_ms(reporter.phase("measuring passes of the target"))
    drafter: dict[int, float] = {}
    if request.drafter_url is not None:
        drafter = LlamaServer(request.drafter_url).pass_ms(reporter.phase("measuring passes of the draft model"))
    return EngineCosts(*({width: rounded(ms) for width, ms in each.items()} for each in (target, drafter)))


def _named(engine: EngineName, drafter: ModelRef) -> tuple[ModelDrafter, list[str]]:
    """Return the drafter as the engine's options name it, and remarks on conversions that the user has to do."""
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
    """Return token ids of up to ``limit`` prompts, spread evenly over ``file`` and shuffled with a fixed seed."""
    found = read_prompts(file, chat=request.chat)
    tokenizer = load_tokenizer(plan.target.path())
    spread = spread_over(found, request.limit)
    random.Random(0).shuffle(spread)
    return [text[-request.prompt_tokens :] for text in encode_prompts(tokenizer, spread)]


def _answers(
    server: LlamaServer, prompts: Sequence[Sequence[int]], request: Request, reporter: Reporter
) -> list[Document]:
    """Return the server's answers to ``prompts`` in order, until ``_ANSWERS_SECONDS`` have passed."""
    report, documents = reporter.phase(f"letting the server answer {len(prompts)} prompts"), []
    began = monotonic()
    for prompt in prompts:
        documents.append(server.answer(prompt, request.tokens))
        report(len(documents) / len(prompts))
        if monotonic() - began > _ANSWERS_SECONDS:
            break
    report(1.0)
    return documents
