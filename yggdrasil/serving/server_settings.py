"""Settings of a server, and fixed limits that keep one request from harming the others."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """Limits of every request. They guard against misuse and are not configurable."""

    body_bytes: int = 8 << 20
    answers: int = 128  # per request: prompts times ``n``
    stops: int = 64  # stop strings
    bad_words: int = 1024  # each is matched after every token
    bad_letters: int = 32 << 10  # characters of all ``bad_words`` together
    grammar_bytes: int = 128 << 10  # UTF-8 size of a schema, regex or grammar, or of all tools' schemas
    answer_seconds: float = 1800.0  # of decoding an answer, which then ends with finish_reason length
    drain_seconds: float = 30.0  # for the running requests to finish after the signal to stop


@dataclass(frozen=True)
class ServerSettings:
    """Options of one server, as ``yggdrasil serve`` sets them."""

    api_key: str | None = None  # None: clients need no key
    cors_origins: tuple[str, ...] = ()  # sites whose pages may send requests; "*": all
    queue: int = 32  # requests that may wait
    kept_bytes: int = 512 << 20  # memory for copies of earlier conversations' KV entries
    host_names: tuple[str, ...] = ()  # accepted Host headers; empty: all
    any_model: bool = False  # accept any ``model`` name in requests
    recommended_sampling: bool = False  # unset sampling fields get the values that the model's files recommend
    limits: Limits = field(default_factory=Limits)
