"""``yggdrasil generate``: decodes prompts and streams the text."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from yggdrasil.cli import checks
from yggdrasil.cli import sampling as opt
from yggdrasil.cli.open_decoder import open_decoder, prepare_sampling, say
from yggdrasil.cli.shared_options import ChatOption, ModelArgument, opening_options, opens_decoder
from yggdrasil.errors import YggdrasilError

if TYPE_CHECKING:
    from yggdrasil.engine.decoder import Decoder
    from yggdrasil.engine.request import Generation
    from yggdrasil.engine.request_options import RequestSettings
    from yggdrasil.prompts import BadLine, Prompt


@opens_decoder
@opt.takes_decoding_options
def generate(
    source: ModelArgument,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(callback=checks.input_file, help="JSON lines with a prompt field, or messages of a chat."),
    ] = None,
    chat: ChatOption = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens to generate.")] = 128,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; can be repeated.")] = None,
    include_stop: Annotated[bool, typer.Option("--include-stop", help="Include the stop text in the output.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after end-of-text tokens.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Read at most so many prompts.")] = None,
    logprobs: opt.Logprobs = None,
    **options: Any,
) -> None:
    """Decode prompts and stream the text; greedy by default. An invalid prompt of a file does not stop the others."""
    from yggdrasil.engine.request_options import RequestSettings
    from yggdrasil.prompts import Prompt, scan_prompts

    if logprobs is not None and not as_json:
        raise YggdrasilError("--logprobs is part of the JSON output alone; add --json")
    if (prompt is None) == (prompts is None):
        raise YggdrasilError("give either --prompt TEXT or --prompts FILE")
    if limit is not None and prompts is None:
        raise YggdrasilError("--limit is for --prompts FILE, which is not given")
    if prompt == "":
        raise YggdrasilError("--prompt is empty; give at least one token of text")
    settings = RequestSettings(
        max_new_tokens, tuple(stop or ()), include_stop, ignore_eos, opt.speculation_of(options),
        opt.sampling_of({**options, "logprobs": logprobs}),
    )  # fmt: skip
    if prompts is not None:
        items = list(scan_prompts(prompts, limit, chat=chat))
    else:
        items = [Prompt("0", prompt or "").as_chat() if chat else Prompt("0", prompt or "")]
    if not any(isinstance(item, Prompt) for item in items):
        raise YggdrasilError(items[0].reason)  # type: ignore[union-attr]
    decoder = open_decoder(source, **opening_options(options), chat=chat)
    _begin(decoder, settings, as_json=as_json)
    printer = _Printer(decoder, settings, as_json=as_json, is_alone=len(items) == 1)
    if prompts is None:
        printer.decode(items[0])  # type: ignore[arg-type]
        return
    num_bad = sum(not printer.try_decode(item) for item in items)
    if num_bad:
        raise YggdrasilError(f"{num_bad} of {len(items)} prompts of {prompts} could not be decoded; the others were")


def _begin(decoder: "Decoder", settings: "RequestSettings", *, as_json: bool) -> None:
    """Build the steps that the settings need, and say on standard error if decoding is greedy or lossy."""
    if settings.sampling.needs_logits:
        prepare_sampling(decoder, settings.sampling, settings.speculation)
    elif not as_json and sys.stderr.isatty():
        say("greedy decoding: the best token always; --temperature 0.7 samples")
    if not settings.speculation.is_lossless:
        say(f"the rule {settings.speculation.rule_name} is lossy: the output is not the target's own")


class _Printer:
    """Decodes prompts and prints the answers."""

    def __init__(self, decoder: "Decoder", settings: "RequestSettings", *, as_json: bool, is_alone: bool) -> None:
        self._decoder, self._settings = decoder, settings
        self._as_json, self._is_alone = as_json, is_alone

    def try_decode(self, item: "Prompt | BadLine") -> bool:
        """Print the answer to a prompt, or the error if the prompt cannot be decoded; return whether it was decoded.

        The error is printed to standard error. For JSON a record of the error is also printed to standard output.
        """
        from yggdrasil.prompts import BadLine

        try:
            if isinstance(item, BadLine):
                raise YggdrasilError(item.reason)
            self.decode(item)
        except YggdrasilError as error:
            place = item.place
            reason = str(error).removeprefix(f"{place} ")
            if self._as_json:
                fault = {"file": place.file, "line": place.line, "reason": reason}
                print(json.dumps({"id": item.id, "error": fault}, ensure_ascii=False), flush=True)
            say(str(error) if str(error).startswith(f"{place} ") else f"{place}: {reason}")
            return False
        return True

    def decode(self, item: "Prompt") -> None:
        """Print the answer to a prompt as it is generated; for JSON, print a record of the complete answer.

        Raises:
            YggdrasilError: the prompt cannot be decoded.
        """
        from yggdrasil.cli.progress import with_progress
        from yggdrasil.prompts import encode_prompt

        settings = self._settings
        request = self._decoder.start(
            encode_prompt(self._decoder.tokenizer, item), max_new_tokens=settings.max_new_tokens, stop=settings.stop,
            include_stop=settings.include_stop, ignore_eos=settings.ignore_eos, speculation=settings.speculation,
            sampling=settings.sampling, begins_turn=item.messages is not None,
        )  # fmt: skip
        if self._as_json:
            for _ in with_progress(request):
                pass
            print(json.dumps(self._record(item.id, request.result()), ensure_ascii=False), flush=True)
            return
        if not self._is_alone:
            print(f"== {item.id} ==")
        try:
            for piece in with_progress(request):
                print(piece, end="", flush=True)
        finally:
            print(flush=True)  # further output, also an error message, begins a new line
        self._explain(item, request.result())

    def _record(self, name: str, result: "Generation") -> dict[str, Any]:
        speculation = self._settings.speculation
        record = {
            "id": name,
            "prompt_tokens": result.prompt_tokens,
            "tokens": result.tokens,
            "text": result.text,
            "finish_reason": result.finish_reason,
            "rule": speculation.rule_name,
            "lossless": speculation.is_lossless,
            "metrics": result.metrics.as_dict(),
        }
        if result.logprobs is not None:
            record["logprobs"] = [vars(entry) for entry in result.logprobs]
        return record

    def _explain(self, item: "Prompt", result: "Generation") -> None:
        """Print why the text is empty or ended at the context's limit."""
        which = "" if self._is_alone else f"{item.id}: "
        if result.finish_reason == "context":
            limit = self._decoder.assembly.engine.max_length
            say(
                f"{which}the text ends where the context of {limit} tokens does; a larger --max-length gives more if "
                "the model allows it"
            )
        elif result.finish_reason == "eos" and not result.text.strip():
            hint = "" if item.messages is not None else "; a chat model answers with --chat"
            say(f"{which}the model ended its text at once{hint}, --ignore-eos goes on")
