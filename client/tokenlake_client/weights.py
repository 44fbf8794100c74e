"""The weights digest: it identifies the weights and the configuration that a segment was computed with.

The digest of a model directory is a blake2b-256 over the configuration and, for each file that holds weights, model
code or an index of the weights, its name relative to the directory, its size and the blake2b-256 of its content (a
weight file's header is part of its content). Equal files in another directory therefore have the same digest, and all
engines that load one directory compute the same one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenlake.errors import LayoutRefused

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CONSOLIDATED = "consolidated"
"""The prefix of the names of weight files in Mistral's format, which engines may prefer to all other formats."""
RANDOM_BYTES = 16
CODE_SUFFIX = ".py"
"""The suffix of files with model code in the directory of the weights. Such code is part of the computation, so the
weights digest covers it."""
INDEX_SUFFIX = ".index.json"
"""The suffix of index files, which list the weight files that engines read."""
CONFIGURATION_FILES = ("config.json", "adapter_config.json")
IGNORED_SETTINGS = ("_name_or_path", "transformers_version")
"""Settings of a model's configuration that describe its origin and do not change its computation; the weights digest
leaves them out."""
READ_BYTES = 4 << 20
THREADS = 4
SHARED_MEMORY = "/dev/shm"
"""A directory that can be written in most containers whose file system cannot."""
_known: dict[str, tuple[list[object], str]] = {}
"""By path, identity and digest of the files that this process has read."""


def digest_of_directory(directory: str | Path, cache: Path | None = None) -> str:
    """Hex digest of the model, or of the LoRA adapter, in `directory`.

    The digests of files are kept in `cache`, by path, size and times of change, so that neither a second call nor
    another process reads an unchanged file. Default: `tokenlake/weights` in the user's cache directory, and where that
    cannot be written, a directory of the user among the temporary files. Raises `LayoutRefused` where there is no
    configuration or no weight file.
    """
    root = Path(directory)
    configurations = [[name, _configuration(root / name)] for name in CONFIGURATION_FILES if (root / name).is_file()]
    files = weight_files(root)
    if not configurations or not files:
        raise LayoutRefused(f"layout field 'weights_digest': no configuration or no weight file in {root}")
    files += _further_files(root)
    store = _default_store(os.environ.get("XDG_CACHE_HOME", "")) if cache is None else cache
    try:
        with ThreadPoolExecutor(max_workers=THREADS) as threads:
            digests = list(threads.map(lambda path: _content_digest(path, store), files))
    except RuntimeError:
        # No thread can be started.
        digests = [_content_digest(path, store) for path in files]
    entries = [[path.name, path.stat().st_size, digest] for path, digest in zip(files, digests, strict=True)]
    return _digest_of_json([SCHEMA_VERSION, "directory", configurations, entries])


def state_of_directory(directory: str | Path) -> str:
    """A text that changes when the files that the digest of `directory` covers change or are replaced: a digest of
    their places, sizes and times of change. Reads no file. Raises OSError."""
    root = Path(directory)
    configurations = [root / name for name in CONFIGURATION_FILES if (root / name).is_file()]
    files = [path.resolve() for path in (*configurations, *weight_files(root), *_further_files(root))]
    return _digest_of_json([[path.stat().st_ino, *_identity(path)] for path in files])


def digest_of_tensors(
    config: Mapping[str, object], tensors: Iterable[tuple[str, str, tuple[int, ...], memoryview]]
) -> str:
    """Hex digest of weights in memory. `tensors`: (name, dtype, shape, contiguous bytes), in any order;
    each buffer is read before the next one is asked for."""
    entries = [
        [name, dtype, list(shape), hashlib.blake2b(content, digest_size=32).hexdigest()]
        for name, dtype, shape, content in tensors
    ]
    settings = {name: value for name, value in config.items() if name not in IGNORED_SETTINGS}
    return _digest_of_json([SCHEMA_VERSION, "memory", settings, sorted(entries)])


def digest_of_version(digest: str, version: str) -> str:
    """Hex digest of weights that started as `digest` and were changed in place to `version`."""
    return _digest_of_json([SCHEMA_VERSION, "version", digest, version])


def random_version() -> str:
    """A version of weights that changed in place, under which nothing is shared with other engines or with earlier
    versions. The values of a counter would repeat in another engine or after a restart."""
    return f"random {secrets.token_hex(RANDOM_BYTES)}"


def digest_of_changes(digest: str, changes: Mapping[str, object]) -> str:
    """Hex digest of the weights `digest` with settings that differ from those of their directory; `digest` itself
    without `changes`. `changes`: JSON values by the name of the setting."""
    return _digest_of_json([SCHEMA_VERSION, "changes", digest, changes]) if changes else digest


def weight_files(directory: Path) -> list[Path]:
    """The files in `directory` that hold weights, sorted by name."""
    return sorted(path for path in directory.iterdir() if path.suffix in WEIGHT_SUFFIXES)


def weight_formats(directory: Path) -> int:
    """The number of formats in which `directory` holds the weights; an engine's load format chooses one of them."""
    return len({(path.suffix, path.name.startswith(CONSOLIDATED)) for path in weight_files(directory)})


def _further_files(root: Path) -> list[Path]:
    """The files in `root` with model code or an index of the weights, sorted by name."""
    return sorted(path for path in root.iterdir() if path.suffix == CODE_SUFFIX or path.name.endswith(INDEX_SUFFIX))


def _identity(real: Path) -> list[object]:
    """The place, size and times of change of a file; `real` is no symbolic link."""
    state = real.stat()
    # The time of the inode's change (ctime) is compared too: tools that copy files may give a changed file its old
    # modification time, but they cannot set ctime.
    return [str(real), state.st_size, state.st_mtime_ns, state.st_ctime_ns]


def _digest_of_json(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def _configuration(path: Path) -> dict[str, object]:
    try:
        settings = json.loads(path.read_bytes())
    except ValueError as error:
        raise LayoutRefused(f"layout field 'weights_digest': {path} cannot be read: {error}") from error
    return {name: value for name, value in settings.items() if name not in IGNORED_SETTINGS}


@functools.cache
def _default_store(given: str) -> Path | None:
    """The first place for digests that can be used; None where there is none. A place that replaces another one is told
    in the log, once. `given`: XDG_CACHE_HOME."""
    problems = []
    for place in _places(given):
        try:
            _prepare(place)
        except OSError as error:
            problems.append(f"{place}: {error.strerror or error}")
        else:
            if problems:
                log.warning("digests of weights are kept in %s (%s)", place, "; ".join(problems))
            return place
    log.warning(
        "digests of weights cannot be kept, so that each process reads all weights (%s): set XDG_CACHE_HOME to a "
        "directory that can be written",
        "; ".join(problems),
    )
    return None


def _places(given: str) -> Iterator[Path]:
    # A user of a container may have no home.
    with contextlib.suppress(RuntimeError):
        yield Path(given or Path.home() / ".cache") / "tokenlake" / "weights"
    for shared in (tempfile.gettempdir(), SHARED_MEMORY):
        yield Path(shared) / f"tokenlake-{os.geteuid()}-weights"


def _prepare(place: Path) -> None:
    """Create the directory. Raises OSError where it cannot be written, or where another user can: a wrong digest would
    give one model the cache of another."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise OSError("another user can write there")
    with tempfile.TemporaryFile(dir=place):
        pass


def _content_digest(path: Path, store: Path | None) -> str:
    real = path.resolve()
    identity = _identity(real)
    known = _known.get(str(real))
    if known is None or known[0] != identity:
        _known[str(real)] = known = identity, _kept_digest(real, identity, store)
    return known[1]


def _kept_digest(real: Path, identity: list[object], store: Path | None) -> str:
    if store is None:
        return _hash_file(real)
    entry = store / f"{_digest_of_json(str(real))}.json"
    try:
        known_identity, known_digest = json.loads(entry.read_bytes())
        if known_identity == identity:
            return str(known_digest)
    except (OSError, ValueError, TypeError):
        pass
    digest = _hash_file(real)
    _remember(entry, [identity, digest])
    return digest


def _hash_file(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=32)
    buffer = bytearray(READ_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(view):
            digest.update(view[:count])
    return digest.hexdigest()


def _remember(entry: Path, value: object) -> None:
    """Write `value` to the file `entry` in one step, so that another process never reads half of it. Errors are
    ignored."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=entry.parent, delete=False) as file:
            json.dump(value, file)
        os.replace(file.name, entry)
    except OSError:
        return
