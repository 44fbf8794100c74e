"""`tokenlake warm`, `pin` and `unpin` beside daemons that serve engines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.operator.scene import control_of, run, told
from tests.robustness.live import LAYOUT, SEGMENT_TOKENS, Prompt, daemons, store, wait_told
from tokenlake.wire import Code
from tokenlake_operator.warm import pin, unpin, warm
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    with daemons(2, memory="8MiB") as cluster:
        yield cluster


def at(cluster: Cluster, number: int = 0) -> tuple[str, str]:
    return "--socket", str(control_of(cluster.nodes[number]))


def test_prompts_are_brought_and_pinned(two: Cluster, tmp_path: Path) -> None:
    known, unknown = Prompt(1, 3), Prompt(2, 2)
    tokens = " ".join(map(str, known.tokens))
    listed = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"tokens": list(map(int, each.tokens))}) for each in (known, unknown)]
    listed.write_text("\n".join(lines))
    with two.connect(0, LAYOUT) as writer, two.connect(1, LAYOUT) as reader:
        store(writer, known)
        wait_told(two)
        answer = told(warm, "--tokens", tokens, "--to", "node1", *at(two))
        whole = {"here": 3, "missing": 0, "lost": 0, "refused": 0, "prefix_tokens": 3 * SEGMENT_TOKENS}
        assert answer == {"nodes": {"node1": {"tokens": whole}}, "failed": {}}
        with reader.match(reader.prefix(known.tokens).keys) as lease:
            assert bytes(lease.codes) == bytes([Code.LOCAL] * 3)
        result = run(pin, "--prompts", str(listed), "--for", "60", "--everywhere", "--json", *at(two))
        nodes = json.loads(result.stdout)["nodes"]
        assert (result.exit_code, nodes.keys()) == (1, {"node0", "node1"})
        for found in nodes.values():
            assert [each["here"] for each in found.values()] == [3, 0]
            assert [each["missing"] for each in found.values()] == [0, 2]
        assert told(unpin, "--tokens", tokens, *at(two)) == {"unpinned": {"node0": 3}, "failed": {}}
        assert run(unpin, "--all", *at(two, 1)).stdout == "node1: 3 segments unpinned\n"
        table = run(warm, "--prompts", str(listed), *at(two))
        assert table.exit_code == 1
        assert [line.split()[2:4] for line in table.stdout.splitlines()[1:]] == [["3", "0"], ["0", "2"]]


def test_a_node_without_such_engines_says_so(two: Cluster) -> None:
    for words, said in (
        (("--tokens", "1,2", "--layout", "ff"), "--layout names 0 layouts; expected one of"),
        (("--tokens", "1,2", "--to", "node9"), "node9: it is no member of the cluster"),
        (("--tokens", "1,2", "--tenant", "rde"), "node0: no engine of this tenant has connected"),
    ):
        result = run(warm, *words, *at(two))
        assert result.exit_code == 1
        assert said in result.stderr


def test_words_without_sense(two: Cluster, tmp_path: Path) -> None:
    odd = tmp_path / "odd.jsonl"
    odd.write_text('{"tokens": 3}\n')
    binary = tmp_path / "binary"
    binary.write_bytes(bytes(range(128, 256)))
    for command, *words in (
        (warm,),
        (warm, "--tokens", "1,x"),
        (warm, "--text", str(odd)),
        (warm, "--prompts", str(odd)),
        (warm, "--prompts", str(binary)),
        (warm, "--text", str(binary)),
        (warm, "--tokens", "9" * 5000),
        (pin, "--tokens", "1", "--for", "0"),
        (unpin,),
        (unpin, "--all", "--tokens", "1"),
    ):
        assert run(command, *words, *at(two)).exit_code == 2


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"tokens": []}',
        '{"tokens": [true]}',
        '{"tokens": [1.5]}',
        '{"tokens": [-1]}',
        '{"tokens": ["1 2"]}',
        '{"tokens": [[1, 2]]}',
        '{"tokens": [4294967296]}',
        '{"tokens": [' + "9" * 5000 + "]}",
        '{"text": 3}',
        "null",
        "\ud83d",
    ],
)
def test_lines_without_sense(line: str, tmp_path: Path) -> None:
    """The line is named, whatever it holds."""
    from tokenlake_operator.prompts import _lines

    odd = tmp_path / "odd.jsonl"
    odd.write_text('{"tokens": [1, 2]}\n' + line, errors="replace")
    found = _lines(odd, lambda text: [])
    assert next(found) == (f"{odd}:1", [1, 2])
    with pytest.raises(click.UsageError, match=re.escape(f"{odd}:2")):
        next(found)


def test_a_text_may_hold_any_character(tmp_path: Path) -> None:
    from tokenlake_operator.prompts import _lines

    listed = tmp_path / "listed.jsonl"
    listed.write_text(json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False))
    assert [ids for _, ids in _lines(listed, lambda text: [*map(ord, text)])] == [[97, 0x2028, 98, 0x85, 99]]


def test_texts_become_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="not installed: tokenizers")
    from tokenlake_operator.prompts import _encoder

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="<s>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(tmp_path / "tokenizer.json"))
    assert _encoder(tmp_path, rendered=False)("a b") == [0, 1, 2]
    assert _encoder(tmp_path, rendered=True)("a b") == [1, 2]
