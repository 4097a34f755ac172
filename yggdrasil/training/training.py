"""Trains a drafter end to end: loads an earlier state, reads or generates the text to train on, and runs the loop."""

from pathlib import Path
from time import monotonic

import torch

from yggdrasil.artifacts import check_writable, current_machine, model_fingerprint, shown
from yggdrasil.artifacts.lock import locked
from yggdrasil.calibration.calibration_settings import TextBudget
from yggdrasil.calibration.own_text import Document, OwnText, prompt_key, read_documents, seconds_spent, text_file
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.checkpoints.source import Source
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.checkpoints.usual_weights import usual_weights
from yggdrasil.engine.assembly import open_device
from yggdrasil.errors import YggdrasilError
from yggdrasil.prompts import default_prompts, encode_prompt, encode_prompts, read_prompts
from yggdrasil.runtime.loading import load_model
from yggdrasil.training.publish import is_free, is_ours
from yggdrasil.training.run import TrainingRun
from yggdrasil.training.settings import Teller, TrainSettings
from yggdrasil.training.start import load_start_head
from yggdrasil.training.state import KeptTraining
from yggdrasil.training.texts import read_shipped_answers, read_texts
from yggdrasil.training.windows import Split, split

_LEAST_DOCUMENTS = 8  # least number of texts
_TEXT_SHARE = 1 / 3  # share of the time of all runs for generating text
_MOST_TEXT = 2 / 3  # most share of one run's time for generating text


def train(settings: TrainSettings, teller: Teller) -> Path:
    """Train a head until the time is up or nothing improves, and return the head's folder ``settings.out``.

    If ``settings.work`` has the state of an earlier run, training resumes from that state.

    Raises:
        YggdrasilError: the target is unsupported, prompts or texts cannot be read or are too few, ``out`` has files of
            another origin, the earlier state does not fit the settings, or another process trains into ``out``.
    """
    check_out(settings.out)
    if settings.kind != "eagle3" and settings.start is not None:
        raise YggdrasilError(f"--start names an EAGLE-3 head, not one of --kind {settings.kind}; leave one of them out")
    device = open_device(settings.device)
    deadline = monotonic() + settings.minutes * 60
    source = Source.find(settings.target)
    tokenizer = load_tokenizer(source)
    prompts, texts = _prompts(settings, tokenizer), read_texts(settings.texts, tokenizer)
    texts += read_documents(settings.answers, len(tokenizer))
    if settings.is_beside_use:
        texts += read_shipped_answers(tokenizer)
    torch.set_num_threads(settings.threads or current_machine().cores)
    with locked(settings.work.with_name(settings.work.name + ".lock"), f"a training of {shown(settings.out)}"):
        kept = _kept(settings, source, teller)
        trained = 0.0 if kept is None else kept.progress.seconds
        documents, waited = _own_text(source, tokenizer, prompts, trained, settings, teller)
        deadline += waited
        judges = _judges(tokenizer)
        given, own = split(texts, judges), split(documents, judges)
        parts = Split(given.trained + own.trained, given.held_out + own.held_out)
        count = len(parts.trained) + len(parts.held_out)
        if count < _LEAST_DOCUMENTS or not parts.held_out or not parts.trained:
            fault = "too few" if count < _LEAST_DOCUMENTS else "all alike"
            raise YggdrasilError(
                f"there are {count} texts to train on, {fault}; give more --minutes or --texts, or --prompts other "
                "than those that calibrations judge drafters by"
            )
        loaded = load_model(source, torch.bfloat16, device, torch.get_num_threads(), pack=False)
        TrainingRun(loaded, source, settings, parts, kept, teller).train_until(deadline)
    return settings.out


def check_out(out: Path) -> None:
    """Raise YggdrasilError if the folder ``out`` cannot be written, or has other files than a trained drafter."""
    check_writable(out, is_folder=True)
    if not (is_free(out) or is_ours(out)):
        raise YggdrasilError(f"--out {shown(out)} holds other files than a drafter; name another folder")


def _kept(settings: TrainSettings, source: Source, teller: Teller) -> KeptTraining | None:
    """Load the state from which to resume, or return None. Raises YggdrasilError if it does not fit the settings."""
    kept = KeptTraining.read(settings.work, source.fingerprint(), teller.tell)
    if kept is None and not is_free(settings.out):
        raise YggdrasilError(
            f"--out {shown(settings.out)} holds a drafter, and nothing in {shown(settings.work)} goes on with it; name "
            "another folder, or delete this one to begin anew"
        )
    if kept is not None and kept.progress.kind != settings.kind:
        raise YggdrasilError(
            f"{shown(settings.work)} is of a training of --kind {kept.progress.kind}; name that kind, or another --out"
        )
    if kept is None or settings.start is None:
        return kept
    if kept.progress.began_with != model_fingerprint(settings.start):
        raise YggdrasilError(
            f"--start: nothing says that the training in {shown(settings.work)} began as {shown(settings.start)}; "
            "leave it out to go on, or name another --out"
        )
    return kept


def _prompts(settings: TrainSettings, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of all prompts in the files ``settings.prompts``."""
    is_chat = bool(getattr(tokenizer, "chat_template", None))
    found = [prompt for file in settings.prompts for prompt in read_prompts(file, chat=is_chat)]
    return encode_prompts(tokenizer, found)


def _judges(tokenizer: Tokenizer) -> set[tuple[int, ...]]:
    """Return the keys of calibration's default prompts. Training on their answers would inflate measured speed-ups."""
    file, is_chat = default_prompts(tokenizer)
    return {prompt_key(encode_prompt(tokenizer, prompt)) for prompt in read_prompts(file, chat=is_chat)}


def _own_text(
    source: Source,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    trained: float,
    settings: TrainSettings,
    teller: Teller,
) -> tuple[list[Document], float]:
    """Return (all text of the target, seconds of waiting for a lock), after generating text if ``settings.generates``.

    The text file is shared with calibrations of the target. To generate, the model is loaded in the weight format
    of decoding, and freed at the end; the caller loads the full weights for training.
    """
    weights, device = usual_weights(source, "bfloat16", settings.device), open_device(settings.device)
    if not settings.generates:
        return read_documents(text_file(source.fingerprint(), weights), len(tokenizer)), 0.0
    loaded = load_model(source, torch.bfloat16, device, torch.get_num_threads(), weights=weights)
    if settings.start is not None:
        load_start_head(settings.start, loaded)  # raises now rather than after the text is written
    settings.work.mkdir(parents=True, exist_ok=True)
    writer = OwnText(loaded, tokenizer, prompts, text_file(source.fingerprint(), weights))
    spent = settings.work / "own-text.json"
    return writer.write(_budget(settings, seconds_spent(spent), trained), spent, teller.phase), writer.waited


def _budget(settings: TrainSettings, spent: float, trained: float) -> TextBudget:
    """Return how much text to generate; ``spent`` and ``trained`` are seconds of generating and training so far."""
    run = settings.minutes * 60
    most = spent + run * _MOST_TEXT
    if settings.tokens is not None:
        return TextBudget(most, settings.tokens)
    return TextBudget(min(most, (spent + trained + run) * _TEXT_SHARE))
