"""``yggdrasil chat``: an interactive chat in the terminal."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from yggdrasil.cli import sampling as opt
from yggdrasil.cli.open_decoder import open_decoder, prepare_sampling, say, train_beside
from yggdrasil.cli.shared_options import ModelArgument, TrainOption, opening_options, opens_decoder
from yggdrasil.errors import ContextFull, Terminated, YggdrasilError

if TYPE_CHECKING:
    from yggdrasil.acceptance.sampling import SamplingParams
    from yggdrasil.engine.decoder import Decoder
    from yggdrasil.engine.request import Generation
    from yggdrasil.engine.request_options import RequestSettings
    from yggdrasil.prompts import Message

_HELP = """/help           list the commands
/reset          begin a new conversation
/system TEXT    begin a new one with this system prompt; without TEXT show it
/retry          answer the last question again
/undo           remove the last question and its answer
/drop           forget the oldest turns if the context is full
/stats          switch figures after each answer on or off
/exit           leave, as Ctrl-D does; Ctrl-C ends an answer"""


@opens_decoder
@opt.takes_recommended_sampling_options
def chat(
    source: ModelArgument,
    system: Annotated[str | None, typer.Option(help="System prompt. Default: the template's own.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print a line of figures after each answer.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 1024,
    stop: Annotated[list[str] | None, typer.Option(help="End an answer before this text; can be repeated.")] = None,
    train: TrainOption = None,
    **options: Any,
) -> None:
    """Chat with a model, in its own chat template. Reads questions from the terminal, or line by line from a pipe."""
    from yggdrasil.engine.request_options import RequestSettings

    settings = RequestSettings(
        max_new_tokens, tuple(stop or ()), speculation=opt.speculation_of(options), sampling=opt.given_sampling(options)
    )  # checked before the model is loaded
    decoder = open_decoder(source, **opening_options(options), chat=True, train=train)
    if train is not None:
        train_beside(decoder, train)
    settings = replace(settings, sampling=_sampling(decoder, options))
    if settings.sampling.needs_logits:
        prepare_sampling(decoder, settings.sampling, settings.speculation)
    conversation = Conversation(decoder, settings, system)
    conversation.shows_stats = stats
    if not settings.speculation.is_lossless:
        say(f"the rule {settings.speculation.rule_name} is lossy: the output is not the target's own")
    if sys.stdin.isatty():
        _talk(conversation)
    else:
        _answer_lines(conversation)


def _sampling(decoder: "Decoder", options: dict[str, Any]) -> "SamplingParams":
    """Return the sampling parameters of all answers, and print them."""
    from yggdrasil.engine.recommended_sampling import describe, recommended_sampling_of

    own = recommended_sampling_of(decoder)
    chosen = opt.resolved_sampling(options, own.params)
    if options["greedy"]:
        shown = "greedy"
    elif all(options[name] is None for name in opt.OWN):
        shown = own.describe()
    else:
        shown = describe(chosen)
    say(f"sampling: {shown}{'' if chosen.is_greedy else '; --greedy takes the best token always'}")
    return chosen


def _talk(conversation: "Conversation") -> None:
    """Read lines from the terminal until the user leaves; an error does not end the conversation."""
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() edits lines and remembers them from now on)
    print("/help shows what there is; Ctrl-C ends an answer, Ctrl-D the chat", file=sys.stderr)
    while True:
        try:
            line = input("> ")
        except Terminated:
            raise
        except KeyboardInterrupt:
            print("\nCtrl-D or /exit leaves", file=sys.stderr)
            continue
        except EOFError:
            print()
            return
        try:
            if not conversation.take(line):
                return
        except YggdrasilError as error:
            say(str(error))
        except Terminated:
            raise
        except KeyboardInterrupt:  # it ends the answer alone
            pass


def _answer_lines(conversation: "Conversation") -> None:
    """Take every line of standard input as a turn; an error ends the command."""
    try:
        for line in sys.stdin:
            if not conversation.take(line.rstrip("\r\n")):
                return
    except UnicodeDecodeError as error:
        raise YggdrasilError(f"standard input is not text in {error.encoding} (byte {error.start})") from error


class _Exchange(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str


class Conversation:
    """The questions and answers of a conversation, and the handling of a line that the user types."""

    def __init__(self, decoder: "Decoder", settings: "RequestSettings", system: str | None = None) -> None:
        self._decoder, self._settings = decoder, settings
        self._system = system
        self._exchanges: list[_Exchange] = []
        self._unanswered: str | None = None  # a question that the context had no room for
        self.shows_stats = False
        decoder.encode_chat(self.messages("a"))  # raises now if the template takes no system prompt

    def messages(self, question: str) -> "list[Message]":
        """Return the messages of the conversation so far, the system prompt first, and ``question`` as the last."""
        from yggdrasil.prompts import Message

        system = [] if self._system is None else [Message("system", self._system)]
        turns = [
            turn
            for exchange in self._exchanges
            for turn in (Message("user", exchange.question), Message("assistant", exchange.answer))
        ]
        return [*system, *turns, Message("user", question)]

    def take(self, line: str) -> bool:
        """Answer a question or run a command that the user typed, and return whether the conversation continues.

        A line that begins with "/" is a command; "/exit", "/quit" and "/bye" end the conversation. An empty line does
        nothing.

        Raises:
            YggdrasilError: the question cannot be answered, and is not added to the conversation.
            KeyboardInterrupt: the user has interrupted the answer; the conversation keeps the answer's text so far.
        """
        if not line.strip():
            return True
        if line.startswith("/"):
            return self._obey(*line.strip().partition(" ")[::2])
        self._ask(line)
        return True

    def _obey(self, command: str, text: str) -> bool:
        if command in ("/exit", "/quit", "/bye"):
            return False
        if command == "/reset":
            self._exchanges, self._unanswered = [], None
        elif command == "/drop":
            self._drop()
        elif command == "/system":
            self._set_system(text.strip())
        elif command in ("/retry", "/undo"):
            self._take_back(is_asked_again=command == "/retry")
        elif command == "/stats":
            self.shows_stats = not self.shows_stats
        elif command == "/help":
            print(_HELP, file=sys.stderr)
        else:
            say(f"there is no {command}; /help shows what there is")
        return True

    def _set_system(self, text: str) -> None:
        if not text:
            say("no system prompt but the template's own" if self._system is None else f"system: {self._system}")
            return
        before = self._system, self._exchanges
        self._system, self._exchanges = text, []
        try:
            self._decoder.encode_chat(self.messages("a"))
        except YggdrasilError:
            self._system, self._exchanges = before
            raise
        self._unanswered = None

    def _take_back(self, *, is_asked_again: bool) -> None:
        if not self._exchanges:
            say("nothing was asked yet")
            return
        last = self._exchanges.pop()
        if not is_asked_again:
            return
        before = len(self._exchanges)
        try:
            self._ask(last.question)
        finally:
            if len(self._exchanges) == before:  # there is no other answer
                self._exchanges.append(last)

    def _drop(self) -> None:
        """Drop the oldest turns until half of the context is free, then answer the question that had no room."""
        total, limit = len(self._exchanges), self._decoder.assembly.engine.max_length // 2
        while self._exchanges and self._size(self._unanswered or "a") > limit:
            del self._exchanges[0]
        say(f"{total - len(self._exchanges)} of {total} questions are forgotten")
        question, self._unanswered = self._unanswered, None
        if question is not None:
            self._ask(question)

    def _size(self, question: str) -> int:
        from yggdrasil.prompts import encode_chat

        return len(encode_chat(self._decoder.tokenizer, self.messages(question)))

    def _ask(self, question: str) -> None:
        """Print and store the answer. An interruption stores the text so far and is raised again."""
        from yggdrasil.cli.progress import with_progress

        settings, request, self._unanswered = self._settings, None, None
        tokens = self._encoded(question)
        try:
            request = self._decoder.start(
                tokens, max_new_tokens=settings.max_new_tokens,
                stop=settings.stop, speculation=settings.speculation, sampling=settings.sampling, begins_turn=True,
            )  # fmt: skip
            for piece in with_progress(request):
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(flush=True)
            if request is not None and (result := request.result()).text:
                self._exchanges.append(_Exchange(question, result.text))
                self._show_figures(result)
            raise
        print(flush=True)
        result = request.result()
        self._exchanges.append(_Exchange(question, result.text))
        self._explain(result)
        self._show_figures(result)

    def _encoded(self, question: str) -> list[int]:
        try:
            return self._decoder.encode_chat(self.messages(question))
        except ContextFull:
            limit = self._decoder.assembly.engine.max_length
            if not self._exchanges:
                raise
            self._unanswered = question
            raise ContextFull(
                f"the conversation fills the context of {limit} tokens; /drop forgets its oldest turns and answers"
            ) from None

    def _show_figures(self, result: "Generation") -> None:
        if self.shows_stats:
            print(figures_line(result), file=sys.stderr, flush=True)

    def _explain(self, result: "Generation") -> None:
        if result.finish_reason == "context":
            limit = self._decoder.assembly.engine.max_length
            say(f"the context of {limit} tokens is full; /drop forgets the oldest turns, /retry then answers again")
        elif result.finish_reason == "length":
            say(f"the answer was cut at {self._settings.max_new_tokens} tokens; --max-new-tokens gives more")


def figures_line(result: "Generation") -> str:
    """Return one line on an answer: tokens, speed, accepted length, time to first token, reused tokens."""
    metrics = result.metrics
    pace = f"{metrics.tpot_ms:.1f} ms per token, {1e3 / metrics.tpot_ms:.1f} tokens/s, " if metrics.tpot_ms else ""
    return (
        f"[{len(result.tokens)} tokens, {pace}AAL {metrics.aal:.2f}, first after {metrics.ttft_ms:.0f} ms, "
        f"{metrics.reused_tokens} of {result.prompt_tokens} prompt tokens reused]"
    )
