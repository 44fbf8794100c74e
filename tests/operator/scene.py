"""Commands of an operator in this process, and the settings of a node that is as it should be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner, Result

from tokenlake_operator.doctor.command import doctor, examine
from tokenlake_operator.doctor.machine import Machine
from tokenlake_operator.reaching import Target
from tokenlake_testing.cluster import Node
from tokenlake_testing.ports import reserve_port


def run(command: click.Command, *arguments: object, env: dict[str, str] | None = None) -> Result:
    """A command with these arguments, without settings of the environment but `env`. No traceback may come out."""
    environ: dict[str, str | None] = dict.fromkeys(name for name in os.environ if name.startswith("TOKENLAKE_"))
    result = CliRunner().invoke(command, list(map(str, arguments)), env=environ | (env or {}))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def told(command: click.Command, *arguments: object, env: dict[str, str] | None = None) -> Any:
    """The JSON that a command prints with `--json`; its exit status says whether an error is among its findings."""
    result = run(command, *arguments, "--json", env=env)
    assert result.stdout, result.stderr
    answer = json.loads(result.stdout)
    findings = answer.get("findings", ()) if isinstance(answer, dict) else ()
    assert result.exit_code == (1 if any(each["severity"] == "error" for each in findings) else 0), result.stderr
    return answer


def control_of(node: Node) -> Path:
    """The control socket of a daemon."""
    return node.socket.with_suffix(".control")


def checks(report: dict[str, Any]) -> list[str]:
    """The names of the checks that found something."""
    return [each["check"] for each in report["findings"]]


def examined(node: Node, *arguments: object, env: dict[str, str] | None = None) -> dict[str, Any]:
    """The report of `tokenlake doctor` about a daemon of this machine; its exit status says whether it found
    something."""
    result = run(doctor, "--socket", control_of(node), *arguments, "--json", env=env)
    report: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (1 if report["findings"] else 0), result.stderr
    return report


class GivenNode:
    """The settings of a node that does not run. A test changes some, and `examine` is the doctor's report."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.chmod(0o700)
        self.file = directory / "n1.toml"
        self.mode = 0o600
        self.more = ""
        """Further lines of the file."""
        self.machine: Machine | None = None
        self.settings: dict[str, object] = {
            "node": "n1",
            "memory": "16MiB",
            "region_size": "1MiB",
            "socket": str(directory / "n1.sock"),
            "listen": f"127.0.0.1:{reserve_port()}",
            "metrics": f"127.0.0.1:{reserve_port()}",
        }

    def write(self) -> Path:
        """Write the file of the settings, and return its path."""
        lines = [f"{name} = {json.dumps(value)}" for name, value in self.settings.items()]
        self.file.write_text("\n".join([*lines, self.more, ""]))
        self.file.chmod(self.mode)
        return self.file

    def examine(self) -> dict[str, Any]:
        """The doctor's report."""
        return examine(Target(file=self.write()), self.machine)
