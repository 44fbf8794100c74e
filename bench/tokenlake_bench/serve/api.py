"""The OpenAI API of a server, as a client that measures: its model, the form of requests that it takes, streamed
answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np

from tokenlake.errors import TokenLakeError
from tokenlake_bench.serve.words import text_of
from tokenlake_bench.workload import VOCABULARY, Tokens

DIAL_S: Final = 10.0
"""Limit of the seconds in which a connection is made, and of those of a page that is no answer of a model."""
LINE_BYTES: Final = 1 << 20
"""Limit of a line of an answer."""
IDLE_S: Final = 4.0
"""Seconds after which an unused connection is closed: before the server closes it (uvicorn: 5), perhaps under a new
request."""
LEAST_VOCABULARY: Final = 64
MAX_SAID: Final = 200
"""Limit of the characters of a server that are repeated."""


class ServeError(TokenLakeError):
    """Raised where a run cannot begin; the message says at which server, why, and what to do."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of the requests that a server takes. `vocabulary`: bound of the token ids; 0: prompts are texts."""

    model: str
    chat: bool
    vocabulary: int
    ignore_eos: bool

    def __str__(self) -> str:
        what = "chat completions" if self.chat else "completions"
        prompts = f"token ids below {self.vocabulary:,}" if self.vocabulary else "text, a word for a token"
        return f"{what}, prompts of {prompts}" + ("" if self.ignore_eos else "; answers may end early")

    def body(self, tokens: Tokens, answer_tokens: int) -> bytes:
        """The JSON of a request."""
        prompt: Any = text_of(tokens) if not self.vocabulary else self._ids(tokens)
        request: dict[str, Any] = {"model": self.model, "max_tokens": answer_tokens, "temperature": 0, "stream": True}
        request["stream_options"] = {"include_usage": True}
        if self.chat:
            request["messages"] = [{"role": "user", "content": prompt}]
        else:
            request["prompt"] = prompt
        if self.ignore_eos:
            request["ignore_eos"] = True
        return msgspec.json.encode(request)

    @property
    def highest(self) -> Tokens:
        """A prompt of two tokens with the highest id that a prompt can have: a server that takes it takes all."""
        return np.full(2, max(1, self.vocabulary - self._low) - 1, dtype=np.uint32)

    @property
    def _low(self) -> int:
        # The first ids of a vocabulary are those of special tokens in many models.
        return min(256, self.vocabulary // 4)

    def _ids(self, tokens: Tokens) -> list[int]:
        ids: list[int] = (tokens % (self.vocabulary - self._low) + self._low).tolist()
        return ids


@dataclass(slots=True)
class Answer:
    """How one request went. Times in seconds of `time.perf_counter`. `error`: the kind of its failure, empty for an
    answer that ended; `said`: the text behind it."""

    number: int
    server: int
    due_s: float
    sent_s: float = 0.0
    first_s: float = 0.0
    end_s: float = 0.0
    prompt_tokens: int = 0
    """As the server counts them, else as planned."""
    output_tokens: int = 0
    cached_tokens: int | None = None
    """Those of the prompt that the server did not compute, where it says so."""
    at_s: list[float] = field(default_factory=list)
    """The times of the parts of the answer."""
    error: str = ""
    said: str = ""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Seconds to the end of the answer."""
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds of each token behind the first one; None for an answer of one token."""
        if self.output_tokens < 2 or not self.at_s:
            return None
        return (self.at_s[-1] - self.first_s) / (self.output_tokens - 1)


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def speaks(self) -> bool:
        """True where the part has text of the answer."""
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)))


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Part(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct, gc=False):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct, gc=False):
    data: list[_Model]


_PART: Final = msgspec.json.Decoder(_Part)
_MODELS: Final = msgspec.json.Decoder(_Models)


def base_of(url: str) -> str:
    """The address of a server without `/v1`, by one with or without it, or by HOST:PORT. Raises `ServeError`."""
    full = url if "://" in url else f"http://{url}"
    parts = urlsplit(full)
    try:
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ServeError(f"{url!r} is no address of a server; expected one such as http://10.0.0.1:8000")
    return full.rstrip("/").removesuffix("/v1").rstrip("/")


def connection(key: str | None) -> aiohttp.ClientSession:
    """A client without a limit of connections. `key`: the API key, sent with each request."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=DIAL_S),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        read_bufsize=LINE_BYTES,
    )


async def model_of(client: aiohttp.ClientSession, base: str, wanted: str | None, key_name: str) -> _Model:
    """The model of a server, by /v1/models: the one named `wanted`, or the first. `key_name`: the variable with the
    key, for the message. Raises `ServeError`."""
    url = f"{base}/v1/models"
    try:
        async with client.get(url, timeout=aiohttp.ClientTimeout(total=DIAL_S)) as answer:
            content = await answer.read()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ServeError(f"{base} is not reachable: {reason(error)}; is this a server that runs?") from error
    if answer.status in (401, 403):
        raise ServeError(f"{base} refuses the key (status {answer.status}): set the variable {key_name} to its API key")
    if answer.status == 404 and wanted:
        return _Model(wanted)
    try:
        models = _MODELS.decode(content).data if answer.status == 200 else []
    except msgspec.MsgspecError:
        models = []
    if not models:
        said = _shortened(content)
        raise ServeError(f"{url} names no model (status {answer.status}: {said}): name it with --model")
    if wanted is None:
        return models[0]
    for each in models:
        if each.id == wanted:
            return each
    raise ServeError(f"{base} has no model {wanted!r}; it has {', '.join(each.id for each in models[:20])}")


async def form_of(
    client: aiohttp.ClientSession, base: str, model: str, api: str, prompts: str, vocabulary: int | None, wait_s: float
) -> Form:
    """The first form of requests that the server answers: completions before chat completions, token ids before text,
    answers of a fixed length before others. `api`, `prompts`: `auto`, or the one that is wanted. `vocabulary`: bound
    of the token ids; None: the largest power of two, up to `VOCABULARY`, whose ids the server takes. Raises
    `ServeError` with the last refusal."""
    forms: list[Form] = []
    bounds = [vocabulary] if vocabulary else [VOCABULARY]
    while not vocabulary and bounds[-1] > LEAST_VOCABULARY:
        bounds.append(1 << (bounds[-1] - 1).bit_length() - 1)
    for ignore in (True, False):
        if api != "chat":
            forms += [Form(model, False, bound, ignore) for bound in bounds if prompts != "text"]
            forms += [Form(model, False, 0, ignore)] * (prompts != "ids")
        if api != "completions" and prompts != "ids":
            forms.append(Form(model, True, 0, ignore))
    unknown_ids = False
    said = ""
    for form in forms:
        if form.vocabulary and form.vocabulary != bounds[0] and not unknown_ids:
            continue
        probe = Answer(0, 0, 0.0)
        await send(client, base, form, form.body(form.highest, 1), probe, wait_s)
        if not probe.error:
            return form
        said = f"{probe.error}: {probe.said}"
        if probe.error in FATAL:
            break
        unknown_ids = form.vocabulary > 0 and "vocab" in probe.said.lower()
    raise ServeError(f"{base} answers no request for model {model!r}; the last one: {said}")


async def send(
    client: aiohttp.ClientSession, base: str, form: Form, body: bytes, answer: Answer, wait_s: float
) -> None:
    """Send a request, read the streamed answer, and fill `answer` in, also where it fails. `wait_s`: limit of the
    seconds in which no part of the answer comes. Raises nothing but a cancellation."""
    url = f"{base}/v1/{'chat/completions' if form.chat else 'completions'}"
    spoken = done = False
    answer.sent_s = time.perf_counter()
    try:
        async with asyncio.timeout(wait_s) as limit:
            loop = asyncio.get_running_loop()
            async with client.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
                if response.status != 200:
                    _refused(answer, response.status, await response.content.read(1 << 16))
                    return
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        if line.strip() and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                            raise ValueError(f"a line of a stream was expected, and not {_shortened(line)!r}")
                        continue
                    now = time.perf_counter()
                    limit.reschedule(loop.time() + wait_s)
                    text = line[5:].strip()
                    if text == b"[DONE]":
                        done = True
                        break
                    part = _PART.decode(text)
                    if part.error is not None:
                        code = part.error.get("code") if isinstance(part.error, dict) else None
                        _refused(answer, code if isinstance(code, int) else 0, text)
                        return
                    if part.usage is not None:
                        _count(answer, part.usage)
                    for choice in part.choices[:1]:
                        done = done or choice.finish_reason is not None
                        if choice.speaks and not spoken:
                            # The parts before it had the role alone.
                            answer.at_s.clear()
                            spoken = True
                        answer.at_s.append(now)
        if not done or not answer.at_s:
            answer.error, answer.said = "cut off", f"the answer ended after {len(answer.at_s)} parts"
    except TimeoutError:
        answer.error, answer.said = "stalled", f"no part of the answer for {wait_s:g} s"
    except aiohttp.ClientConnectorError as error:
        answer.error, answer.said = "not reachable", reason(error)
    except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, ConnectionError) as error:
        answer.error, answer.said = "cut off", reason(error)
    except (aiohttp.ClientError, OSError) as error:
        answer.error, answer.said = "failed", reason(error)
    except (ValueError, msgspec.MsgspecError) as error:
        answer.error, answer.said = "no valid answer", _shortened(str(error).encode())
    finally:
        answer.end_s = time.perf_counter()
        answer.first_s = answer.at_s[0] if answer.at_s else answer.end_s
        answer.output_tokens = answer.output_tokens or len(answer.at_s)


FATAL: Final = ("not reachable", "status 401", "status 403", "status 429", "stalled")
"""Kinds of failures that another form of request does not help."""


def _count(answer: Answer, usage: _Usage) -> None:
    answer.prompt_tokens = usage.prompt_tokens or answer.prompt_tokens
    answer.output_tokens = usage.completion_tokens or answer.output_tokens
    if usage.prompt_tokens_details is not None:
        answer.cached_tokens = usage.prompt_tokens_details.cached_tokens


def _refused(answer: Answer, status: int, content: bytes) -> None:
    answer.said = _shortened(content)
    text = content.lower()
    long = status in (400, 413, 422) and any(
        words in text for words in (b"context length", b"maximum context", b"longer than", b"too long", b"too large")
    )
    answer.error = "prompt too long" if long else f"status {status}" if status else "failed"


def _shortened(content: bytes) -> str:
    """The message in an error's JSON, or the text itself: one printable line."""
    try:
        found = msgspec.json.decode(content)
        while isinstance(found, dict) and ("error" in found or "message" in found):
            found = found.get("error", found.get("message"))
        text = found if isinstance(found, str) else content.decode(errors="replace")
    except msgspec.MsgspecError:
        text = content.decode(errors="replace")
    text = "".join(each if each.isprintable() else " " for each in text)
    text = " ".join(text.split())
    return text if len(text) <= MAX_SAID else text[: MAX_SAID - 3] + "..."


def reason(error: BaseException) -> str:
    """Why a connection or an answer failed, for people."""
    if isinstance(error, TimeoutError):
        return f"no answer within {DIAL_S:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or str(error.os_error) or str(error)
    return str(error) or type(error).__name__


def spread(number: int, conversation: int, servers: Sequence[str], route: str) -> int:
    """The index of the server of a request: by its number, or by its conversation."""
    return (conversation if route == "session" else number) % len(servers)
