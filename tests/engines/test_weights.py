"""The weights digest of directories and of tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenlake.errors import LayoutRefused
from tokenlake_client import weights
from tokenlake_client.weights import digest_of_changes, digest_of_directory, digest_of_tensors, digest_of_version


def make(directory: Path, *, content: bytes = b"weights", **config: object) -> Path:
    directory.mkdir(parents=True)
    settings = {"model_type": "llama", "hidden_size": 8, **config}
    (directory / "config.json").write_text(json.dumps(settings))
    (directory / "model-00001.safetensors").write_bytes(content)
    (directory / "model-00002.safetensors").write_bytes(content * 2)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def test_equal_files_in_another_directory_have_the_same_digest(tmp_path: Path) -> None:
    first = make(tmp_path / "a", _name_or_path="a", transformers_version="1")
    second = make(tmp_path / "b" / "c", _name_or_path="b", transformers_version="2")
    (second / "tokenizer.json").write_text('{"other": 1}')
    cache = tmp_path / "cache"
    assert digest_of_directory(first, cache) == digest_of_directory(second, cache)
    assert digest_of_directory(first, tmp_path / "other cache") == digest_of_directory(first, cache)


def test_each_part_changes_the_digest(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    renamed = make(tmp_path / "renamed")
    (renamed / "model-00002.safetensors").rename(renamed / "model-3.safetensors")
    coded = make(tmp_path / "coded")
    (coded / "modeling.py").write_text("x = 1")
    adapted = make(tmp_path / "adapted")
    (adapted / "adapter_config.json").write_text("{}")
    indexed = make(tmp_path / "indexed")
    (indexed / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    directories = [
        indexed,
        make(tmp_path / "plain"),
        make(tmp_path / "content", content=b"Weights"),
        make(tmp_path / "setting", hidden_size=9),
        renamed,
        coded,
        adapted,
    ]
    assert len({digest_of_directory(directory, cache) for directory in directories}) == len(directories)


def test_changes_to_what_a_directory_says_change_the_digest(tmp_path: Path) -> None:
    digest = digest_of_directory(make(tmp_path / "plain"), tmp_path / "cache")
    assert digest_of_changes(digest, {}) == digest
    one, two = ({"configuration": {"rms_norm_eps": value}} for value in (0.25, 0.5))
    other = {"configuration": {"rope_theta": 0.25}}
    assert len({digest, *(digest_of_changes(digest, changes) for changes in (one, two, other))}) == 4


def no_reads(patch: pytest.MonkeyPatch) -> None:
    def unexpected(path: Path) -> str:
        raise AssertionError(f"{path} was read")

    patch.setattr(weights, "_hash_file", unexpected)


def another_process() -> None:
    """Forget what a process knows."""
    weights._known.clear()
    weights._default_store.cache_clear()


def test_a_second_call_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, cache = make(tmp_path / "a"), tmp_path / "cache"
    digest = digest_of_directory(directory, cache)
    no_reads(monkeypatch)
    assert digest_of_directory(directory, tmp_path / "other cache") == digest
    another_process()
    assert digest_of_directory(directory, cache) == digest


def test_a_home_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container with a read-only file system: another place is taken, which only this user can write."""
    directory, open_to_all, place = make(tmp_path / "a"), tmp_path / "open", tmp_path / "place"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    monkeypatch.setattr(weights, "_places", lambda given: iter((Path("/proc/tokenlake"), open_to_all, place)))
    another_process()
    digest = digest_of_directory(directory)
    assert f"digests of weights are kept in {place}" in caplog.text
    assert "another user can write there" in caplog.text
    no_reads(monkeypatch)
    another_process()
    assert digest_of_directory(directory) == digest


def test_without_any_place_a_process_reads_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make(tmp_path / "a")
    monkeypatch.setattr(weights, "_places", lambda given: iter((Path("/proc/tokenlake"),)))
    another_process()
    digest = digest_of_directory(directory)
    no_reads(monkeypatch)
    assert digest_of_directory(directory) == digest
    assert caplog.text.count("set XDG_CACHE_HOME") == 1
    another_process()


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(path: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(none))
    assert [each.name for each in weights._places("")] == [f"tokenlake-{os.geteuid()}-weights"] * 2


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    directory, cache = make(tmp_path / "a"), tmp_path / "cache"
    digest = digest_of_directory(directory, cache)
    file = directory / "model-00001.safetensors"
    before = file.stat()
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digest_of_directory(directory, cache) != digest


@pytest.mark.parametrize("entry", [b"", b"{}", b"[1]", b'["x", "y"]', b"\xff"])
def test_a_damaged_cache_is_ignored(tmp_path: Path, entry: bytes) -> None:
    directory, cache = make(tmp_path / "a"), tmp_path / "cache"
    digest = digest_of_directory(directory, cache)
    another_process()
    for path in cache.iterdir():
        path.write_bytes(entry)
    assert digest_of_directory(directory, cache) == digest


def test_an_unwritable_cache_is_ignored(tmp_path: Path) -> None:
    directory = make(tmp_path / "a")
    (tmp_path / "file").write_text("")
    digest = digest_of_directory(directory, tmp_path / "file" / "cache")
    another_process()
    assert digest_of_directory(directory, tmp_path / "cache") == digest


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutRefused, match="weights_digest"):
        digest_of_directory(tmp_path)


def test_tensors_in_any_order(tmp_path: Path) -> None:
    one = ("one", "float32", (2, 1), memoryview(b"12345678"))
    two = ("two", "float32", (2,), memoryview(b"abcdefgh"))
    digest = digest_of_tensors({"a": 1}, [one, two])
    assert digest == digest_of_tensors({"a": 1}, [two, one])
    others = [
        digest_of_tensors({"a": 2}, [one, two]),
        digest_of_tensors({"a": 1}, [one]),
        digest_of_tensors({"a": 1}, [one, ("two", "float32", (2,), memoryview(b"abcdefgH"))]),
        digest_of_tensors({"a": 1}, [one, ("two", "float32", (1, 2), memoryview(b"abcdefgh"))]),
        digest_of_version(digest, "1"),
        digest_of_version(digest, "2"),
        digest,
    ]
    assert len(set(others)) == len(others)


def test_importing_it_imports_no_engine() -> None:
    code = (
        "import sys, tokenlake_client, tokenlake_client.weights; "
        "from tokenlake_client.engines.common import background, connection, in_flight, model_config, reports; "
        "from tokenlake_client.engines.vllm import settings; "
        "from tokenlake_client.engines.vllm.known import scheduler, worker; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'vllm')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
