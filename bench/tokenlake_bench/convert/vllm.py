"""The log of `vllm serve --enable-log-requests --enable-log-outputs` with `VLLM_LOGGING_LEVEL=DEBUG`, which has the
token ids of each prompt; until version 0.11.1 the level INFO has them, in one line with the parameters.

The lines of vLLM 0.32, behind a prefix with level, month, day and time, without a year (`request_logger.py`):

    Request ID details: prompt: 'TEXT', prompt_token_ids: [1, 2], prompt_embeds shape: None.
    Received request ID: params: SamplingParams(...), lora_request: None.
    Generated response ID details: output_token_ids: [3, 4]
    Generated response ID (streaming delta) details: output_token_ids: [3]

Answers of completions are not logged.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

import msgspec

from tokenlake_bench.convert.base import Log, Logged, Wrong, json_object, unix_s
from tokenlake_bench.convert.order import WINDOW
from tokenlake_bench.trace_lines import TraceError

_PREFIX: Final = re.compile(rb"\b(?:DEBUG|INFO) (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d) \[[^\]]*\] ")
_MESSAGE: Final = re.compile(rb"(Request|Received request|Generated response) (\S+?):?(?= )(.*)", re.DOTALL)
_COLOUR: Final = re.compile(rb"\x1b\[[0-9;]*m")
_IDS: Final = b", prompt_token_ids: ["
_ADAPTER: Final = b", lora_request: "
_NUMBERS: Final = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]])
_OUTPUT: Final = b"details: output_token_ids: ["
_ANSWER: Final = re.compile(rb" (?:\(streaming \w+\) )?" + re.escape(_OUTPUT))
_MOST: Final = re.compile(rb"'max_log_len': (\d+)")


def read_vllm(log: Log) -> Iterator[Logged]:
    """The requests of the log. Raises TraceError where prompts were logged without their tokens, or cut."""
    clock = _Clock(log.written_s)
    prompts: OrderedDict[bytes, tuple[float, list[int]]] = OrderedDict()
    answers: OrderedDict[bytes, Logged] = OrderedDict()
    most = received = found = 0
    for number, line in log.lines():
        if cut := _MOST.search(line):
            most = int(cut[1])
        try:
            if (parsed := _parsed(line, clock)) is None:
                continue
            at_s, kind, name, text = parsed
            if kind == b"Request" and text.startswith(b" details: "):
                prompts[name] = at_s, _numbers(text, _IDS)
                _bound(prompts)
            elif kind == b"Received request":
                received += 1
                own = (at_s, _numbers(text, _IDS)) if _IDS in text else prompts.pop(name, None)
                if own is None or not own[1]:
                    continue
                if most and len(own[1]) == most:
                    raise Wrong(f"the prompt is cut: the engine ran with --max-log-len {most}")
                adapter = text.rpartition(_ADAPTER)[2].decode(errors="replace").strip()
                ids = log.ids.of_tokens(own[1], "" if adapter.startswith("None") else adapter)
                answers[name] = logged = Logged(own[0], len(own[1]), ids, None, number)
                _bound(answers)
                found += 1
                yield logged
            elif kind == b"Generated response" and name in answers and _ANSWER.match(text):
                answers[name].output_tokens = (answers[name].output_tokens or 0) + len(_numbers(text, _OUTPUT))
        except Wrong as error:
            log.report.wrong(log.path, number, str(error))
    if received and not found:
        raise TraceError(
            log.path,
            f"expected the token ids of prompts; the log has {received:,} requests without them. vLLM writes them with "
            "VLLM_LOGGING_LEVEL=DEBUG and --enable-log-requests",
        )


def _parsed(line: bytes, clock: _Clock) -> tuple[float, bytes, bytes, bytes] | None:
    """(time, kind of the message, request, text behind it) of a line of the request logger: with colours, or as JSON
    (`--logging-config.formatter json`). None for other lines. Raises `Wrong`."""
    if b"equest " not in line and b"Generated response " not in line:
        return None
    if line.startswith(b"{"):
        record = json_object(line)
        at, text = record.get("asctime"), record.get("message")
        if not isinstance(at, str) or not isinstance(text, str):
            return None
        message = text.encode("utf-8", "surrogatepass")
        found = _MESSAGE.match(message)
        return None if found is None else (unix_s(at.replace(",", "."), "asctime"), found[1], found[2], found[3])
    line = _COLOUR.sub(b"", line)
    if (prefix := _PREFIX.search(line)) is None or (found := _MESSAGE.match(line, prefix.end())) is None:
        return None
    return clock.seconds(*map(int, prefix.groups())), found[1], found[2], found[3]


def _bound(known: OrderedDict[bytes, tuple[float, list[int]]] | OrderedDict[bytes, Logged]) -> None:
    if len(known) > WINDOW:
        known.popitem(last=False)


def _numbers(text: bytes, before: bytes) -> list[int]:
    """The numbers of the list behind the last `before`: the text of a prompt, which may contain anything, comes before
    its token ids. Empty where there is no list."""
    start = text.rfind(before)
    if start < 0:
        return []
    listed, closed, _ = text[start + len(before) :].partition(b"]")
    if not closed:
        raise Wrong("expected a whole list of token ids")
    try:
        return _NUMBERS.decode(b"[" + listed + b"]")
    except msgspec.MsgspecError as error:
        raise Wrong(f"token ids: {error}") from None


class _Clock:
    """Unix times of dates without a year. Dates that go back by half a year are those of the next year. Times are
    taken as UTC; a trace keeps differences only."""

    def __init__(self, written_s: float) -> None:
        self._written = datetime.fromtimestamp(written_s, UTC) + timedelta(days=1)
        self._year = self._written.year
        self._last: datetime | None = None

    def seconds(self, month: int, day: int, hour: int, minute: int, second: int) -> float:
        """The Unix time. Raises `Wrong` for a date that does not exist."""
        try:
            at = datetime(self._year, month, day, hour, minute, second, tzinfo=UTC)
            if self._last is None and at > self._written:
                self._year -= 1
                at = at.replace(year=self._year)
            elif self._last is not None and self._last - at > timedelta(days=180):
                self._year += 1
                at = at.replace(year=self._year)
        except ValueError:
            raise Wrong("expected a date") from None
        self._last = at
        return at.timestamp()
