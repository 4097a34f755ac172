"""Route ``POST /v1/completions``."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from yggdrasil.engine.request import Generation
from yggdrasil.serving.chunks import ChunkWriter
from yggdrasil.serving.decoding_options import options_of, with_recommended_sampling
from yggdrasil.serving.errors import Fault
from yggdrasil.serving.exchange import Exchange, JobRequest, answer
from yggdrasil.serving.jobs import Finished, Piece
from yggdrasil.serving.logprobs import CompletionLogprobsWriter
from yggdrasil.serving.replies import Completion, CompletionChoice
from yggdrasil.serving.request_fields import NO_LIMIT, CompletionRequest
from yggdrasil.serving.service import Identity, Service, service_of
from yggdrasil.serving.streams import STREAMED, TextFrames
from yggdrasil.serving.tokenization import infill_marks
from yggdrasil.serving.usage import finish_reason, timings_of, usage_of

router = APIRouter()
_DEFAULT_TOKENS = 16  # OpenAI's default of max_tokens


@router.post("/v1/completions", response_model=Completion, responses=STREAMED)
@router.post("/completions", response_model=Completion, include_in_schema=False)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts, as one object or as server-sent events."""
    service = service_of(request)
    identity = service.identify("cmpl", body.model)
    wanted = await run_in_threadpool(_Completion.of, body, service, identity)
    exchange = Exchange(service.worker, request, wanted.jobs, is_streamed=bool(body.stream), frame=wanted.frame)
    return await answer(exchange, lambda found: wanted.reply(found).model_dump(), wanted.chunks)


@dataclass(frozen=True)
class _Completion:
    """A validated completion request: each prompt is continued ``n`` times."""

    body: CompletionRequest
    service: Service
    identity: Identity
    jobs: list[JobRequest]

    @classmethod
    def of(cls, body: CompletionRequest, service: Service, identity: Identity) -> "_Completion":
        limits = service.settings.limits
        count = _num_prompts(body) * (body.n or 1)  # checked first: tokenizing a million prompts takes half a minute
        if count > limits.answers:
            raise Fault(400, f"{count} answers are requested; at most {limits.answers} are given", param="n")
        longest = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        longest = service.texts.limit if longest == NO_LIMIT else longest
        if longest == 0 and (not body.echo or body.stream):
            raise Fault(
                400,
                "max_tokens is 0, which echo takes where nothing is streamed; ask for a token at least",
                param="max_tokens",
            )
        sampled = with_recommended_sampling(body, service.sampling.params)
        jobs = [
            JobRequest(
                service.texts.check(prompt),
                options_of(sampled, limits, max_new_tokens=max(1, longest), choice=choice, logprobs=body.logprobs),
                scores=body.logprobs if body.echo else None,
            )
            for prompt in _prompts(body, service)
            for choice in range(body.n or 1)
        ]
        service.check_constraint(jobs)
        return cls(body, service, identity, jobs)

    def reply(self, finished: list[Finished]) -> Completion:
        """Return the reply to a completion request; ``finished`` are all its answers, in the order of their indices."""
        results = [self._kept(each.result) for each in finished]
        return Completion(
            **self.identity._asdict(), choices=[self._choice(i, each) for i, each in enumerate(finished)],
            usage=usage_of(results, self.body.n or 1), timings=timings_of(results, self.service.decoder.plan),
            warnings=self.warnings,
        )  # fmt: skip

    @property
    def warnings(self) -> list[str]:
        """Sentences on ignored unknown fields that may change the answer (at most 16), and on a repeated BOS token."""
        warnings = self.body.warnings
        begin = self.service.decoder.tokenizer.bos_token_id
        if begin is not None and any(list(job.prompt[:2]) == [begin] * 2 for job in self.jobs):
            name = self.service.texts.token_text(begin)
            warnings.append(f"the prompt begins with {name}, which the tokenizer writes too; leave it out")
        return warnings

    def _choice(self, index: int, finished: Finished) -> CompletionChoice:
        result = self._kept(finished.result)
        entries = None if result.logprobs is None else [*finished.prompt_logprobs, *result.logprobs]
        logprobs = None if entries is None else self._writer(index).write(entries)
        text = self._echoed(index) + result.text
        return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason(result))

    def _kept(self, result: Generation) -> Generation:
        """Return ``result``. If ``max_tokens`` is 0, leave out the one token that the decoder always generates."""
        if self.body.max_tokens != 0:
            return result
        return replace(result, tokens=[], text="", finish_reason="length", logprobs=result.logprobs and [])

    def _echoed(self, index: int) -> str:
        """Return the text before an answer: with ``echo`` the prompt, as sent or detokenised; else empty."""
        if not self.body.echo:
            return ""
        given = self.body.prompt
        sent = given if isinstance(given, str) else given[index // (self.body.n or 1)]
        return sent if isinstance(sent, str) else self._decoded(index)

    def _decoded(self, index: int) -> str:
        """Detokenize the prompt of an answer, special tokens included."""
        return self.service.texts.decode(self.jobs[index].prompt)

    def _writer(self, index: int) -> CompletionLogprobsWriter:
        if not self.body.echo or self.body.logprobs is None:
            return CompletionLogprobsWriter(self.service.texts)
        unshown = len(self._decoded(index)) - len(self._echoed(index))
        return CompletionLogprobsWriter(self.service.texts, has_prompt=True, unshown=unshown)

    async def chunks(self, exchange: Exchange) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield the chunks of a streamed completion: text as it becomes final, then the finish reason."""
        numbers = range(len(self.jobs))
        writers, echoed = [self._writer(i) for i in numbers], [self._echoed(i) for i in numbers]
        chunks, results = self._chunks(), list[Generation]()
        async for index, event in exchange.events():
            if isinstance(event, Piece) and (event.text or event.logprobs or echoed[index]):
                logprobs = writers[index].write(event.logprobs).model_dump() if event.logprobs else None
                yield [chunks.chunk([_part(index, echoed[index] + event.text, logprobs)])]
                echoed[index] = ""
            elif isinstance(event, Finished):
                results.append(event.result)
                yield [chunks.end(_part(index, "", None, finish_reason(event.result)), results, len(self.jobs))]
        if chunks.shows_usage:
            yield [chunks.usage(results, self.body.n or 1)]

    @property
    def frame(self) -> TextFrames | None:
        """Encoder of text that the decoder's thread may send; None with several answers or with log-probabilities."""
        if len(self.jobs) > 1 or self.body.logprobs is not None:
            return None
        writer = self._chunks()
        return TextFrames(lambda text: writer.chunk([_part(0, text, None)]))

    def _chunks(self) -> ChunkWriter:
        plan, body = self.service.decoder.plan, self.body
        return ChunkWriter(self.identity, "text_completion", body.stream_options, plan, self.warnings)


def _part(index: int, text: str, logprobs: Any, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _num_prompts(body: CompletionRequest) -> int:
    given = body.prompt
    return len(given) if isinstance(given, list) and given and not isinstance(given[0], int) else 1


def _prompts(body: CompletionRequest, service: Service) -> list[list[int]]:
    """Tokenize the prompts, which are given as texts or token ids, one or several.

    Raises:
        Fault: there is no prompt, a prompt is too long, or ``suffix`` cannot be served (see ``_infilled``).
    """
    given = body.prompt
    if body.suffix:
        return [_infilled(given, body.suffix, service)]
    if isinstance(given, str):
        return [_encoded(given, service)]
    if not given:
        raise Fault(400, "prompt is an empty list; give a text or tokens", param="prompt")
    if isinstance(given[0], int):
        return [[token for token in given if isinstance(token, int)]]
    return [_encoded(each, service) if isinstance(each, str) else each for each in given if not isinstance(each, int)]


def _encoded(text: str, service: Service) -> list[int]:
    service.texts.check_size([text])
    return service.texts.encode(text)


def _infilled(given: Any, suffix: str, service: Service) -> list[int]:
    """Tokenize prefix and suffix with the model's fill-in-the-middle tokens, after its BOS token if it has one.

    Raises:
        Fault: the tokenizer lacks these tokens, ``given`` is not one text, or a text is too long.
    """
    marks = infill_marks(service.decoder.tokenizer)
    if marks is None:
        raise Fault(400, "the model's tokenizer has no tokens for filling in; leave out suffix", param="suffix")
    if not isinstance(given, str):
        raise Fault(400, "with suffix the prompt is one text", param="prompt")
    service.texts.check_size([given, suffix])
    before, after = service.texts.encode(given, special=False), service.texts.encode_continuation(suffix)
    return [*service.texts.encode(""), marks[0], *before, marks[1], *after, marks[2]]
