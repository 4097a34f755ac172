"""From a plan and an engine to settings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from yggdrasil.artifacts import current_machine, resolve_plan
from yggdrasil.calibration.own_text import Document, read_documents, text_file
from yggdrasil.drafters.heads.kinds import is_head
from yggdrasil.errors import YggdrasilError
from yggdrasil.export.choosing import choose_draft_model, choose_look_up
from yggdrasil.export.costs import EngineCosts
from yggdrasil.export.llama_server import LlamaServer
from yggdrasil.export.settings import ENGINES, EngineName, Settings, not_said
from yggdrasil.models.facts import load_tokenizer
from yggdrasil.predictor.bundle import Learned
from yggdrasil.prompts import encode_prompt, read_prompts
from yggdrasil.scheduling.plan import ModelRef, Plan, check_plan
from yggdrasil.scheduling.search import AcceptedLengths

_OWN_DOCUMENTS = 96  # of the target's own text, spread over it


class Reporter(Protocol):
    """Where progress goes; phases are sequential, fractions run from 0 to 1."""

    def phase(self, title: str) -> Callable[[float], None]:
        """Begin a phase and return where its fraction is reported."""


@dataclass(frozen=True)
class Request:
    """What is exported, and from what."""

    plan: str
    engine: EngineName
    url: str | None = None  # of a running llama-server with the target
    drafter_url: str | None = None  # and of one with the draft model
    costs: Path | None = None  # instead of servers
    prompts: Path | None = None  # that the server answers: text to foresee look-ups on, instead of the plan's own
    chat: bool = False
    limit: int = 24
    tokens: int = 128
    prompt_tokens: int = 256
    force_machine: bool = False


@dataclass(frozen=True)
class Exported:
    """Settings, and what to know of them."""

    settings: Settings
    costs: EngineCosts
    remarks: tuple[str, ...]
    not_said: tuple[str, ...]  # of the plan, in the engine's settings

    def as_dict(self) -> dict[str, Any]:
        chosen = self.settings
        return {
            "engine": chosen.engine,
            "documents": ENGINES[chosen.engine].documents,
            "method": chosen.method,
            "options": chosen.options,
            "command_line": chosen.line,
            "foreseen": vars(chosen.foreseen),
            "costs": vars(self.costs),
            "remarks": list(self.remarks),
            "not_said": list(self.not_said),
        }


def export(request: Request, reporter: Reporter) -> Exported:
    """Choose settings; YggdrasilError where costs or text are missing or do not fit."""
    machine = current_machine()
    path = resolve_plan(request.plan, machine, force=request.force_machine)
    _check(request)
    plan = Plan.load(path)
    check_plan(plan, machine, force_machine=request.force_machine)
    server = LlamaServer(request.url) if request.url else None
    remarks = [f"options of {ENGINES[request.engine].documents}"]
    if server is not None:
        remarks.append(f"costs and text of {server.describe()} at {request.url}")
    costs = EngineCosts.load(request.costs) if request.costs else _measured(request, reporter)
    if isinstance(plan.drafter, ModelRef):
        if is_head(plan.drafter.path()):
            raise YggdrasilError(
                f"{plan.name} drafts with a head, whose costs elsewhere are not measured; take another plan"
            )
        learned = Learned.load(path.parent / plan.predictor)
        lengths = AcceptedLengths(learned.mean_survival, learned.ratios, plan.shapes.verify_widths)
        drafter, remark = _named(request.engine, plan.drafter)
        settings = choose_draft_model(request.engine, costs, lengths, learned.acceptance, drafter)
        remarks += [*remark, "accepted lengths are those the plan's calibration recorded"]
        return Exported(settings, costs, tuple(remarks), not_said(request.engine, by_model=True))
    documents, remark = _documents(request, plan, server, reporter)
    settings = choose_look_up(request.engine, costs, documents)
    return Exported(settings, costs, (*remarks, *remark), not_said(request.engine, by_model=False))


def _check(request: Request) -> None:
    """What can be said before the plan is read."""
    if request.costs is None and request.url is None:
        raise YggdrasilError(
            "export needs what the engine's passes cost: give --costs FILE, or --url of a llama-server"
        )
    if request.costs is None and request.engine != "llama-server":
        raise YggdrasilError(
            f"costs are measured on llama-server only; give those of {request.engine} with --costs FILE"
        )
    if request.prompts is not None and request.url is None:
        raise YggdrasilError("--prompts needs --url of a llama-server, which answers them")


def _measured(request: Request, reporter: Reporter) -> EngineCosts:
    assert request.url is not None
    target = LlamaServer(request.url).pass_ms(reporter.phase("measuring passes of the target"))
    drafter: dict[int, float] = {}
    if request.drafter_url is not None:
        drafter = LlamaServer(request.drafter_url).pass_ms(reporter.phase("measuring passes of the draft model"))
    return EngineCosts(_short(target), _short(drafter))


def _short(times: dict[int, float]) -> dict[int, float]:
    return {width: float(f"{ms:.4g}") for width, ms in times.items()}


def _named(engine: EngineName, drafter: ModelRef) -> tuple[str, list[str]]:
    """The draft model as the engine's options name it, and what has to be done for that."""
    path = drafter.path()
    if engine == "llama-server" and not path.endswith(".gguf"):
        return f"{Path(path).name}.gguf", [f"convert {path} with llama.cpp's convert_hf_to_gguf.py first"]
    if engine != "llama-server" and path.endswith(".gguf"):
        return path, [f"{engine} drafts with checkpoint folders; {path} may have to be converted"]
    return path, []


def _documents(
    request: Request, plan: Plan, server: LlamaServer | None, reporter: Reporter
) -> tuple[Sequence[Document], list[str]]:
    """Text to foresee look-ups on: the server's answers to prompts, or what the target wrote in calibration."""
    if request.prompts is None or server is None:
        own = read_documents(text_file(f"{plan.target.fingerprint}-{plan.target.weights}"))
        step = max(len(own) / _OWN_DOCUMENTS, 1.0)
        spread = [own[int(i * step)] for i in range(min(len(own), _OWN_DOCUMENTS))]
        return spread, [f"look-ups were foreseen on {len(spread)} answers that the target wrote in calibration"]
    tokenizer = load_tokenizer(plan.target.path())
    found = read_prompts(request.prompts, chat=request.chat)
    count = min(request.limit, len(found))
    spread_prompts = [found[i * len(found) // count] for i in range(count)]  # a file often has its kinds in blocks
    report = reporter.phase(f"letting the server answer {count} prompts")
    documents = []
    for i, prompt in enumerate(spread_prompts):
        tokens = encode_prompt(tokenizer, prompt)[-request.prompt_tokens :]
        documents.append(server.answer(tokens, request.tokens))
        report((i + 1) / count)
    return documents, [f"look-ups were foreseen on the server's answers to {count} prompts of {request.prompts.name}"]
