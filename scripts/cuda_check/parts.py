"""A model that travels in parts: joined, checked and decoded with."""

import hashlib
from pathlib import Path
from typing import Any

import torch

from cuda_check.notes import Notes
from yggdrasil.engine.assembly import assemble
from yggdrasil.engine.decoder import Decoder
from yggdrasil.policy.fixed import PLAIN_POLICY

PART_BYTES = 30_000_000
SUMS = "SHA256SUMS"


def split(model: Path, folder: Path) -> list[Path]:
    """Write ``model`` to ``folder`` in parts of 30 MB, and the digest of the whole beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    content, paths = model.read_bytes(), []
    for number, begin in enumerate(range(0, len(content), PART_BYTES)):
        path = folder / f"{model.name}.part{number}"
        path.write_bytes(content[begin : begin + PART_BYTES])
        paths.append(path)
    (folder / SUMS).write_text(f"{hashlib.sha256(content).hexdigest()}  {model.name}  {len(paths)}\n")
    return paths


def join(parts: list[Path], folder: Path) -> Path | str:
    """The whole file once all parts are there, else what is missing. Parts of earlier calls are kept in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        if part.resolve().parent != folder.resolve():
            (folder / part.name).write_bytes(part.read_bytes())
    if not (folder / SUMS).exists():
        return f"{SUMS} is not there: send it with a part"
    digest, name, count = (folder / SUMS).read_text().split()
    paths = [folder / f"{name}.part{number}" for number in range(int(count))]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        return f"waits for {', '.join(missing)}"
    content = b"".join(path.read_bytes() for path in paths)
    if hashlib.sha256(content).hexdigest() != digest:
        return f"{name} is damaged: its digest is not {digest[:12]}"
    (folder / name).write_bytes(content)
    return folder / name


def model(notes: Notes, device: torch.device, *, tiny: bool, path: Path) -> None:
    """Plain decoding of a real model, against the same file on the processor."""
    from yggdrasil.checkpoints.facts import load_tokenizer
    from yggdrasil.checkpoints.source import Source
    from yggdrasil.runtime.loading import load_model
    from yggdrasil.scheduling.plan import Shapes

    def tokens(place: torch.device, backend: Any) -> list[int]:
        loaded = load_model(str(path), torch.float32, place, 1, pack=place.type != "cpu")
        shapes = Shapes(max_length=200, draft_widths=(1,), max_depth=1, verify_widths=(1, 2), prefill_widths=(16,))
        decoder = Decoder(assemble(loaded, None, shapes, backend), load_tokenizer(Source.find(str(path))), PLAIN_POLICY,
                          frozenset())  # fmt: skip
        return decoder.generate("The capital of France is", max_new_tokens=8 if tiny else 32).tokens

    expected = notes.attempt("tokens on the processor", lambda: tokens(torch.device("cpu"), "eager"), seconds=20)
    found = notes.attempt("tokens on the device", lambda: tokens(device, "cudagraph"), seconds=20)
    notes.note("equal", expected is not None and expected == found)
