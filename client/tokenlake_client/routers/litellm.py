"""The plug-in for LiteLLM's proxy: `tokenlake_client.routers.litellm.plugin`, a callback of its configuration.

::

    the proxy:   request -> deployments that are not in cooldown -> async_filter_deployments -> its own strategy
    the plug-in:                                     tokens, GetStart: one deployment is left, or all

LiteLLM's own strategy chooses among the deployments that are left. The plug-in leaves all of them where it has no
answer, and it never raises: LiteLLM would fail the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import traceback
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import litellm
from litellm.integrations.custom_logger import CustomLogger

from tokenlake.errors import ConfigurationError
from tokenlake_client.routers.choice import Candidate, Choice, Chooser, Outcome
from tokenlake_client.routers.settings import read_settings
from tokenlake_client.routers.tokens import Instance, prompt_of

NODE = "tokenlake_node"
"""Key of a deployment's `model_info`: the node of the pool to whose daemon the instance is connected."""
WEIGHTS = "tokenlake_weights"
"""Key of a deployment's `model_info`: the weights digest of its engines, or the beginning; needed where the pool has
several models."""
SETTINGS = "tokenlake"
"""Key of `litellm_settings` with the settings of the plug-in."""
START_S = 0.5
"""Seconds after which the plug-in connects; LiteLLM has read all of its configuration by then."""

BUCKETS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)

UNEXPECTED = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""Errors of a choice that are no answer of the pool or of the tokenizer: the request or a deployment has a field of
another type than LiteLLM's, or the process ends."""

log = logging.getLogger("tokenlake.router")


class TokenLakeRouter(CustomLogger):  # type: ignore[misc]
    """Narrows the deployments of a request to the instance where the pool says that it starts soonest."""

    def __init__(self) -> None:
        """Raises `ConfigurationError` for an invalid variable of the environment. Connects later, on LiteLLM's loop."""
        super().__init__()
        read_settings({}, os.environ)
        self._seconds = _histogram()
        self._chooser: Chooser | None = None
        self._started = False
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop().call_later(START_S, self._start)

    def _start(self) -> Chooser | None:
        if not self._started:
            self._started = True
            try:
                self._chooser = Chooser(read_settings(getattr(litellm, SETTINGS, None) or {}, os.environ))
            except (ConfigurationError, *UNEXPECTED) as error:
                log.error("TokenLake: the router's own strategy is used: %s: %s", type(error).__name__, error)
        return self._chooser

    # -- LiteLLM's hooks

    async def async_filter_deployments(
        self,
        model: str,
        healthy_deployments: list[dict[str, Any]],
        messages: list[Any] | None,
        request_kwargs: dict[str, Any] | None = None,
        parent_otel_span: Any = None,
    ) -> list[dict[str, Any]]:
        """The deployment where the request starts soonest, or all of `healthy_deployments`."""
        begun = time.perf_counter()
        left, choice = healthy_deployments, Choice(Outcome.UNREACHABLE)
        chooser = self._start()
        if chooser is not None:
            try:
                fields = _fields(request_kwargs or {}, messages)
                left, choice = await self._choose(chooser, healthy_deployments, fields)
            except UNEXPECTED as error:
                choice = Choice(Outcome.FAILED)
                chooser.problem(f"a choice failed: {''.join(traceback.format_exception(error))}")
        if self._seconds is not None:
            self._seconds.labels(choice.outcome.value).observe(time.perf_counter() - begun)
        return left

    async def async_post_call_streaming_iterator_hook(
        self, user_api_key_dict: Any, response: Any, request_data: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """The stream of an answer, unchanged. Its first part ends the prefill, and its end the request, also where the
        client goes away. Its parts count as tokens."""
        request = request_data.get("litellm_call_id")
        chooser = self._chooser if isinstance(request, str) else None
        parts = answer = 0
        try:
            async for part in response:
                if not parts and chooser is not None:
                    chooser.first_token(str(request))
                parts += 1
                yield part
            answer = parts
        finally:
            if chooser is not None:
                chooser.finished(str(request), answer)

    async def async_log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        """A request was answered."""
        self._finished(kwargs, response_obj)

    async def async_log_failure_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        """An attempt failed."""
        self._finished(kwargs, None)

    # -- inside

    def _finished(self, kwargs: Mapping[str, Any], answer: Any) -> None:
        request = kwargs.get("litellm_call_id")
        if self._chooser is None or not isinstance(request, str):
            return
        usage = getattr(answer, "usage", None)
        answered = getattr(usage, "completion_tokens", None)
        tokens = self._chooser.finished(request, answered if isinstance(answered, int) else 0)
        counted = getattr(usage, "prompt_tokens", None)
        if tokens is not None and isinstance(counted, int) and not kwargs.get("stream") and counted != tokens:
            self._chooser.problem(
                f"an instance computed a prompt of {counted} tokens, and the tokenizer gave {tokens}: the "
                "pool cannot find the segments of such prompts"
            )

    async def _choose(
        self, chooser: Chooser, deployments: list[dict[str, Any]], fields: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], Choice]:
        able = _able(deployments, fields)
        request = fields.get("litellm_call_id")
        if len({_base(each) for each in able}) < 2 or not isinstance(request, str):
            return deployments, Choice(Outcome.NO_CHOICE)
        not_served = Choice(Outcome.NOT_SERVED)
        infos = [each.get("model_info") or {} for each in able]
        if any(not _base(each) or not info.get(NODE) for each, info in zip(able, infos, strict=True)):
            names = ", ".join(str(_base(each)) for each, info in zip(able, infos, strict=True) if not info.get(NODE))
            chooser.problem(f"deployments without api_base or without {NODE} in model_info: {names}")
            return deployments, not_served
        weights = {info.get(WEIGHTS) for info in infos}
        if len(weights) > 1 or any((each["litellm_params"].get("tags")) for each in able):
            chooser.problem(f"deployments of one group with several {WEIGHTS}, or with tags")
            return deployments, not_served
        params = able[0]["litellm_params"]
        given = {name: value for name, value in params.items() if value is not None}
        merged = {**given, **fields}
        prompt = prompt_of(merged)
        if prompt is None:
            return deployments, not_served
        candidates = [Candidate(_instance(each), str(info[NODE])) for each, info in zip(able, infos, strict=True)]
        salt = merged.get("cache_salt") or (merged.get("extra_body") or {}).get("cache_salt")
        choice = await chooser.choose(request, prompt, candidates, weights.pop(), salt)
        if choice.outcome is not Outcome.CHOSEN:
            return deployments, choice
        return [each for each in able if _base(each) == choice.instance], choice


def _histogram() -> Any:
    """The histogram on the router's own Prometheus page, which several processes can share; None without
    prometheus_client."""
    try:
        from prometheus_client import Histogram
    except ImportError:
        return None
    text = "Seconds that the choice of an instance added to a request, by its outcome"
    return Histogram("tokenlake_router_seconds", text, ["outcome"], buckets=BUCKETS)


def _fields(given: Mapping[str, Any], messages: list[Any] | None) -> dict[str, Any]:
    """The fields of a request with its prompt, which LiteLLM gives apart: for a completion as one message."""
    fields = dict(given)
    if "prompt" not in fields and messages:
        kind = str(getattr(fields.get("litellm_logging_obj"), "call_type", ""))
        if "text_completion" in kind:
            fields["prompt"] = messages[0].get("content")
        elif kind in ("acompletion", "completion"):
            fields["messages"] = messages
    return fields


def _able(deployments: Sequence[dict[str, Any]], fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The deployments that LiteLLM leaves in the steps behind this one: those of the lowest `order`, without those that
    were tried before."""
    tried = {*(fields.get("_excluded_deployment_ids") or ()), *(fields.get("_retry_skipped_deployment_ids") or ())}
    left = [each for each in deployments if (each.get("model_info") or {}).get("id") not in tried]
    orders = [each["litellm_params"].get("order") for each in left]
    wanted = fields.get("_target_order")
    if wanted is None:
        wanted = min((order for order in orders if order is not None), default=None)
    return left if wanted is None else [each for each, order in zip(left, orders, strict=True) if order == wanted]


def _base(deployment: Mapping[str, Any]) -> str:
    return str(deployment["litellm_params"].get("api_base") or "").rstrip("/")


def _instance(deployment: Mapping[str, Any]) -> Instance:
    params = deployment["litellm_params"]
    provider, model = params.get("custom_llm_provider"), str(params["model"])
    # As LiteLLM does: the text before the first slash names the provider, unless a field does.
    name = model.removeprefix(f"{provider}/") if provider else model.partition("/")[2] or model
    return Instance(_base(deployment), name, params.get("api_key"))


plugin = TokenLakeRouter()
