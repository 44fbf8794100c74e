"""`tokenlake workload convert`: each format of logs, and what no trace may contain."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import zstandard
from click.testing import CliRunner, Result

from tokenlake.errors import ConfigurationError
from tokenlake_bench.convert import base
from tokenlake_bench.convert.command import FORMATS, ConvertArguments, run_convert
from tokenlake_bench.convert.prompts import Prompts
from tokenlake_bench.trace_lines import TraceError
from tokenlake_bench.workloads.command import workload

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

VLLM_PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"

TEMPLATE = (
    "{% if tools %}{{ 'tools ' + tools[0]['function']['name'] + ' ' }}{% endif %}"
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' ' }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'][0]['function']['arguments']['city'] + ' ' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer in which each word t0, t1, ... is a token, with a chat template and a beginning-of-text token that it
    adds to plain texts."""
    words = ["<s>", "system", "user", "assistant", "tools", "f", "tool", *(f"t{number}" for number in range(3000))]
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="t0")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="t0", bos_token="<s>")
    wrapped.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("tokenizer")
    wrapped.save_pretrained(path)
    return path


def words(count: int, first: int = 0) -> str:
    return " ".join(f"t{first + number}" for number in range(count))


def write(path: Path, lines: list[Any]) -> Path:
    text = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines).encode()
    packed = {".zst": zstandard.compress(text), ".gz": gzip.compress(text)}
    path.write_bytes(packed.get(path.suffix, text))
    return path


def converted(log: Path | list[Path], source: str, **arguments: Any) -> list[dict[str, Any]]:
    """The lines of the trace of a log."""
    logs = log if isinstance(log, list) else [log]
    out = logs[0].parent / "trace.jsonl"
    run_convert(ConvertArguments(logs=tuple(logs), source=source, out=out, **arguments))
    return [json.loads(line) for line in out.read_text().splitlines()]


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    roles = itertools.cycle(["user", "assistant"])
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)], **more}


# -- logs of an OpenAI API


def test_chats_are_rendered_as_engines_do(tmp_path: Path, tokenizer: Path) -> None:
    """The prompt is that of the chat template, with tools, parsed arguments and text parts, and without a second
    beginning of text; completions begin with it."""
    call = {"function": {"name": "f", "arguments": '{"city": "t9"}'}}
    asked = chat("t1", "t2", "t3", tools=[{"type": "function", "function": {"name": "f"}}])
    asked["messages"][1]["tool_calls"] = [call]
    asked["messages"][2]["content"] = [{"type": "text", "text": "t3"}, {"type": "text", "text": "t4"}]
    plain = {"prompt": "t1 t2", "time": 5}
    loaded = transformers.AutoTokenizer.from_pretrained(tokenizer)
    expected = loaded("tools f user t1 assistant t2 t9 user t3 t4 assistant", add_special_tokens=False)["input_ids"]
    log = write(tmp_path / "log.jsonl", [asked | {"time": 1}, plain, plain | {"add_special_tokens": False}])
    lines = converted(log, "openai", tokenizer=tokenizer, block_tokens=4)
    assert [line["input_length"] for line in lines] == [len(expected), 3, 2]
    found = Prompts(tokenizer)
    assert found.encode([found.render(asked)], special=False) == [expected]
    assert found.encode(["t1"], special=True) == [[0, 8]]


def test_records_of_gateways_and_batches_are_read(tmp_path: Path, tokenizer: Path) -> None:
    body = chat(words(20), model="m")
    usage = {"usage": {"prompt_tokens": 22, "completion_tokens": 7}}
    log = [
        body | {"timestamp": 1_795_899_770},
        {"time": "2026-11-28T21:02:51Z", "request": body, "response": usage},
        {"startTime": 1_795_899_772_000, "request_body": json.dumps(body), "response_body": json.dumps(usage)},
        {"@timestamp": "2026-11-28T22:02:53+01:00", "body": body, "response": {"status_code": 200, "body": usage}},
        {"ts": 1_795_899_774.5, "body": body, "response": {"choices": [{"message": {"content": "t1 t2 t3"}}]}},
        {"start_time": 1_795_899_775, **body, "completion_tokens": 9},
        {"request": {"body": body}, "response": {"created": 1_795_899_776}},
    ]
    lines = converted(write(tmp_path / "log.jsonl", log), "openai", tokenizer=tokenizer, block_tokens=8)
    assert [line["timestamp"] for line in lines] == [0, 1000, 2000, 3000, 4500, 5000, 6000]
    assert [line["output_length"] for line in lines] == [0, 7, 7, 7, 3, 9, 0]
    assert len({tuple(line["hash_ids"]) for line in lines}) == 1
    assert all(line["input_length"] == 22 and line["block_size"] == 8 for line in lines)

    batch = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body} for number in "ab"
    ]
    path = write(tmp_path / "batch.jsonl", batch)
    with pytest.raises(TraceError, match="the requests have no time; '--time-field NAME' .* '--rate'"):
        converted(path, "openai", tokenizer=tokenizer)
    lines = converted(path, "openai", tokenizer=tokenizer, rate=2.0, output_tokens=100)
    assert [line["output_length"] for line in lines] == [100, 100]
    assert lines[0]["timestamp"] == 0 < lines[1]["timestamp"]
    named = write(tmp_path / "named.jsonl", [body | {"asked": 5, "time": 9}, body | {"asked": 6, "time": 9}])
    assert converted(named, "openai", tokenizer=tokenizer, time_field="asked")[1]["timestamp"] == 1000


def test_token_ids_need_no_tokenizer_and_lists_are_requests(tmp_path: Path) -> None:
    log = write(
        tmp_path / "log.jsonl", [{"time": 0, "prompt": [[1, 2, 3], [1, 2, 3, 4]]}, {"time": 1, "prompt": [1, 2]}]
    )
    lines = converted(log, "openai", block_tokens=2)
    assert [line["input_length"] for line in lines] == [3, 4, 2]
    assert len({line["hash_ids"][0] for line in lines}) == 1
    assert lines[0]["hash_ids"][1] != lines[1]["hash_ids"][1]


def test_prompts_of_other_models_and_salts_share_nothing(tmp_path: Path) -> None:
    prompt = {"time": 0, "prompt": [1, 2, 3, 4]}
    log = [prompt | {"model": "a"}, prompt | {"model": "b"}, prompt | {"model": "a", "cache_salt": "x"}]
    lines = converted(write(tmp_path / "log.jsonl", log), "openai", block_tokens=2)
    assert len({each for line in lines for each in line["hash_ids"]}) == 6


def test_what_a_trace_cannot_hold_is_left_out_by_reason(tmp_path: Path, tokenizer: Path) -> None:
    image = chat("t1")
    image["messages"][0]["content"] = [{"type": "image_url", "image_url": {"url": "data:"}}]
    log = write(
        tmp_path / "log.jsonl",
        [chat("t1", time=0), image | {"time": 1}, {"time": 2, "input": "t1"}, {"time": 3, "body": {"input": ["t1"]}}],
    )
    result = invoke(log, "--from", "openai", "--out", tmp_path / "t.jsonl", "--tokenizer", tokenizer)
    assert result.exit_code == 0, result.output
    assert "prompts with parts that are not text" in result.output
    assert [line.split()[-3] for line in result.output.splitlines() if "chat completions nor" in line] == ["2"]


def test_a_tokenizer_of_another_model_is_noticed(tmp_path: Path, tokenizer: Path) -> None:
    for counted, notice in ((2, False), (700, True)):
        log = write(tmp_path / "log.jsonl", [{"time": 0, "prompt": "t1", "usage": {"prompt_tokens": counted}}])
        result = invoke(log, "--from", "openai", "--out", tmp_path / "t.jsonl", "--tokenizer", tokenizer)
        assert "the tokenizer counts as the log does in" in result.output
        assert ("is it the tokenizer" in result.output) is notice


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "'tokenizer' is None; expected the directory of the model's tokenizer"),
        (("--tokenizer", "."), "expected a directory of a tokenizer"),
        (("--from", "other"), "'openai', 'vllm', 'sharegpt', 'azure', 'bailian', 'mooncake'"),
        (("--block-tokens", "0"), "at least 1"),
        (("--log-block-tokens", "16"), "'log_block_tokens' is 16; expected absent but for bailian, mooncake"),
        (("--rate", "0"), "above 0"),
        (("--out", "trace.csv"), "expected a name ending in .jsonl, .jsonl.gz or .jsonl.zst, or -"),
        (("--out", "missing/trace.jsonl"), "a directory that exists"),
    ],
)
def test_arguments_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    log = write(tmp_path / "log.jsonl", [chat("t1", time=0)])
    result = invoke(log, "--from", "openai", "--out", "t.jsonl", *arguments)
    assert result.exit_code != 0
    assert expected in " ".join(result.output.split())
    assert not (tmp_path / "t.jsonl").exists()
    assert not list(tmp_path.glob(".*.part"))


# -- wrong lines


def invoke(*arguments: object, given: bytes | None = None) -> Result:
    return CliRunner().invoke(workload, ["convert", *map(str, arguments)], input=given)


def test_wrong_lines_are_named_and_counted_up_to_a_limit(tmp_path: Path) -> None:
    good = {"time": 0, "prompt": [1, 2]}
    bad = [
        "{",
        '"text"',
        {"time": 0, "prompt": []},
        {"time": "soon", "prompt": [1]},
        {"time": 0},
        {"time": 1, "prompt": [-1]},
    ]
    log = write(tmp_path / "log.jsonl", [good, *bad, good])
    out = tmp_path / "t.jsonl"
    result = invoke(log, "--from", "openai", "--out", out)
    assert result.exit_code == 0
    assert [f"{log}, line {number}: " in result.output for number in range(1, 9)] == [False, *[True] * 6, False]
    assert "6 left out" in result.output
    assert len(out.read_text().splitlines()) == 2
    out.unlink()
    failed = invoke(log, "--from", "openai", "--out", out, "--wrong-lines", 2)
    assert failed.exit_code == 1
    assert f"{log}, line 4: prompt: expected a text" in failed.output
    assert "2 wrong lines came before" in failed.output
    assert not out.exists()


def test_a_log_of_another_format_says_what_was_expected(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", [{"a": 1}] * 3)
    for source in FORMATS:
        result = invoke(log, "--from", source, "--out", tmp_path / "t.jsonl", "--unshared")
        assert result.exit_code == 1, source
        assert f"Error: {log}" in result.output, source
    with pytest.raises(TraceError, match="expected requests as 'openai' logs them; found 3 wrong lines"):
        converted(log, "openai")
    answers = write(tmp_path / "answers.jsonl", [{"custom_id": "1", "response": {"body": {}}}])
    assert "its input file has them" in invoke(answers, "--from", "openai", "--out", tmp_path / "t.jsonl").output


def test_lines_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is too long is left out, and the next one is read; no more than the bound is read at a time."""
    monkeypatch.setattr(base, "LONGEST_LINE", 100)
    good = {"time": 0, "prompt": [1, 2]}
    log = write(tmp_path / "log.jsonl", [good, {"time": 0, "prompt": [1] * 200}, good])
    assert len(converted(log, "openai")) == 2


# -- privacy


def test_a_trace_has_neither_text_nor_token_ids(tmp_path: Path, tokenizer: Path) -> None:
    """Two conversions share no id; nothing but lengths, times and ids of 53 bits is in the trace, and the summary and
    the errors have no text."""
    log = write(
        tmp_path / "log.jsonl",
        [chat("t1729 t2718", model="secret-model", time=1_795_899_770), {"time": 0, "x": "t1729"}],
    )
    out = tmp_path / "t.jsonl"
    seen = []
    for _ in range(2):
        result = invoke(log, "--from", "openai", "--out", out, "--tokenizer", tokenizer, "--block-tokens", 1)
        text = out.read_text()
        for private in ("t1729", "secret", "1735", "1795"):
            assert private not in text
            assert private not in result.output
        (line,) = map(json.loads, text.splitlines())
        assert sorted(line) == ["block_size", "hash_ids", "input_length", "output_length", "timestamp"]
        assert all(0 <= each < 1 << 53 for each in line["hash_ids"])
        seen.append(line["hash_ids"])
    assert not set(seen[0]) & set(seen[1])


def test_a_key_file_joins_conversions(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", [{"time": 1_795_899_770.25, "prompt": [1, 2, 3]}])
    key = tmp_path / "key"
    first, second = (converted(log, "openai", key_file=key) for _ in range(2))
    assert first == second
    assert first[0]["timestamp"] == 1_795_899_770_250, "times stay those of the clock, so that traces can be merged"
    assert stat.S_IMODE(os.stat(key).st_mode) == 0o600
    assert first[0]["hash_ids"] != converted(log, "openai")[0]["hash_ids"]
    key.write_bytes(b"short")
    with pytest.raises(ConfigurationError, match="'key_file' is '.*'; expected a file of 32 bytes"):
        converted(log, "openai", key_file=key)


# -- vLLM

TOKENS = ", ".join(str(number) for number in range(100, 140))
VLLM = f"""\
(APIServer pid=7) DEBUG 12-31 23:59:58 [entrypoints/.../utils/request_logger.py:74] Request 1 JSON body: {{"a": 1}}
(APIServer pid=7) DEBUG 12-31 23:59:58 [entrypoints/.../utils/request_logger.py:55] Request chatcmpl-1 details: \
prompt: 'it\\'s ", prompt_token_ids: [1, 2], lora_request: None."', prompt_token_ids: [{TOKENS}, 7], \
prompt_embeds shape: None.
(APIServer pid=7) INFO 12-31 23:59:58 [entrypoints/.../utils/request_logger.py:65] Received request chatcmpl-1: \
params: SamplingParams(n=1, stop=[', lora_request: x'], max_tokens=5), lora_request: None.
(APIServer pid=7) DEBUG 12-31 23:59:58 [v1/engine/async_llm.py:382] Added request chatcmpl-1-a8a65d16.
(APIServer pid=7) DEBUG 12-31 23:59:59 [entrypoints/.../utils/request_logger.py:55] Request cmpl-2-0 details: \
prompt: None, prompt_token_ids: [{TOKENS}], prompt_embeds shape: None.
(APIServer pid=7) INFO 12-31 23:59:59 [entrypoints/.../utils/request_logger.py:65] Received request cmpl-2-0: \
params: SamplingParams(n=1, max_tokens=3), lora_request: None.
(APIServer pid=7) DEBUG 01-01 00:00:02 [entrypoints/.../utils/request_logger.py:101] Generated response chatcmpl-1 \
details: output_token_ids: [343, 992, 587]
(APIServer pid=7) INFO 01-01 00:00:02 [entrypoints/.../utils/request_logger.py:108] Generated response chatcmpl-1: \
output: ' t343 details: output_token_ids: [1]', finish_reason: length
(APIServer pid=7) DEBUG 01-01 00:00:03 [entrypoints/.../utils/request_logger.py:55] Request chatcmpl-3 details: \
prompt: 'x', prompt_token_ids: [{TOKENS}, 9], prompt_embeds shape: None.
(APIServer pid=7) INFO 01-01 00:00:03 [entrypoints/.../utils/request_logger.py:65] Received request chatcmpl-3: \
params: SamplingParams(n=1, max_tokens=9), lora_request: LoRARequest(lora_name='a', lora_int_id=1).
(APIServer pid=7) DEBUG 01-01 00:00:04 [entrypoints/.../utils/request_logger.py:101] Generated response chatcmpl-3 \
(streaming delta) details: output_token_ids: [98]
(APIServer pid=7) DEBUG 01-01 00:00:05 [entrypoints/.../utils/request_logger.py:101] Generated response chatcmpl-3 \
(streaming delta) details: output_token_ids: [99, 100]
(APIServer pid=7) DEBUG 01-01 00:00:05 [entrypoints/.../utils/request_logger.py:101] Generated response chatcmpl-3 \
(streaming complete) details: output_token_ids: None
"""
"""Lines of vLLM 0.32, shortened, over the end of a year."""


def test_the_log_of_vllm_has_its_prompts_and_answers(tmp_path: Path) -> None:
    """Texts that look like fields of the log are not read as such; an adapter has a cache of its own."""
    log = write(tmp_path / "vllm.log", [VLLM])
    lines = converted(log, "vllm", block_tokens=8)
    assert [line["timestamp"] for line in lines] == [0, 1000, 5000]
    assert [line["input_length"] for line in lines] == [41, 40, 41]
    assert [line["output_length"] for line in lines] == [3, 0, 3]
    assert lines[0]["hash_ids"][:5] == lines[1]["hash_ids"]
    assert not set(lines[2]["hash_ids"]) & set(lines[0]["hash_ids"])


def test_the_log_of_vllm_may_have_colours_or_be_json(tmp_path: Path) -> None:
    expected = [
        (line["timestamp"], line["input_length"], line["output_length"])
        for line in converted(write(tmp_path / "vllm.log", [VLLM]), "vllm")
    ]
    coloured = VLLM.replace("(APIServer", "\x1b[0;36m(APIServer").replace("DEBUG 12", "\x1b[37mDEBUG\x1b[0m \x1b[90m12")
    records = []
    for line in VLLM.splitlines():
        at, message = line.split(" [", 1)[0][-14:], line.split("] ", 1)[1]
        year = 2025 if at.startswith("12") else 2026
        records.append({"asctime": f"{year}-{at},000", "levelname": "DEBUG", "message": message})
    for lines in ([coloured], records):
        found = converted(write(tmp_path / "vllm.log", lines), "vllm")
        assert [(line["timestamp"], line["input_length"], line["output_length"]) for line in found] == expected


def test_the_log_of_older_versions_is_read(tmp_path: Path) -> None:
    """Until version 0.11.1 one line at level INFO had the prompt; Kubernetes adds a prefix to each line."""
    old = (
        "2026-11-28T20:00:00.1Z stderr F INFO 11-28 20:00:0{at} [logger.py:36] Received request cmpl-{at}: prompt: "
        "'How', params: SamplingParams(n=1), prompt_token_ids: [1, 2, {at}], prompt_embeds shape: None, lora_request: "
        "None, prompt_adapter_request: None."
    )
    lines = converted(write(tmp_path / "vllm.log", [old.format(at=at) for at in (1, 2)]), "vllm", block_tokens=2)
    assert [line["timestamp"] for line in lines] == [0, 1000]
    assert lines[0]["hash_ids"][0] == lines[1]["hash_ids"][0]


def test_a_log_of_vllm_without_tokens_says_what_to_set(tmp_path: Path) -> None:
    bare = write(tmp_path / "vllm.log", [line for line in VLLM.splitlines() if " DEBUG " not in line])
    with pytest.raises(TraceError, match="the log has 3 requests without them. .* VLLM_LOGGING_LEVEL=DEBUG and"):
        converted(bare, "vllm")
    options = "INFO 12-31 23:59:00 [utils.py:1] non-default args: {'max_log_len': 40, 'port': 8000}"
    cut = write(tmp_path / "cut.log", [options, VLLM])
    result = invoke(cut, "--from", "vllm", "--out", tmp_path / "t.jsonl")
    assert "the prompt is cut: the engine ran with --max-log-len 40" in result.output
    broken = write(tmp_path / "broken.log", [VLLM[: VLLM.index(TOKENS) + 50], VLLM])
    assert (
        "line 2: expected a whole list of token ids"
        in invoke(broken, "--from", "vllm", "--out", tmp_path / "t.jsonl").output
    )


WRITE_LOG = """
import sys
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
configure_logging(LoggingConfig(log_level="DEBUG", formatter=sys.argv[1]))
from vllm.entrypoints.serve.utils.request_logger import RequestLogger
from vllm.sampling_params import SamplingParams
log = RequestLogger(max_log_len=None)
for number in (1, 2):
    name = f"chatcmpl-{number}"
    text = "it's \\n\\", prompt_token_ids: [7], lora_request: None."
    log.log_inputs(name, text, [1, 2, 3, number], None, SamplingParams(max_tokens=5, stop=[", lora_request: x"]), None)
    log.log_outputs(name, text, [8, 9], None, is_streaming=True, delta=True)
    log.log_outputs(name, "details: output_token_ids: [1]", [8], "stop", is_streaming=True, delta=True)
    log.log_outputs(name, text, None, "streaming_complete", is_streaming=True)
"""


@pytest.mark.rest
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason=f"vLLM is not installed: {VLLM_PYTHON}")
@pytest.mark.parametrize("form", ["text", "json"])
def test_the_lines_of_the_installed_vllm_are_read(tmp_path: Path, form: str) -> None:
    """The logger of the vLLM that is installed writes lines that the reader knows, also with colours."""
    environment = os.environ | {"VLLM_LOGGING_COLOR": "1"}
    path = tmp_path / "vllm.log"
    with path.open("wb") as log:
        subprocess.run([VLLM_PYTHON, "-c", WRITE_LOG, form], env=environment, stdout=log, stderr=log, check=True)
    lines = converted(path, "vllm", block_tokens=3)
    assert [(line["input_length"], line["output_length"]) for line in lines] == [(4, 3), (4, 3)]
    assert lines[0]["hash_ids"][0] == lines[1]["hash_ids"][0]
    assert lines[0]["hash_ids"][1] != lines[1]["hash_ids"][1]
