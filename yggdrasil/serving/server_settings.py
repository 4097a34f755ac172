"""What a server is told when it starts, and the limits that keep one request from harming the others."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """Bounds that no request passes; none of them is a matter of taste, so none is an option."""

    body_bytes: int = 8 << 20
    answers: int = 128  # of one request: prompts times choices
    stops: int = 64  # stop strings
    bad_words: int = 1024  # each is looked for behind every token
    bad_letters: int = 32 << 10  # of all together
    grammar_bytes: int = 128 << 10  # a schema, an expression, a grammar, or all tools together
    answer_seconds: float = 1800.0  # one answer; it then ends as if its tokens were used up
    drain_seconds: float = 30.0  # what runs when the server is told to stop


@dataclass(frozen=True)
class ServerSettings:
    """One server."""

    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    queue: int = 32  # requests that may wait
    kept_bytes: int = 512 << 20  # memory for what the caches held of earlier conversations
    host_names: tuple[str, ...] = ()  # those a request may call the server by; none: any
    any_model: bool = False  # requests may name any model; they get the one that is served
    recommended_sampling: bool = False  # what a request leaves out of its sampling is as the model's files recommend
    limits: Limits = field(default_factory=Limits)
