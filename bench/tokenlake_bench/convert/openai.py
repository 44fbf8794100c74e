"""Logs of requests to an OpenAI API as JSON lines: bodies of chat completions and completions, alone or in a record
with a time and an answer, as gateways write them, and the input files of OpenAI's batches.

The body is the record itself or its field `body`, `request` or `request_body`; the answer is its `response` or
`response_body`. Names of the time: `TIMES`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tokenlake.errors import TokenLakeError
from tokenlake_bench.convert.base import LeftOut, Log, Logged, Wrong, json_object, unix_s

TIMES: Final = (
    *("timestamp", "time", "ts", "@timestamp", "start_time", "startTime", "request_time", "requestTime"),
    *("created_at", "created", "date"),
)
BATCH: Final = 64
"""Requests whose prompts are tokenized at once."""
BATCH_CHARACTERS: Final = 4 << 20
"""Characters of these prompts, beyond which the batch is smaller."""

_BODIES: Final = ("body", "request", "request_body", "requestBody")
_ANSWERS: Final = ("response", "response_body", "responseBody")


class _Asked(NamedTuple):
    """A request before its prompts are tokenized."""

    line: int
    at_s: float
    realm: str
    prompts: list[str | list[int]]
    special: bool
    """The tokenizer adds special tokens."""
    output_tokens: int | None
    answer: str | None
    """The text of the answer, where its number of tokens is not known."""
    input_tokens: int | None
    """Tokens of the prompt as the log counts them."""

    @property
    def characters(self) -> int:
        return sum(map(len, self.prompts))


def read_openai(log: Log) -> Iterator[Logged]:
    """The requests of the log."""
    asked = _asked(log)
    while batch := list(_batch(asked)):
        yield from _tokenized(log, batch)


def _batch(asked: Iterator[_Asked]) -> Iterator[_Asked]:
    characters = 0
    for each in itertools.islice(asked, BATCH):
        yield each
        characters += each.characters
        if characters > BATCH_CHARACTERS:
            return


def _asked(log: Log) -> Iterator[_Asked]:
    drawn: Iterator[float] | None = None
    for number, line in log.lines():
        try:
            record = json_object(line)
            body = _body(record)
            answer = _answer(record)
            at_s = _time(log.time_field, record, body, answer)
            if at_s is None:
                drawn = drawn or log.arrivals()
                at_s = next(drawn)
            yield _request(log, number, at_s, body, record, answer)
        except Wrong as error:
            log.report.wrong(log.path, number, str(error))
        except LeftOut as reason:
            log.report.left_out[str(reason)] += 1


def _request(
    log: Log, line: int, at_s: float, body: dict[str, Any], record: dict[str, Any], answer: dict[str, Any]
) -> _Asked:
    special = False
    if "messages" in body:
        prompts: list[str | list[int]] = [_chat(log, body)]
    else:
        prompts, special = _prompts(body["prompt"]), bool(body.get("add_special_tokens", True))
    usage = answer.get("usage") or record.get("usage") or record
    output, given = _count(usage, "completion_tokens"), _count(usage, "prompt_tokens")
    realm = json.dumps([body.get("model"), body.get("cache_salt")])
    text = _text(answer) if output is None else None
    # The counts of a request with several prompts are those of all together.
    alone = len(prompts) == 1
    return _Asked(line, at_s, realm, prompts, special, output if alone else None, text, given if alone else None)


def _chat(log: Log, body: dict[str, Any]) -> str:
    messages = body["messages"]
    if not isinstance(messages, list) or not messages:
        raise Wrong("messages: expected a list of messages")
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and "text" not in part:
                raise LeftOut("prompts with parts that are not text")
    try:
        return log.prompts.render(body)
    except TokenLakeError:
        raise
    except ValueError as error:
        raise Wrong(str(error)) from None


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion: a text, token ids, or a list of either."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _token(prompt[0])):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise Wrong("prompt: expected a text, token ids, or a list of these")
    for each in prompt:
        if not (isinstance(each, str) or (isinstance(each, list) and each and all(map(_token, each)))):
            raise Wrong("prompt: expected a text, token ids, or a list of these")
    return prompt


def _token(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _tokenized(log: Log, batch: Sequence[_Asked]) -> Iterator[Logged]:
    ids: dict[tuple[int, int], list[int]] = {}
    for special in (False, True):
        places = [
            (number, place, prompt)
            for number, each in enumerate(batch)
            for place, prompt in enumerate(each.prompts)
            if each.special is special and isinstance(prompt, str)
        ]
        found = log.prompts.encode([prompt for *_, prompt in places], special=special)
        ids.update(((number, place), tokens) for (number, place, _), tokens in zip(places, found, strict=True))
    texts = [each.answer for each in batch if each.answer is not None]
    answers = iter(log.prompts.encode(texts, special=False))
    for number, each in enumerate(batch):
        output = each.output_tokens if each.answer is None else len(next(answers))
        for place, prompt in enumerate(each.prompts):
            tokens = ids[number, place] if isinstance(prompt, str) else prompt
            if not tokens:
                log.report.wrong(log.path, each.line, "prompt: expected at least one token")
                continue
            if each.input_tokens is not None:
                log.report.lengths_compared += 1
                log.report.lengths_equal += each.input_tokens == len(tokens)
            yield Logged(each.at_s, len(tokens), log.ids.of_tokens(tokens, each.realm), output, each.line)


# -- the fields of a record


def _body(record: dict[str, Any]) -> dict[str, Any]:
    """The body of the request. Raises `Wrong`, or `LeftOut` for a request of another kind."""
    seen = [record]
    for name in _BODIES:
        if (inner := _object(record.get(name))) is not None:
            seen += [inner, *filter(None, (_object(inner.get("body")),))]
    for each in seen:
        if "messages" in each or "prompt" in each:
            return each
    if any("input" in each for each in seen):
        raise LeftOut("requests that are neither chat completions nor completions")
    if "custom_id" in record and "response" in record:
        raise Wrong("the output of a batch has no prompts; its input file has them")
    raise Wrong(f"expected 'messages' or 'prompt', in the record or in its {', '.join(_BODIES[:3])}")


def _answer(record: dict[str, Any]) -> dict[str, Any]:
    """The body of the answer, empty where the record has none."""
    for name in _ANSWERS:
        if (inner := _object(record.get(name))) is not None:
            return _object(inner.get("body")) or inner
    return record if "choices" in record else {}


def _object(value: object) -> dict[str, Any] | None:
    """A JSON object, which loggers may write as text."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def _count(holder: object, name: str) -> int | None:
    value = holder.get(name) if isinstance(holder, Mapping) else None
    return value if type(value) is int and value >= 0 else None


def _text(answer: Mapping[str, Any]) -> str | None:
    """The text of an answer; None where there is none."""
    choices = answer.get("choices")
    texts: list[str] = []
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, Mapping):
            message = choice.get("message")
            text = message.get("content") if isinstance(message, Mapping) else choice.get("text")
            texts += [text] if isinstance(text, str) else []
    return "".join(texts) or None


def _time(named: str | None, *holders: Mapping[str, Any]) -> float | None:
    """The Unix time of a request; None where it has none. Raises `Wrong` for a value that is no time."""
    for name in (named,) if named else TIMES:
        for holder in holders:
            if (value := holder.get(name)) is not None:
                return unix_s(value, name)
    if named:
        raise Wrong(f"{named}: expected a time; the record has none")
    return None
