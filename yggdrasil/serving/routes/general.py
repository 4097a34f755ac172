"""Routes other than completions: models, tokenization, health, metrics and the chat page."""

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, PlainTextResponse, Response

from yggdrasil.serving.errors import Fault
from yggdrasil.serving.replies import Health, ModelCard, ModelList, Text, Tokens
from yggdrasil.serving.request_fields import DetokenizeRequest, TokenizeRequest
from yggdrasil.serving.service import service_of
from yggdrasil.serving.tokenization import turns_of

router = APIRouter()
PAGE = Path(__file__).parents[2] / "assets" / "chat.html"


@router.get("/health", response_model=Health)
@router.get("/v1/health", response_model=Health, include_in_schema=False)
async def health(request: Request) -> Health:
    """Return status 200 if requests can be served, 503 while the model is being loaded."""
    service_of(request).decoder  # noqa: B018  (raises a fault while the model is loaded)
    return Health()


@router.get("/v1/models", response_model=ModelList)
@router.get("/models", response_model=ModelList, include_in_schema=False)
async def models(request: Request) -> ModelList:
    """List the served model."""
    return ModelList(data=[_card(request)])


@router.get("/v1/models/{name:path}", response_model=ModelCard)
async def model(name: str, request: Request) -> ModelCard:
    """Return the served model by its name."""
    service_of(request).identify("model", name)
    return _card(request)


def _card(request: Request) -> ModelCard:
    service = service_of(request)
    call = service.decoder.assembly.target.call
    plan = service.decoder.plan
    plain_ms = None if plan is None else plan.costs[0].plain_ms  # per token, without speculation
    sampling = service.sampling.describe()
    meta = {"n_ctx": service.texts.limit, "n_vocab": call.vocab_size, "plain_ms": plain_ms, "sampling": sampling}
    return ModelCard(id=service.model, created=service.started, meta=meta)


@router.post("/tokenize", response_model=Tokens)
async def tokenize(body: TokenizeRequest, request: Request) -> Tokens:
    """Tokenize a text, or a chat up to the point at which generation begins."""
    texts = service_of(request).texts
    text = body.prompt if body.prompt is not None else body.content
    if (text is None) == (body.messages is None):
        raise Fault(400, "give one of prompt (or content) and messages", param="prompt")
    if body.messages is not None:
        tokens = await run_in_threadpool(texts.encode_chat, turns_of(body.messages))
    else:
        tokens = await run_in_threadpool(texts.encode, text or "", special=body.add_special_tokens is not False)
    return Tokens(tokens=tokens, count=len(tokens), max_model_len=texts.limit)


@router.post("/detokenize", response_model=Text)
async def detokenize(body: DetokenizeRequest, request: Request) -> Text:
    """Detokenize a list of token ids."""
    text = await run_in_threadpool(service_of(request).texts.decode, body.tokens)
    return Text(content=text, prompt=text)


@router.post("/v1/embeddings")
@router.post("/embeddings", include_in_schema=False)
@router.post("/api/embed", include_in_schema=False)
@router.post("/api/embeddings", include_in_schema=False)
async def embeddings() -> None:
    """Reject requests for embeddings, which are not supported."""
    raise Fault(400, "this server generates text and gives no embeddings; ask a server of an embedding model")


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Return the server's metrics in Prometheus' text format."""
    return Response(service_of(request).worker.meters.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """Return the chat page."""
    return FileResponse(PAGE, media_type="text/html")
