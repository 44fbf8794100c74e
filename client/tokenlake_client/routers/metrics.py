"""The plug-in's counters, on the router's own Prometheus page where the router's process has one."""

from __future__ import annotations

from typing import Any

from tokenlake_client.routers.choice import Choice, Outcome

BUCKETS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
COUNTERS = {
    "choices": ("Choices of an instance for a request, by their outcome", ["outcome"]),
    "requests": ("Requests for which the pool chose the instance", ["instance"]),
    "prompt_tokens": (
        "Prompt tokens of these requests by their expected source: the instance's node, another node, or the "
        "computation",
        ["source"],
    ),
    "tokens_differ": ("Prompts whose number of tokens at the instance differs from that of the tokenizer", []),
}


class Metrics:
    """Counts choices. Without prometheus_client it does nothing."""

    def __init__(self) -> None:
        """Registers the metrics with the default registry of prometheus_client, which several processes can share."""
        self._counters: dict[str, Any] = {}
        try:
            from prometheus_client import Counter, Histogram
        except ImportError:
            return
        text = "Seconds that the choice added to a request"
        self._seconds = Histogram("tokenlake_router_seconds", text, ["outcome"], buckets=BUCKETS)
        self._counters = {name: Counter(f"tokenlake_router_{name}", *of) for name, of in COUNTERS.items()}

    def chosen(self, choice: Choice, seconds: float) -> None:
        """Count a choice and the time that it added to the request."""
        self._count("choices", choice.outcome.value)
        if self._counters:
            self._seconds.labels(choice.outcome.value).observe(seconds)
        if choice.outcome is Outcome.CHOSEN:
            start = choice.start
            self._count("requests", choice.instance)
            self._count("prompt_tokens", "this node", max(0, start.prefix_tokens - start.moved_tokens))
            self._count("prompt_tokens", "another node", start.moved_tokens)
            self._count("prompt_tokens", "computed", start.new_tokens)

    def tokens_differ(self) -> None:
        """Count a prompt of which the instance computed another number of tokens."""
        if self._counters:
            self._counters["tokens_differ"].inc()

    def _count(self, name: str, label: str, amount: int = 1) -> None:
        if self._counters:
            self._counters[name].labels(label).inc(amount)
