"""The options by which a command chooses a daemon, and the connection with the daemon's control plane.

::

    no --node         the control socket of the one daemon that this user may operate on this machine
    --node NAME       the control socket of that daemon on this machine
    --node HOST:PORT  mutual TLS with the daemon there (its setting `control`); NAME=HOST:PORT also demands its name

Sockets lie where engines look for theirs (`tokenlake.wire.local_socket`), with `.control` in place of `.sock`, or where
the setting `control_socket` of `--config` or of the environment says.
"""

from __future__ import annotations

import functools
import os
import socket
import ssl
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from cryptography import x509

from tokenlake.config import (
    DEFAULT,
    ENGINE_PREFIX,
    OPERATOR_PREFIX,
    Address,
    Settings,
    load_config,
    parse_address,
)
from tokenlake.errors import (
    ConfigurationError,
    DeadlinePassed,
    ListenerUntrusted,
    ProtocolRefused,
    TokenLakeError,
    Unreachable,
)
from tokenlake.wire.local_socket import PREFIX, sockets_to_try
from tokenlake_server.engines.local_socket import control_of_this_user, is_shared, listens
from tokenlake_server.peers.certificates import certificate_of
from tokenlake_server.peers.identity import node_of
from tokenlake_server.start.config_file import read_foreign_file

if TYPE_CHECKING:
    # Imported where it is called: a list of members needs no gRPC.
    from tokenlake_client.control import Control

SUFFIX = ".control"
ENGINES_SUFFIX = ".sock"
CALL_S = 5.0
"""Limit of the seconds of a call."""
DIAL_S = 3.0
HTTP_2 = "h2"
"""The protocol of gRPC, which client and server agree on in the TLS handshake."""


class Files(NamedTuple):
    """The files (PEM) by which the caller proves a role, and the CA of the daemons."""

    certificate: Path
    key: Path
    ca: Path


@dataclass(frozen=True)
class Target:
    """The options of a command that say which daemon is asked, and with which credentials."""

    node: str | None = None
    file: Path | None = None
    path: str | None = None
    certificates: Files | None = None
    daemon_uid: int | None = None
    token: str | None = None

    @property
    def remote(self) -> Address | None:
        """The address in `node`; None for a daemon of this machine. Raises `ConfigurationError`."""
        if self.node is None or ":" not in self.node:
            return None
        try:
            return parse_address(self.node.rpartition("=")[2])
        except ValueError:
            raise ConfigurationError("node", self.node, "NAME, HOST:PORT or NAME=HOST:PORT") from None

    def connect(self) -> Reached:
        """Connect to the daemon. Raises `TokenLakeError`, whose text is one line for the operator."""
        remote = self.remote
        if remote is not None:
            return self.over_tls(str(remote), (self.node or "").rpartition("=")[0])
        return self._local()

    def over_tls(self, address: str, node: str = "") -> Reached:
        """Connect to the daemon at an address (host:port) with mutual TLS. `node`: its expected name; without one, it
        may be any node of the CA. Raises as `connect`."""
        if self.certificates is None:
            raise Unreachable(
                f"the daemon at {address} asks for a certificate with a role: give --certificate, --key and --ca, or "
                f"set {OPERATOR_PREFIX}CERTIFICATE, {OPERATOR_PREFIX}KEY and {OPERATOR_PREFIX}CA "
                "(`tokenlake ca issue NAME --role admin` makes one)"
            )
        from tokenlake_client.control import Certificates, Control

        name = _prove(parse_address(address), self.certificates, node)
        control = Control.connect(address, name, Certificates(*self.certificates), self.token, call_s=CALL_S)
        return Reached(control, f"{name} at {address}", None)

    def _local(self) -> Reached:
        from tokenlake_client.control import Control

        places = self._places()
        failures: list[tuple[str, Unreachable]] = []
        for place in places:
            try:
                control = Control.local(place, self.token, daemon_uid=self.daemon_uid, call_s=CALL_S)
            except Unreachable as error:
                failures.append((place, error))
                continue
            return Reached(control, place, Path(place))
        raise Unreachable(_why(places, failures))

    def _places(self) -> list[str]:
        """The paths to try. Raises `Unreachable` where several daemons run and none is named."""
        if self.path is not None:
            return [self.path]
        settings = settings_file(self.file, self.node)
        if settings.origin["control_socket"] != DEFAULT:
            return [settings.config.control_socket]
        if settings.origin["socket"] != DEFAULT:
            own = [control_of_this_user(settings.config.node)] if is_shared(settings.config.socket) else []
            return [*own, settings.config.control_socket]
        return _of_node(settings, SUFFIX)

    def engine_sockets(self) -> list[str]:
        """The paths at which the socket of engines may be, for a daemon of this machine. Raises `Unreachable` where
        several daemons run and none is named, `ConfigurationError`."""
        if self.path is not None:
            return [self.path]
        settings = settings_file(self.file, self.node)
        if settings.origin["socket"] != DEFAULT:
            return [settings.config.socket]
        return _of_node(settings, ENGINES_SUFFIX)


@dataclass(frozen=True)
class Reached:
    """The control plane of a daemon. A context manager that closes the connection."""

    control: Control
    place: str
    """For people: the path of the socket, or the name and address."""
    socket: Path | None
    """The control socket, for a daemon of this machine."""

    def __enter__(self) -> Control:
        return self.control

    def __exit__(self, *error: object) -> None:
        self.control.close()


def operates(command: Callable[..., Any], socket_help: str = "Path of the control socket.") -> Callable[..., Any]:
    """Add to a command the options by which it reaches a daemon, as its argument `target`, and `--json` as `as_json`.
    An error of TokenLake is one line, and exit status 1. `socket_help`: the help of `--socket`."""

    @functools.wraps(command)
    def run(
        node: str | None,
        file: Path | None,
        path: str | None,
        certificate: Path | None,
        key: Path | None,
        ca: Path | None,
        daemon_uid: int | None,
        **given: Any,
    ) -> Any:
        files = (certificate, key, ca)
        if any(files) and not all(files):
            raise click.UsageError("--certificate, --key and --ca belong together")
        certificates = Files(certificate, key, ca) if certificate and key and ca else None
        token = os.environ.get(f"{ENGINE_PREFIX}CREDENTIAL") or None
        target = Target(node, file, path, certificates, daemon_uid, token)
        try:
            return command(target=target, **given)
        except TokenLakeError as error:
            raise click.ClickException(one_line(error)) from error

    readable = click.Path(dir_okay=False, path_type=Path)
    options = [
        click.option(
            "--node",
            envvar=f"{OPERATOR_PREFIX}NODE",
            help="Name of a daemon of this machine, or the HOST:PORT of the control plane of another one.",
        ),
        click.option(
            "--config", "file", type=readable, help="TOML file with the settings of the daemon of this machine."
        ),
        click.option("--socket", "path", help=socket_help),
        click.option(
            "--certificate",
            type=readable,
            envvar=f"{OPERATOR_PREFIX}CERTIFICATE",
            help="Your certificate (PEM), with a role.",
        ),
        click.option("--key", type=readable, envvar=f"{OPERATOR_PREFIX}KEY", help="Key (PEM) of your certificate."),
        click.option(
            "--ca", type=readable, envvar=f"{OPERATOR_PREFIX}CA", help="Certificates (PEM) of the CA of the daemons."
        ),
        click.option(
            "--daemon-uid",
            type=int,
            envvar=f"{ENGINE_PREFIX}DAEMON_UID",
            help="User id of the daemon, where the daemon runs as neither root nor your own user.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    ]
    wrapped: Callable[..., Any] = run
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped


def settings_file(file: Path | None, node: str | None = None) -> Settings:
    """The settings of the daemon of this machine, from its file and the environment. Raises `ConfigurationError`."""
    text = read_foreign_file(file) if file is not None else None
    environ = dict(os.environ)
    return load_config(toml_text=text, environ=environ, flags={"node": node}, uid=os.geteuid(), file=str(file))


def one_line(error: TokenLakeError) -> str:
    """The text of an error for an operator: one line."""
    text = " ".join(str(error).split())
    if "Failed parsing HTTP/2" in text:
        place = text.partition(": ")[0]
        if place.endswith(ENGINES_SUFFIX):
            control = place.removesuffix(ENGINES_SUFFIX) + SUFFIX
            return f"{place} is the socket of engines; this command takes the control socket, by default {control}"
        return f"{place} is not the control socket of a daemon"
    if isinstance(error, DeadlinePassed):
        text += f": the daemon did not answer within {CALL_S:g} s; it is stopped, or its machine is overloaded"
    elif isinstance(error, ProtocolRefused) and "Method not found" in text:
        text += (
            f": the daemon is of another version, which does not have this call; this command is of version "
            f"{version('tokenlake')}"
        )
    return text


# -- sockets of this machine


def _of_node(settings: Settings, suffix: str) -> list[str]:
    """The default paths of a socket of the node in the settings; where no node is named, the socket of the only daemon
    that runs here. Raises `Unreachable` where several daemons run."""
    paths = sockets_to_try(os.environ, settings.config.node, os.geteuid())
    found = [each.removesuffix(ENGINES_SUFFIX) + suffix for each in paths]
    if settings.origin["node"] != DEFAULT:
        return found
    listening = [each for each in _beside(found, suffix) if listens(each)]
    if len(listening) > 1:
        names = ", ".join(PurePosixPath(each).stem.removeprefix(PREFIX) for each in listening)
        raise Unreachable(f"several daemons run here: name one with --node ({names})")
    return listening or found


def _beside(places: Sequence[str], suffix: str = SUFFIX) -> list[str]:
    """The sockets of daemons with default paths in the directories of `places`: with this suffix, those of the control
    plane or of engines."""
    found = []
    for directory in dict.fromkeys(str(PurePosixPath(place).parent) for place in places):
        try:
            names = sorted(os.listdir(directory))
        except OSError:
            continue
        found += [f"{directory}/{name}" for name in names if name.startswith(PREFIX) and name.endswith(suffix)]
    return found


def _why(places: Sequence[str], failures: Sequence[tuple[str, Unreachable]]) -> str:
    """Why no socket could be used, in one line. A socket that is there tells more than one that is not."""
    for place, error in failures:
        if isinstance(error, ListenerUntrusted):
            return str(error)
        try:
            found = os.lstat(place)
        except OSError:
            continue
        if isinstance(error.__cause__, PermissionError) and found.st_uid != os.geteuid():
            return (
                f"{place} belongs to uid {found.st_uid}, and only that user and root may operate its daemon: run the "
                "command as that user, or give --node HOST:PORT with a certificate"
            )
        if not stat.S_ISSOCK(found.st_mode):
            return f"{place} is no socket"
        if isinstance(error.__cause__, ConnectionRefusedError):
            return f"no daemon listens at {place}: the one that made it has ended; start one with `tokenlake serve`"
        return str(error)
    others = [PurePosixPath(each).stem.removeprefix(PREFIX) for each in _beside(places)]
    text = f"no daemon with a control plane at {' or '.join(places)}"
    if others:
        return f"{text}; there are daemons here with --node {' or --node '.join(others)}"
    return (
        f"{text}; start one with `tokenlake serve`, name its file with --config, or give --node HOST:PORT (its setting "
        "'control') with a certificate"
    )


# -- daemons of other machines


def _prove(address: Address, files: Files, node: str) -> str:
    """Make one TLS connection to the daemon, which names the reason of a refusal, as gRPC does not. Returns the name of
    the node in its certificate. Raises `Unreachable`, `ConfigurationError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.set_alpn_protocols([HTTP_2])
    try:
        context.load_verify_locations(files.ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError("--ca", str(files.ca), f"a file with certificates in PEM ({_reason(error)})") from None
    try:
        context.load_cert_chain(files.certificate, files.key, "")
    except (OSError, ssl.SSLError) as error:
        expected = f"a certificate in PEM and its unencrypted key, {files.key} ({_reason(error)})"
        raise ConfigurationError("--certificate", str(files.certificate), expected) from None
    try:
        with (
            socket.create_connection((address.host, address.port), DIAL_S) as sock,
            context.wrap_socket(sock) as tls,
        ):
            certificate = tls.getpeercert(binary_form=True)
            if tls.selected_alpn_protocol() != HTTP_2:
                # The port of a daemon for its peers speaks TLS too.
                raise Unreachable(_no_control_plane(address))
            # A daemon that refuses this certificate says so behind its own handshake, or just ends the connection.
            tls.settimeout(DIAL_S)
            try:
                greeting = tls.recv(1)
            except ConnectionError:
                greeting = b""
            if not greeting:
                raise Unreachable(f"the daemon at {address} refuses this certificate (--certificate)")
    except ssl.SSLError as error:
        raise Unreachable(_refusal(error, address)) from error
    except OSError as error:
        what = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise Unreachable(
            f"no connection with {address}: {what}; is this the setting 'control' of a daemon that runs?"
        ) from error
    name = node_of(certificate_of(x509.load_der_x509_certificate(certificate or b"")).uri)
    if not name or (node and name != node):
        expected = f"of node '{node}'" if node else "of a node"
        has = f"that of node '{name}'" if name else "another one"
        raise Unreachable(f"the certificate at {address} is not one {expected}, but {has}")
    return name


def _no_control_plane(address: Address) -> str:
    return (
        f"{address} is not the control plane of a daemon: --node takes the address in its setting 'control' (often "
        "port 7442)"
    )


def _refusal(error: ssl.SSLError, address: Address) -> str:
    """Why the TLS handshake with an address failed."""
    failed = f"no connection with {address}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{failed}: its certificate is refused by this side: {error.verify_message} (--ca)"
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if "wrong version" in reason or "record layer" in reason:
        return _no_control_plane(address)  # it does not speak TLS
    if "alert" in reason:
        return f"{failed}: the daemon refuses this certificate: {reason} (--certificate)"
    return f"{failed}: {reason}"


def _reason(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or str(error)
