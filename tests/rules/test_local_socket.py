"""Where a daemon listens and a client looks, and which places and processes a client trusts."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

import pytest

from tokenlake.errors import ListenerUntrusted, Unreachable
from tokenlake.wire.local_socket import (
    SYSTEM_DIRECTORY,
    check_listener,
    check_place,
    default_socket,
    directory_mode,
    first_reachable,
    no_daemon,
    sockets_to_try,
    trusted_users,
)

ME, OTHER, SERVICE = 1000, 1001, 997
RUNTIME = {"XDG_RUNTIME_DIR": "/run/user/1000"}
SERVED = {"RUNTIME_DIRECTORY": "/run/other:/run/tokenlake"}


class Files:
    """A tree of files: (type and mode, owner) by path; a link's target beside it."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[int, int]] = {}
        self.links: dict[str, str] = {}
        for directory in ("/", "/run", "/home", "/run/user"):
            self.directory(directory, 0)
        self.directory("/tmp", 0, 0o1777)
        self.directory("/home/me", ME)
        self.directory("/run/user/1000", ME, 0o700)

    def directory(self, path: str, uid: int, mode: int = 0o755) -> None:
        self.files[path] = stat.S_IFDIR | mode, uid

    def socket(self, path: str, uid: int) -> str:
        self.files[path] = stat.S_IFSOCK | 0o660, uid
        return path

    def link(self, path: str, uid: int, target: str) -> None:
        self.files[path] = stat.S_IFLNK | 0o777, uid
        self.links[path] = target

    def look(self, path: str) -> os.stat_result:
        if path not in self.files:
            raise FileNotFoundError(path)
        mode, uid = self.files[path]
        return os.stat_result((mode, 0, 0, 1, uid, 0, 0, 0, 0, 0))

    def check(self, path: str, given: int | None = None, shared: str = "") -> None:
        check_place(path, trusted_users(path, ME, given, self.look), self.look, self.links.__getitem__, shared)


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.mark.parametrize("node", ["local", "a"])
@pytest.mark.parametrize("theirs", [{}, SERVED, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": "here"}])
@pytest.mark.parametrize(
    ("daemon", "served", "client"), [(ME, {}, ME), (0, {}, 0), (0, {}, ME), (SERVICE, SERVED, ME), (SERVICE, SERVED, 0)]
)
def test_a_client_looks_where_a_daemon_listens(
    node: str, theirs: dict[str, str], daemon: int, served: dict[str, str], client: int
) -> None:
    listens = default_socket(served, node, daemon)
    assert listens.startswith((f"{SYSTEM_DIRECTORY}/", f"/tmp/tokenlake-{ME}/"))
    for environ in (theirs, theirs | RUNTIME):
        assert listens in sockets_to_try(environ, node, client)


def test_a_user_with_a_runtime_directory_has_the_socket_there() -> None:
    listens = default_socket(RUNTIME, "local", ME)
    assert listens == "/run/user/1000/tokenlake-local.sock" == sockets_to_try(RUNTIME, "local", ME)[0]
    assert default_socket(RUNTIME, "local", 0) == "/run/tokenlake/tokenlake-local.sock", (
        "other users must be able to enter it"
    )


def test_no_default_is_writable_for_every_user() -> None:
    for uid in (0, ME):
        for environ in ({}, RUNTIME, SERVED):
            for place in sockets_to_try(environ, "local", uid):
                assert os.path.dirname(place) not in ("/tmp", "/var/tmp", "/run")


def test_only_the_directories_of_defaults_are_made() -> None:
    assert directory_mode(SYSTEM_DIRECTORY, 0) == 0o755
    assert directory_mode(f"/tmp/tokenlake-{ME}", ME) == 0o700
    for directory in ("/tmp", f"/tmp/tokenlake-{OTHER}", "/run/user/1000", "/srv/tokenlake"):
        assert directory_mode(directory, ME) is None


def places(files: Files) -> Iterator[tuple[str, str]]:
    """(path, what its refusal must name; empty: it is in order)."""
    yield files.socket("/run/user/1000/s", ME), ""
    yield files.socket("/run/user/1000/roots", 0), ""
    yield files.socket("/run/user/1000/others", OTHER), "/run/user/1000/others belongs to uid 1001"
    files.directory("/home/other", OTHER)
    yield files.socket("/home/other/s", ME), "/home/other belongs to uid 1001"
    yield files.socket("/tmp/mine", ME), ""
    yield files.socket("/tmp/theirs", OTHER), "/tmp/theirs belongs to uid 1001"
    files.directory("/tmp/tokenlake-1000", OTHER, 0o777)
    yield files.socket("/tmp/tokenlake-1000/s", ME), "/tmp/tokenlake-1000 belongs to uid 1001"
    for mode in (0o777, 0o775, 0o757, 0o722):
        files.directory(f"/home/me/{mode:o}", ME, mode)
        files.directory(f"/home/me/{mode:o}/in", ME, 0o700)
        yield files.socket(f"/home/me/{mode:o}/in/s", ME), rf"chmod go-w /home/me/{mode:o}\)"
    files.link("/home/me/link", ME, "../../run/user/1000")
    yield "/home/me/link/s", ""
    yield "/home/me/link/others", "/run/user/1000/others belongs"
    files.link("/tmp/link", OTHER, "/run/user/1000")
    yield "/tmp/link/s", "/tmp/link belongs to uid 1001"
    files.link("/home/me/away", ME, "/home/other/s")
    yield "/home/me/away", "/home/other belongs"
    files.link("/home/me/round", ME, "round")
    yield "/home/me/round", "more than 40 symbolic links"
    yield "/home/me/../../tmp/./theirs", "/tmp/theirs belongs"


def test_a_place_that_another_user_can_change(files: Files) -> None:
    """A place that another user can change is refused and named."""
    seen = 0
    for path, refusal in places(files):
        seen += 1
        if refusal:
            with pytest.raises(ListenerUntrusted, match=refusal):
                files.check(path)
        else:
            files.check(path)
    assert seen > 15


def test_a_missing_path_raises_file_not_found(files: Files) -> None:
    with pytest.raises(FileNotFoundError):
        files.check("/run/tokenlake/tokenlake-local.sock")


def test_the_owner_of_the_systems_directory_may_listen_in_it(files: Files) -> None:
    files.directory(SYSTEM_DIRECTORY, SERVICE)
    path = files.socket(f"{SYSTEM_DIRECTORY}/tokenlake-local.sock", SERVICE)
    files.check(path)
    assert trusted_users(path, ME, None, files.look) == {0, ME, SERVICE}
    deeper = f"{SYSTEM_DIRECTORY}/x/s"
    assert trusted_users(deeper, ME, None, files.look) == {0, ME}
    files.directory("/run", 0, 0o777)
    assert trusted_users(path, ME, None, files.look) == {0, ME}, "every user could have made the directory"
    files.directory("/run", 0)
    files.link(SYSTEM_DIRECTORY, SERVICE, "/home/me")
    assert trusted_users(path, ME, None, files.look) == {0, ME}


def test_the_configured_user_is_trusted(files: Files) -> None:
    files.directory("/srv", 0)
    files.directory("/srv/lake", SERVICE)
    path = files.socket("/srv/lake/s", SERVICE)
    with pytest.raises(ListenerUntrusted, match="daemon_uid = 997"):
        files.check(path)
    files.check(path, given=SERVICE)


def test_a_process_of_another_user_is_refused() -> None:
    check_listener("/s", ME, frozenset({0, ME}))
    with pytest.raises(ListenerUntrusted, match=r"process of uid 1001 listens at /s, not one of uid 0, 1000; nothing"):
        check_listener("/s", OTHER, frozenset({0, ME}))


def test_the_first_that_answers_is_taken() -> None:
    def attempt(path: str) -> str:
        if path == "gone":
            raise Unreachable("gone") from FileNotFoundError()
        if path == "silent":
            raise Unreachable("silent") from ConnectionRefusedError()
        if path == "forged":
            raise ListenerUntrusted("forged")
        return path

    def first(*paths: str) -> str:
        return first_reachable(paths, attempt, lambda directory: ())

    assert first("gone", "silent", "forged", "good", "other") == "good"
    with pytest.raises(ListenerUntrusted, match="forged"):
        first("gone", "silent", "forged")
    with pytest.raises(Unreachable, match="silent"):
        first("gone", "silent")
    with pytest.raises(Unreachable, match="^gone$"):
        first("gone")
    with pytest.raises(Unreachable, match="at gone or gone; start one"):
        first("gone", "gone")


def test_the_error_names_the_sockets_beside() -> None:
    """A client that looked for node `local` learned nothing of the daemon of node `a` in the same directory."""
    directories = {"/own": ["tokenlake-b.sock", "notes", "tokenlake-a.sock", "other.sock"], "/run/tokenlake": []}

    def names(directory: str) -> list[str]:
        if directory not in directories:
            raise FileNotFoundError(directory)
        return directories[directory]

    tried = ["/own/tokenlake-local.sock", "/absent/tokenlake-local.sock", "/run/tokenlake/tokenlake-local.sock"]
    text = no_daemon(tried, names)
    assert text.startswith(f"no daemon listens at {' or '.join(tried)}; ")
    assert "sockets here: /own/tokenlake-a.sock, /own/tokenlake-b.sock; connect to one of these" in text
    assert no_daemon(tried[1:], names).endswith("; start one with `tokenlake serve`")
    assert no_daemon(["/own/tokenlake-a.sock"], names, "refused").startswith(
        "no daemon listens at /own/tokenlake-a.sock (refused); sockets here: /own/tokenlake-b.sock; "
    ), "a socket that does not answer is not named as another"
    directories["/own"] = [f"tokenlake-{number:02}.sock" for number in range(20)]
    assert "/own/tokenlake-07.sock, ...; connect" in no_daemon(tried, names)


def test_a_socket_in_a_volume_that_a_pod_shares(files: Files) -> None:
    """Its directory belongs to root and all can write it. The directories above, and the owner of the socket, are
    checked as elsewhere."""
    files.directory("/pod", 0, 0o2777)
    files.directory("/theirs", OTHER, 0o777)
    files.directory("/pod/in", 0)
    path = files.socket("/pod/s", ME)
    with pytest.raises(ListenerUntrusted, match="chmod go-w /pod"):
        files.check(path)
    files.check(path, shared="/pod")
    with pytest.raises(ListenerUntrusted, match="/pod/others belongs to uid 1001"):
        files.check(files.socket("/pod/others", OTHER), shared="/pod")
    with pytest.raises(ListenerUntrusted, match="/theirs belongs to uid 1001"):
        files.check(files.socket("/theirs/s", ME), shared="/theirs")
    with pytest.raises(ListenerUntrusted, match="chmod go-w /pod"):
        files.check(files.socket("/pod/in/s", ME), shared="/pod/in")
