"""Prometheus metrics of the server, shown at ``/metrics``."""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from yggdrasil.engine.request import Generation

_SPACE = "yggdrasil"
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_LENGTHS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16)
_PLACES = (0, 1, 2, 4, 8, 16, 32, 64)


class ServerMetrics:
    """Counters of one server."""

    def __init__(self, waiting: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)  # memory, processor time, open files
        self._gauge("queue_depth", "Requests that wait for the decoder").set_function(waiting)
        self.busy = self._gauge("busy", "Whether an answer is being decoded")
        self.position = self._histogram("queue_position", "Requests before one that joins the line", _PLACES)
        self.waited = self._histogram("queue_wait_seconds", "From joining the line to the decoder", _SECONDS)
        self.first = self._histogram("time_to_first_token_seconds", "From the decoder on", _SECONDS)
        self.per_token = self._histogram("time_per_token_seconds", "After the first token", _SECONDS)
        self.accepted_length = self._histogram(
            "accepted_length", "Tokens an iteration, by answer, the bonus token included", _LENGTHS
        )
        self.answers = self._counter("answers", "Answers by their end", "reason")
        self.refused = self._counter("refused", "Requests that found the line full")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens read")
        self._cached = self._counter("cached_prompt_tokens", "Prompt tokens that the caches held already")
        self._generated = self._counter("generated_tokens", "Tokens generated")
        self._drafted = self._counter("drafted_tokens", "Drafted tokens verified")
        self._accepted = self._counter("accepted_tokens", "Drafted tokens accepted")
        self._iterations = self._counter("iterations", "Iterations by kind", "kind")
        self._shapes = self._counter("verify_width", "Iterations by the rows they verified", "width")
        self._stages = self._counter("stage_seconds", "Seconds of decoding by stage", "stage")

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(name, meaning, namespace=_SPACE, registry=self._registry)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, meaning, namespace=_SPACE, registry=self._registry, buckets=buckets)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(name, meaning, labels, namespace=_SPACE, registry=self._registry)

    def note(self, result: Generation) -> None:
        """An answer ended, whether whole or not."""
        metrics = result.metrics
        self.answers.labels(result.finish_reason).inc()
        if result.tokens:  # else it was given up while its prompt was read
            self.first.observe(metrics.ttft_ms / 1e3)
            self._prompt.inc(result.prompt_tokens - metrics.reused_tokens)
        if metrics.iterations:
            self.per_token.observe(metrics.tpot_ms / 1e3)
            self.accepted_length.observe(metrics.aal)
        self._cached.inc(metrics.reused_tokens)
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
        """All of it as Prometheus reads it."""
        return generate_latest(self._registry)
