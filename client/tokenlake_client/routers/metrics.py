"""The plug-in's counters, on the router's own Prometheus page where the router's process has one."""

from __future__ import annotations

from typing import Any

from tokenlake_client.routers.choice import Choice, Outcome

BUCKETS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


class Metrics:
    """Counts choices. Without prometheus_client it does nothing."""

    def __init__(self) -> None:
        """Registers the metrics with the default registry of prometheus_client, which several processes can share."""
        self._choices: Any = None
        try:
            from prometheus_client import Counter, Histogram
        except ImportError:
            return
        self._seconds = Histogram(
            "tokenlake_router_seconds", "Seconds that the choice added to a request", ["outcome"], buckets=BUCKETS
        )
        self._choices = Counter(
            "tokenlake_router_choices", "Choices of an instance for a request, by their outcome", ["outcome"]
        )
        self._instances = Counter(
            "tokenlake_router_requests", "Requests for which the pool chose the instance", ["instance"]
        )
        self._tokens = Counter(
            "tokenlake_router_prompt_tokens",
            "Prompt tokens of these requests by their expected source: the instance's node, another node, or the "
            "computation",
            ["source"],
        )
        self._differ = Counter(
            "tokenlake_router_tokens_differ",
            "Prompts whose number of tokens at the instance differs from that of the tokenizer",
        )

    def chosen(self, choice: Choice, seconds: float) -> None:
        """Count a choice and the time that it added to the request."""
        if self._choices is None:
            return
        outcome = choice.outcome.value
        self._choices.labels(outcome).inc()
        self._seconds.labels(outcome).observe(seconds)
        if choice.outcome is Outcome.CHOSEN:
            start = choice.start
            self._instances.labels(choice.instance).inc()
            self._tokens.labels("this node").inc(max(0, start.prefix_tokens - start.moved_tokens))
            self._tokens.labels("another node").inc(start.moved_tokens)
            self._tokens.labels("computed").inc(start.new_tokens)

    def tokens_differ(self) -> None:
        """Count a prompt of which the instance computed another number of tokens."""
        if self._choices is not None:
            self._differ.inc()
