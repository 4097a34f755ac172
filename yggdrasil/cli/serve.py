"""``yggdrasil serve``: an HTTP server with OpenAI's API."""

import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from yggdrasil.arguments import check_package
from yggdrasil.cli.open_decoder import check_source, open_decoder, prepare_sampling, say, train_beside
from yggdrasil.cli.shared_options import ModelArgument, TrainOption, opening_options, opens_decoder
from yggdrasil.errors import YggdrasilError
from yggdrasil.serving.address import listen

if TYPE_CHECKING:
    from yggdrasil.engine.decoder import Decoder

_KEY = "YGGDRASIL_API_KEY"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@partial(opens_decoder, is_server=True)
def serve(
    source: ModelArgument,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all networks.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar=_KEY, help="Key that clients must send.", show_envvar=True)
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="A site whose pages may send requests, or *; can be repeated.")
    ] = None,
    queue: Annotated[int, typer.Option(min=1, help="Maximum of waiting requests; further ones get status 429.")] = 32,
    keep_mb: Annotated[
        int,
        typer.Option(min=0, help="MiB by which memory may grow, for KV entries of conversations; 0: only the last."),
    ] = 512,
    public_pool: Annotated[
        bool,
        typer.Option("--public-pool", help="Use n-grams of all requests for later ones; timing may leak their text."),
    ] = False,
    any_model: Annotated[bool, typer.Option("--any-model", help="Accept any model name in requests.")] = False,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Decode greedily by default, not with the model's recommended sampling.")
    ] = False,
    train: TrainOption = None,
    **options: Any,
) -> None:
    """Serve a model over HTTP with OpenAI's API, and a chat page at /. One request is decoded at a time."""
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        check_package(package, "serving", "server")
    _check_names(host, cors_origin or ())
    api_key = _key_of(api_key)
    listen(host, port).close()  # the server binds it later, after seconds of importing
    check_source(source)
    from yggdrasil.acceptance.sampling import SamplingParams
    from yggdrasil.engine.recommended_sampling import recommended_sampling_of
    from yggdrasil.pretrained import plan_name
    from yggdrasil.serving.process import run_server
    from yggdrasil.serving.server_settings import ServerSettings

    is_local = host in ("localhost", "127.0.0.1", "::1")
    if not is_local and api_key is None:
        say(f"everyone who can reach {host} can use this server; --api-key asks for a key")
    settings = ServerSettings(
        api_key, tuple(cors_origin or ()), queue, keep_mb << 20,
        host_names=LOOPBACK if is_local and api_key is None else (), any_model=any_model,
        recommended_sampling=not greedy,
    )  # fmt: skip

    def opened() -> "Decoder":
        decoder = open_decoder(source, **opening_options(options), train=train)
        if train is not None:
            train_beside(decoder, train)
        if public_pool:
            decoder.pool_texts()
        sampling = SamplingParams(temperature=1.0)
        if not greedy:
            own = recommended_sampling_of(decoder)
            say(f"sampling: {own.describe()}, where a request names none; --greedy takes the best token")
            sampling = own.params if own.params.needs_logits else sampling
        prepare_sampling(decoder, sampling)  # now, not in the first request that samples
        return decoder

    def announce(address: str) -> None:
        say(f"serving at {address} (process {os.getpid()}); Ctrl-C ends it")

    name = Path(source).stem if source.endswith((".yaml", ".yml")) else plan_name(source)
    run_server(opened, settings, name, host, port, announce)


def _check_names(host: str, sites: Sequence[str]) -> None:
    if not host.strip():
        raise YggdrasilError("--host is empty; give an address, 0.0.0.0 for every network")
    for site in sites:
        if site not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/]+", site):
            raise YggdrasilError(f"--cors-origin {site} is no site such as https://example.org, nor *")


def _key_of(given: str | None) -> str | None:
    """Return the key that clients must send: ``given``, else the environment variable; None if neither is set.

    Raises:
        YggdrasilError: the key is empty or has spaces.
    """
    key = os.environ.get(_KEY) if given is None else given
    if key is not None and key.split() != [key]:
        raise YggdrasilError(f"the API key is empty or has spaces; give another with --api-key, or unset {_KEY}")
    return key
