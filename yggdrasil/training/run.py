"""The training loop of one run: batches, optimiser steps, evaluations on held-out text, and the saved drafter."""

import random
import shutil
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from time import monotonic

import torch
from torch import nn

from yggdrasil.artifacts import model_fingerprint
from yggdrasil.artifacts.atomic import resolve_link
from yggdrasil.checkpoints.source import Source
from yggdrasil.checkpoints.usual_weights import usual_weights
from yggdrasil.drafters.heads.draft_vocabulary import Vocabulary
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.training.dflash import DFlashRecipe
from yggdrasil.training.eagle import EagleRecipe
from yggdrasil.training.estimate import estimate_from_plans
from yggdrasil.training.features import Features, Kept, shards, stack_windows
from yggdrasil.training.objective import Teacher, count_hits, loss_of
from yggdrasil.training.publish import Recipe, publish
from yggdrasil.training.settings import SHOWN, Teller, TrainSettings
from yggdrasil.training.start import load_start_head
from yggdrasil.training.state import KeptTraining, Look, Progress, Training
from yggdrasil.training.unroll import Batch
from yggdrasil.training.windows import Split, Window

_WARM_UP = 50  # steps in which the learning rate rises linearly
_COOLING = 0.3  # last share of a run, in which the learning rate falls linearly to 0
_CLIP = 0.5  # most gradient norm
_BATCH = 2  # windows per step: with 8, training learned half as much in the same time
_MOST_LOGITS = 400_000  # maximum of batch size x draft vocabulary
_AGAIN = 1  # stored shards trained on again after each shard that the target reads for the first time
_MOST_HELD_OUT = 64  # most windows of an evaluation
_LOOKS = 20  # evaluations per run, at most one per minute
_APART = 15  # least time between two evaluations, in durations of an evaluation
_PATIENCE = 12  # evaluations without improvement after which training ends
_LEAST_GAIN = 0.002  # a smaller gain in expected tokens per pass is no improvement
_FULL, _DRAFTER = 2.0, 0.625  # bytes per weight: in bfloat16, and of a drafter on a CPU


class TrainingRun:
    """One run of a training, which continues the earlier run of state ``kept``, or begins anew if ``kept`` is None."""

    def __init__(
        self,
        loaded: LoadedModel,
        source: Source,
        settings: TrainSettings,
        parts: Split,
        kept: KeptTraining | None,
        teller: Teller,
    ) -> None:
        self._settings, self._teller, self._parts = settings, teller, parts
        size, begun = loaded.vocab_size, None
        if kept is None and settings.start is not None:
            begun = load_start_head(settings.start, loaded)
        if kept is not None and settings.kind == "eagle3":
            vocabulary = kept.vocabulary(size)
        elif begun is not None:
            vocabulary = begun.target_tokens(torch.arange(begun.settings.draft_vocab_size))
        else:
            vocabulary = Vocabulary.of((window.text for window in parts.trained), size).tokens
        make: type[Recipe] = EagleRecipe if settings.kind == "eagle3" else DFlashRecipe
        self._recipe = recipe = make(loaded, vocabulary)
        states = resolve_link(settings.work / "states")
        if kept is None:
            shutil.rmtree(states, ignore_errors=True)
        self._features = Features(loaded, recipe.layers, states)
        self._device = loaded.device
        self._training = Training(recipe.initial().to(loaded.device), recipe.initial().to(loaded.device), recipe.rate)
        if kept is not None:
            self._training.load(kept)
        self._progress = Progress(source.fingerprint(), settings.kind) if kept is None else kept.progress
        if settings.start is not None and begun is not None:
            self._training.start_from(begun)
            self._progress.began_as = settings.start.name
            self._progress.began_with = model_fingerprint(settings.start)
        self._teacher = Teacher.of(loaded, vocabulary)
        self._batch_size = max(1, min(_BATCH, _MOST_LOGITS // len(vocabulary)))
        covered = Vocabulary(vocabulary).coverage(window.text for window in parts.held_out)
        self._facts = {
            "target": Path(settings.target).name,
            "target's fingerprint": source.fingerprint(),
            "text": ", ".join(["the target's own", *(file.name for file in (*settings.prompts, *settings.texts))]),
            "answers' tokens there are": str(sum(window.num_learned for window in parts.trained)),
            "of the held-out answers' tokens can be drafted": f"{covered:.1%}",
            "drafted tokens": f"{len(vocabulary)} of {loaded.vocab_size}",
        }
        if self._progress.began_as:
            written = "; the mean of it and of what was learned is written" if self._training.begun else ""
            self._facts["began as"] = self._progress.began_as + written
        self._estimate = estimate_from_plans(
            source.fingerprint(),
            usual_weights(source, "bfloat16", settings.device),
            settings.device,
            self._weights_share(loaded, source),
            settings.kind,
        )
        self._loss = 0.0
        self._report = teller.phase("training")
        self._began = self._deadline = self._looked = self._earlier = self._look_seconds = 0.0
        self._held_out: list[Kept] = []
        self._first_look = len(self._progress.looks)  # of this run

    def _weights_share(self, loaded: LoadedModel, source: Source) -> float:
        """Return the bytes of weights that a drafter pass reads, divided by the bytes that a target pass reads."""
        target = sum(parameter.numel() for parameter in loaded.model.parameters())
        drafter = sum(parameter.numel() for parameter in self._training.head.parameters())
        if self._settings.device != "cpu":
            return drafter / target
        read = target * _FULL if source.gguf is None else source.gguf.stat().st_size
        return drafter * _DRAFTER / read

    def train_until(self, deadline: float) -> None:
        """Train until ``deadline`` (seconds of ``time.monotonic``) or until nothing improves.

        Every evaluation, of which the last one ends the run, publishes the drafter.

        Raises:
            KeyboardInterrupt: the run was interrupted. The state is saved first, and the drafter is not published.
        """
        self._held_out = self._features.load_or_compute("held-out", self._parts.held_out[:_MOST_HELD_OUT])
        if self._estimate is None:
            target = self._settings.target
            self._teller.tell(
                f"no plan says what passes of {target} take here, so no speed-up is given; make one with `yggdrasil "
                f"calibrate {target} --name NAME`"
            )
        self._began = self._looked = monotonic()
        self._deadline = deadline
        self._earlier = self._progress.seconds
        try:
            for batch in self._batches():
                self._step(batch)
                if self._is_over():
                    break
            self._look()
        except KeyboardInterrupt:  # the drafter's folder stays that of the last evaluation
            self._training.save(self._settings.work, self._progress)
            raise

    def _batches(self) -> Iterator[Batch]:
        """Yield batches without end, from the shard at which the earlier run stopped."""
        lots = shards(self._parts.trained)
        while True:
            order = list(range(len(lots)))
            random.Random(self._progress.passes).shuffle(order)
            for number in order[self._progress.place :]:
                is_new = not self._features.has(_name(number), lots[number])
                yield from self._of_shard(number, lots)
                if is_new:  # the target's pass costs more than a training step
                    seen = [each for each in range(len(lots)) if self._features.has(_name(each), lots[each])]
                    for again in random.Random(self._progress.steps).sample(seen, min(_AGAIN, len(seen))):
                        yield from self._of_shard(again, lots)
                self._progress.place += 1
            self._progress.passes, self._progress.place = self._progress.passes + 1, 0

    def _of_shard(self, number: int, lots: Sequence[Sequence[Window]]) -> Iterator[Batch]:
        kept = self._features.load_or_compute(_name(number), lots[number])
        yield from _batches_of(kept, self._batch_size, self._progress.steps, learns_prompts=True)

    def _step(self, batch: Batch) -> None:
        training, progress = self._training, self._progress
        for group in training.optimizer.param_groups:
            group["lr"] = self._recipe.rate * min(1.0, (1 + progress.steps) / _WARM_UP, self._left / _COOLING)
        batch = batch.to(self._device)
        with torch.autocast(self._device.type, torch.bfloat16):
            drafted = self._recipe.steps(training.head, batch, self._recipe.num_taught)
            loss = loss_of(drafted, self._teacher, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(training.head.parameters(), _CLIP)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.update_average(progress.steps)
        progress.steps += 1
        progress.tokens += int(batch.learned.sum())
        progress.seconds = self._earlier + monotonic() - self._began
        self._loss += (loss.item() - self._loss) * (1.0 if progress.steps == 1 else 0.02)

    @property
    def _left(self) -> float:
        """Remaining share of this run's time, 1 to 0."""
        whole = self._deadline - self._began
        return max(self._deadline - monotonic(), 0.0) / whole if whole > 0 else 0.0

    def _is_over(self) -> bool:
        """Return whether the time is up, after an evaluation if due; start the final cooling if nothing improves."""
        now, left = monotonic(), self._left
        self._report(1.0 - left)
        if not left:
            return True
        if now - self._looked >= max(60.0, (self._deadline - self._began) / _LOOKS, _APART * self._look_seconds):
            self._look()
        if left > _COOLING and _has_settled(self._progress.looks[self._first_look :]):
            self._deadline = self._began + (now - self._began) / (1 - _COOLING)  # cooling begins now
        return False

    def _look(self) -> None:
        """Evaluate on held-out text, save the training's state, publish the drafter, and print the results."""
        began, result, progress = monotonic(), self._training.result(), self._progress
        held_out = (batch.to(self._device) for batch in _batches_of(self._held_out, self._batch_size, 0))
        with torch.autocast(self._device.type, torch.bfloat16):
            hits = sum(count_hits(self._recipe.steps(result, batch, SHOWN), self._teacher, batch) for batch in held_out)
        assert isinstance(hits, torch.Tensor)
        shares = hits[:, :2] / hits[:, 2:].clamp(min=1.0)
        look = Look(progress.seconds, progress.tokens, self._loss, shares[:, 0].tolist(), shares[:, 1].tolist())
        progress.looks.append(look)
        self._training.save(self._settings.work, progress)
        estimated = None if self._estimate is None else self._estimate.describe(look.agreement)
        facts = self._facts if estimated is None else self._facts | {"estimated": estimated}
        publish(self._recipe, deepcopy(result).cpu(), facts, look, self._settings.out)
        self._looked = monotonic()
        self._look_seconds = self._looked - began
        left = max(0.0, self._deadline - self._looked) / 60
        self._teller.tell(
            f"{look.seconds / 60:6.1f} min, {look.tokens / 1e3:7.0f}k tokens, loss {look.loss:.3f}, agreement "
            f"{' '.join(f'{share:.3f}' for share in look.agreement)}, {look.expected:.2f} tokens per pass "
            f"with chains of four; {left:.0f} min left"
        )
        if estimated is not None:
            self._teller.tell(f"{'':>6}  {estimated}")


def _name(number: int) -> str:
    return f"trained-{number}"


def _batches_of(kept: Sequence[Kept], size: int, seed: int, *, learns_prompts: bool = False) -> list[Batch]:
    """Return batches of ``size`` windows of similar length, shuffled by ``seed``.

    With ``learns_prompts``, prompt tokens are trained on too. Prompts are as informative as answers, more diverse, and
    their states are stored anyway.
    """
    ordered = sorted(kept, key=lambda item: len(item.tokens))
    lots = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    random.Random(seed).shuffle(lots)
    return [stack_windows(lot, learns_prompts=learns_prompts) for lot in lots]


def _has_settled(looks: Sequence[Look]) -> bool:
    """Return whether the last ``_PATIENCE`` evaluations improve by less than ``_LEAST_GAIN`` on the best before."""
    if len(looks) <= _PATIENCE:
        return False
    best_before = max(look.expected for look in looks[:-_PATIENCE])
    return max(look.expected for look in looks[-_PATIENCE:]) < best_before + _LEAST_GAIN
