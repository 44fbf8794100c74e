"""The tokens of a request's prompt, as the engine will compute them: from `/tokenize` of an instance, or from a
tokenizer in this process."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from tokenlake.errors import TokenLakeError
from tokenlake_client.routers.chat import NotRendered, messages_for_template, takes_parts, tools_for_template

PAUSE_S = 5.0
"""Seconds for which an instance is not asked for tokens after it failed to give those of one word."""
PROBE_S = 1.0
"""Limit of the seconds for the tokens of one word."""
OF_THE_PROMPT = (400, 413, 414, 422, 431)
"""Statuses of answers that blame the request: its chat template, its length, its fields."""
MEASURED_CHARACTERS = 4096
"""Least length of a text by which the speed of a tokenizer is measured."""
RETRIED = 1.1
"""Factor by which a tokenizer is taken for faster with each prompt that is refused as too long."""
MAX_REPLY_BYTES = 64 << 20
_TEMPLATE_FIELDS = (
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "mm_processor_kwargs",
)
"""Fields of a chat request that `/tokenize` takes as they are."""


class TokenizerFailed(TokenLakeError):
    """The tokens of a prompt could not be found; the message names the reason."""


class PromptRefused(TokenizerFailed):
    """The prompt of this request is at fault, and not the instance."""


class Instance(NamedTuple):
    """An engine's server."""

    base: str
    """Its address, as the router's configuration has it."""
    model: str
    """The name under which it serves the model."""
    key: str | None
    """Its API key."""


class Prompt(msgspec.Struct, frozen=True):
    """The prompt of a request: one of the two."""

    body: dict[str, Any] = {}
    """The fields of a request to `/tokenize`, without the model."""
    ids: Sequence[int] = ()
    """The tokens, where the request has them."""


_PROBE = Prompt({"messages": [{"role": "user", "content": "a"}]})


class Tokens(Protocol):
    """A tokenizer."""

    async def tokens(self, prompt: Prompt, instances: Sequence[Instance], until: float) -> bytes:
        """The tokens of the prompt, 4 bytes each, little-endian. `instances`: servers of its model. `until`: the
        deadline, by the clock of the event loop. Raises `TokenizerFailed`, and TimeoutError at the deadline."""
        ...

    async def close(self) -> None:
        """End the connections and threads."""
        ...


class _Reply(msgspec.Struct):
    tokens: list[int]


def prompt_of(fields: Mapping[str, Any]) -> Prompt | None:
    """The prompt of an OpenAI request for a chat or a completion, with vLLM's additions at the top level or in
    `extra_body`. None for one whose tokens text does not give: other endpoints, several prompts, images."""
    extra = fields.get("extra_body")
    if isinstance(extra, Mapping):
        fields = {**fields, **extra}
    text = fields.get("prompt")
    if text is not None:
        if isinstance(text, list) and len(text) == 1 and isinstance(text[0], str | list):
            text = text[0]
        if isinstance(text, str):
            return Prompt({"prompt": text, "add_special_tokens": fields.get("add_special_tokens") is not False})
        if isinstance(text, list) and text and all(isinstance(each, int) and 0 <= each < 1 << 32 for each in text):
            return Prompt(ids=text)
        return None
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages or not all(map(_is_text, messages)):
        return None
    body: dict[str, Any] = {"messages": messages}
    body |= {name: fields[name] for name in _TEMPLATE_FIELDS if fields.get(name) is not None}
    # vLLM gives these to the chat template of a chat, but `/tokenize` has no fields for them.
    template: dict[str, Any] = {}
    effort = fields.get("reasoning_effort")
    if effort is not None:
        template |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if fields.get("documents") is not None:
        template["documents"] = fields["documents"]
    template |= fields.get("chat_template_kwargs") or {}
    if template:
        body["chat_template_kwargs"] = template
    return Prompt(body)


def _is_text(message: object) -> bool:
    """False for a message with an image, a sound or a video: its tokens do not follow from text."""
    if not isinstance(message, Mapping):
        return False
    content = message.get("content")
    if isinstance(content, list):
        return all(
            isinstance(part, str) or (isinstance(part, Mapping) and part.get("type") == "text") for part in content
        )
    return content is None or isinstance(content, str)


def _packed(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()


class RemoteTokenizer:
    """Asks `/tokenize` of the instances in rotation; one that fails is left out for a while. For one event loop at a
    time.

    A request that an instance refuses, or answers too late, may be at fault itself. So an instance that failed is
    `doubted`: it is asked for the tokens of one word, and is left out only if it does not answer that. Meanwhile it is
    asked last.
    """

    def __init__(self) -> None:
        self._asked = itertools.count()
        self._paused: dict[str, float] = {}
        """By address, the time until which an instance is left out."""
        self._doubted: dict[str, asyncio.Task[None]] = {}
        """By address, the question to an instance that failed."""
        self._session: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def tokens(self, prompt: Prompt, instances: Sequence[Instance], until: float) -> bytes:
        """See `Tokens.tokens`."""
        if prompt.ids:
            return _packed(prompt.ids)
        now = time.monotonic()
        able = [each for each in instances if self._paused.get(each.base, 0.0) <= now]
        if not able:
            raise TokenizerFailed("no instance answers /tokenize")
        first = next(self._asked) % len(able)
        problem = ""
        for instance in sorted(able[first:] + able[:first], key=lambda each: each.base in self._doubted):
            try:
                # A cancellation says nothing about the instance: the client of the request went away.
                async with asyncio.timeout_at(until):
                    return await self._ask(prompt, instance)
            except PromptRefused:
                raise
            except TokenizerFailed as error:
                problem = str(error)
            except TimeoutError:
                self._doubt(instance)
                raise
            self._doubt(instance)
        raise TokenizerFailed(problem)

    def _doubt(self, instance: Instance) -> None:
        """Find out whether an instance that failed answers another prompt; leave it out if it does not."""
        if instance.base not in self._doubted:
            self._doubted[instance.base] = asyncio.get_running_loop().create_task(self._probe(instance))

    async def _probe(self, instance: Instance) -> None:
        try:
            async with asyncio.timeout(PROBE_S):
                await self._ask(_PROBE, instance)
        except PromptRefused:
            pass  # it answers
        except (TokenizerFailed, TimeoutError):
            self._paused[instance.base] = time.monotonic() + PAUSE_S
        finally:
            self._doubted.pop(instance.base, None)

    async def close(self) -> None:
        """End the connections to the instances. To be called on the event loop of `tokens`."""
        for task in self._doubted.values():
            task.cancel()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _ask(self, prompt: Prompt, instance: Instance) -> bytes:
        try:
            body = json.dumps({"model": instance.model, **prompt.body}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptRefused(f"the prompt is no JSON: {error}") from error
        import aiohttp

        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            self._session, self._loop = aiohttp.ClientSession(), loop
        url = instance.base.rstrip("/").removesuffix("/v1") + "/tokenize"
        headers = {"Content-Type": "application/json"}
        if instance.key:
            headers["Authorization"] = f"Bearer {instance.key}"
        try:
            async with self._session.post(url, data=body, headers=headers) as answer:
                if answer.status != 200:
                    kind = PromptRefused if answer.status in OF_THE_PROMPT else TokenizerFailed
                    raise kind(f"{url}: status {answer.status}: {(await answer.text())[:200]}")
                content = await answer.content.read(MAX_REPLY_BYTES)
                while not answer.content.at_eof() and len(content) < MAX_REPLY_BYTES:
                    content += await answer.content.read(MAX_REPLY_BYTES)
            return _packed(msgspec.json.decode(content, type=_Reply).tokens)
        except (aiohttp.ClientError, OSError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise TokenizerFailed(f"{url}: {type(error).__name__}: {error}") from error


class LocalTokenizer:
    """The tokenizer of a model's directory, in a thread of its own: a tokenizer serves one thread at a time. A prompt
    whose deadline passes before its turn is not tokenized, and neither is one that would take longer than its deadline:
    the prompts behind it would wait for it. A chat that only vLLM knows how to render is left to `/tokenize`."""

    def __init__(self, directory: str) -> None:
        """Loads the tokenizer with the first prompt."""
        self._directory = directory
        self._tokenizer: Any = None
        """Only for the thread."""
        self._thread = ThreadPoolExecutor(1, "tokenlake-tokenizer")
        self._remote = RemoteTokenizer()
        self._characters_per_s = 0.0
        """Measured; 0: not yet. Only for the thread."""

    async def tokens(self, prompt: Prompt, instances: Sequence[Instance], until: float) -> bytes:
        """See `Tokens.tokens`."""
        if prompt.ids:
            return _packed(prompt.ids)
        loop = asyncio.get_running_loop()
        by = time.monotonic() + until - loop.time()
        try:
            async with asyncio.timeout_at(until):
                return await loop.run_in_executor(self._thread, self._tokens, prompt, by)
        except NotRendered as error:
            if not instances:
                raise TokenizerFailed(str(error)) from error
            return await self._remote.tokens(prompt, instances, until)
        except RuntimeError as error:
            # The thread of the tokenizer cannot be started.
            raise TokenizerFailed(str(error)) from error

    async def close(self) -> None:
        """End the thread after the prompt that it tokenizes now, and the connections."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        await self._remote.close()

    def _tokens(self, prompt: Prompt, by: float) -> bytes:
        """The tokens of a prompt by this time of the monotonic clock."""
        try:
            if self._tokenizer is None:
                from transformers import AutoTokenizer

                self._tokenizer = AutoTokenizer.from_pretrained(self._directory)
            text, special = self._text(prompt.body)
            begun = time.monotonic()
            if self._characters_per_s and begun + len(text) / self._characters_per_s > by:
                self._characters_per_s *= RETRIED  # so that one slow moment is not believed for ever
                raise TokenizerFailed(f"a prompt of {len(text)} characters takes longer than its deadline")
            ids = self._tokenizer.encode(text, add_special_tokens=special)
            if len(text) >= MEASURED_CHARACTERS:
                self._characters_per_s = len(text) / max(time.monotonic() - begun, 1e-6)
            return _packed(ids)
        except TokenLakeError:
            raise
        except Exception as error:  # of the tokenizer or of the model's chat template
            raise TokenizerFailed(f"{self._directory}: {type(error).__name__}: {error}") from error

    def _text(self, body: Mapping[str, Any]) -> tuple[str, bool]:
        """The text of a prompt as vLLM renders it, and whether special tokens are added to it."""
        if "prompt" in body:
            return body["prompt"], body["add_special_tokens"]
        tools = tools_for_template(body.get("tools"))
        template = self._tokenizer.get_chat_template(body.get("chat_template"), tools=tools)
        text = self._tokenizer.apply_chat_template(
            messages_for_template(body["messages"], takes_parts(template)),
            tools=tools,
            chat_template=template,
            add_generation_prompt=body.get("add_generation_prompt", True),
            continue_final_message=body.get("continue_final_message", False),
            tokenize=False,
            **body.get("chat_template_kwargs", {}),
        )
        return text, body.get("add_special_tokens", False)
