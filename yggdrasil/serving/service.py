"""The state that all routes of a server share: worker, settings, and the decoder once it is open."""

import time
import uuid
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from fastapi import Request

from yggdrasil import __version__
from yggdrasil.acceptance.sampling import GREEDY
from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.recommended_sampling import RecommendedSampling, recommended_sampling_of
from yggdrasil.serving.errors import Fault
from yggdrasil.serving.exchange import JobRequest
from yggdrasil.serving.server_settings import ServerSettings
from yggdrasil.serving.tokenization import Texts
from yggdrasil.serving.tools import ToolFormat
from yggdrasil.serving.worker import Worker


class Identity(NamedTuple):
    """The fields that every chunk of one reply repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str  # package version and weights: answers may differ if it changes


class Service:
    """Shared state of one server's routes. ``model`` is the name of the served model."""

    def __init__(self, worker: Worker, settings: ServerSettings, model: str) -> None:
        self.worker, self.settings, self.model = worker, settings, model
        self.started = int(time.time())

    @property
    def decoder(self) -> Decoder:
        """The served decoder.

        Raises:
            Fault: the decoder is not open yet (status 503).
        """
        if self.worker.decoder is None:
            raise Fault(503, "the model is being loaded; try again in a moment", headers={"Retry-After": "2"})
        return self.worker.decoder

    @cached_property
    def texts(self) -> Texts:
        """Tokenizer of the served decoder, with checks of prompts against the context."""
        return Texts(self.decoder)

    @cached_property
    def tool_format(self) -> ToolFormat:
        """The form in which the model's chat template writes tool calls.

        Raises:
            Fault: the template takes no tools or writes calls in another form than JSON (status 400), or the decoder is
                not open yet (503).
        """
        found = ToolFormat.of(self.decoder.tokenizer)
        if found is None:
            raise Fault(
                400, "the model's chat template takes no tools, or does not write their calls as JSON", param="tools"
            )
        return found

    @cached_property
    def sampling(self) -> RecommendedSampling:
        """Sampling parameters for the fields that a request leaves out.

        With ``settings.recommended_sampling`` these are the values that the model's files recommend, else the values of
        greedy decoding.
        """
        return (
            recommended_sampling_of(self.decoder)
            if self.settings.recommended_sampling
            else RecommendedSampling(GREEDY, "the server's own")
        )

    @cached_property
    def fingerprint(self) -> str:
        """``system_fingerprint`` of replies: the package version and, if there is a plan, the weights' fingerprint.

        Raises:
            Fault: the decoder is not open yet (status 503).
        """
        plan = self.decoder.plan
        return f"b{__version__}" if plan is None else f"b{__version__}-{plan.target.fingerprint}"

    def check_constraint(self, jobs: Sequence[JobRequest]) -> None:
        """Compile the constraint of a request before the request is queued; do nothing without a constraint.

        Another request may be decoded meanwhile.

        Args:
            jobs: the answers of one request, which share the constraint.

        Raises:
            YggdrasilError: the constraint does not compile within the limits of time and memory.
        """
        sampling = jobs[0].options.get("sampling")
        if sampling is not None and sampling.constraint is not None:
            self.decoder.check_constraint(sampling.constraint)

    def identify(self, kind: str, model: str | None) -> Identity:
        """Return id, time, model name and fingerprint of a new reply. The id begins with ``kind``.

        Args:
            model: the model's name in the request; None if the request names no model.

        Raises:
            Fault: ``model`` is not the served model and the server was started without ``--any-model`` (status 404), or
                the decoder is not open yet (503).
        """
        if model is not None and model != self.model and not self.settings.any_model:
            raise Fault(
                404, f"there is no model {model!r} here; this server has {self.model} (--any-model takes any "
                "name)", param="model",
                code="model_not_found",
            )  # fmt: skip
        return Identity(f"{kind}-{uuid.uuid4().hex}", int(time.time()), self.model, self.fingerprint)


def service_of(request: Request) -> Service:
    """Return the shared state of the server that received ``request``."""
    found: Service = request.app.state.service
    return found
