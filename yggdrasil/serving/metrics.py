"""Prometheus metrics of the server, served at ``/metrics``."""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from yggdrasil.engine.request import Generation

_SPACE = "yggdrasil"
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_LENGTHS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16)
_PLACES = (0, 1, 2, 4, 8, 16, 32, 64)


class ServerMetrics:
    """The metrics of one server. ``waiting`` returns the number of queued requests."""

    def __init__(self, waiting: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)  # memory, CPU time, open files
        self._gauge("queue_depth", "Requests that wait for the decoder").set_function(waiting)
        self.busy = self._gauge("busy", "Whether an answer is being decoded")
        self.position = self._histogram("queue_position", "Queue length when a request joins", _PLACES)
        self.waited = self._histogram("queue_wait_seconds", "Time from queueing to the start of decoding", _SECONDS)
        self.first = self._histogram("time_to_first_token_seconds", "From the start of decoding", _SECONDS)
        self.per_token = self._histogram("time_per_token_seconds", "Mean over the tokens after the first", _SECONDS)
        self.accepted_length = self._histogram(
            "accepted_length", "Mean tokens per iteration of an answer, bonus token included", _LENGTHS
        )
        self.answers = self._counter("answers", "Answers by finish reason", "reason")
        self.refused = self._counter("refused", "Requests rejected because the queue was full")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens prefilled")
        self._cached = self._counter("cached_prompt_tokens", "Prompt tokens reused from the KV cache")
        self._generated = self._counter("generated_tokens", "Tokens generated")
        self._drafted = self._counter("drafted_tokens", "Drafted tokens verified")
        self._accepted = self._counter("accepted_tokens", "Drafted tokens accepted")
        self._iterations = self._counter("iterations", "Iterations by kind", "kind")
        self._shapes = self._counter("verify_width", "Iterations by verify width, in rows", "width")
        self._stages = self._counter("stage_seconds", "Decoding time by stage", "stage")

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(name, meaning, namespace=_SPACE, registry=self._registry)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, meaning, namespace=_SPACE, registry=self._registry, buckets=buckets)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(name, meaning, labels, namespace=_SPACE, registry=self._registry)

    def record(self, result: Generation) -> None:
        """Add an answer that ended, complete or not, to the metrics."""
        metrics = result.metrics
        self.answers.labels(result.finish_reason).inc()
        if result.tokens:  # else it was cancelled during prefill
            self.first.observe(metrics.ttft_ms / 1e3)
            self._prompt.inc(result.prompt_tokens - metrics.reused_tokens)
            self._cached.inc(metrics.reused_tokens)
        if metrics.iterations:
            self.per_token.observe(metrics.tpot_ms / 1e3)
            self.accepted_length.observe(metrics.aal)
        self._generated.inc(len(result.tokens))
        self._drafted.inc(metrics.proposed)
        self._accepted.inc(metrics.accepted)
        kinds = {"plain": metrics.plain_steps, "free": metrics.model_free_trees}
        kinds["tree"] = metrics.iterations - sum(kinds.values())
        for kind, count in kinds.items():
            self._iterations.labels(kind).inc(count)
        for width, count in metrics.verify_widths.items():
            self._shapes.labels(width).inc(count)
        for stage, milliseconds in metrics.stage_ms.items():
            self._stages.labels(stage).inc(milliseconds / 1e3)

    def page(self) -> bytes:
        """Return all metrics of the server in Prometheus' text format, UTF-8, as the body of ``/metrics``."""
        return generate_latest(self._registry)
