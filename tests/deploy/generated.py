"""The parts of `deploy/` that are generated: `python -m tests.deploy.generated` writes them.

The settings of the daemon in the chart's `values.schema.json`; the dashboard; the addresses of the alerts' runbooks;
and plain manifests, which the chart makes of its examples.
"""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path
from typing import Any, Literal

import msgspec

from tests.deploy.chart import CHART, EXAMPLES, MANIFESTS, NAMESPACE, ROOT, example, files
from tests.deploy.dashboard import dashboard
from tokenlake.config import ServerConfig
from tokenlake.config.kinds import Size
from tokenlake.config.setting import settings_of
from tokenlake.documentation import page

SCHEMA = CHART / "values.schema.json"
OF_THE_CHART = re.compile(
    "node|memory|cluster|socket|listen|advertise|metrics|control|peers|etcd|etcd_.*|drain_s|certificate|key|ca|"
    "unencrypted_beyond_loopback|disk|state_directory"
)
"""The settings that other values of the chart give."""
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARD = ROOT / "deploy" / "grafana" / "tokenlake.json"
_LIST = {"type": ["string", "array"], "items": {"type": ["string", "integer"]}}


def _schema_of(hint: Any) -> dict[str, Any]:
    """The JSON Schema of the values of a setting."""
    plain, about = hint.__origin__, hint.__metadata__
    meta = next((each for each in about if isinstance(each, msgspec.Meta)), msgspec.Meta())
    bounds = {name: bound for name, bound in (("minimum", meta.ge), ("maximum", meta.le)) if bound is not None}
    if plain is bool:
        return {"type": "boolean"}
    if typing.get_origin(plain) is Literal:
        return {"enum": list(typing.get_args(plain))}
    if plain is float:
        return {"type": "number", **bounds}
    if plain is int:
        is_size = set(typing.get_args(Size)) & set(about)
        return {"$ref": "#/definitions/size"} if is_size else {"type": "integer", **bounds}
    return {"type": "string"} if plain is str else _LIST


def schema() -> str:
    """`values.schema.json` with the settings of the daemon."""
    hints = typing.get_type_hints(ServerConfig, include_extras=True)
    found, secrets = {}, []
    for name, setting in settings_of(ServerConfig).items():
        if setting.secret:
            secrets += [name] if "from the file only" not in setting.meaning else []
        elif not OF_THE_CHART.fullmatch(name):
            found[name] = _schema_of(hints[name])
    text = json.loads(SCHEMA.read_text())
    text["properties"]["settings"]["properties"] = found
    text["properties"]["secretSettings"]["items"]["properties"]["setting"]["enum"] = secrets
    return json.dumps(text, indent=2) + "\n"


def alerts() -> dict[Path, str]:
    """By path, the rules and their tests with the address of the runbook, whose sections they name."""
    files = PROMETHEUS / "rules.yml", PROMETHEUS / "tests.yml"
    address = page("operations/runbook#")
    return {path: re.sub(r'(?<=runbook_url: ").*#', address, path.read_text()) for path in files}


def manifests() -> dict[Path, str]:
    """By path, the manifests of each example, and what Kustomize needs to build on them."""
    made = {}
    for values in sorted(EXAMPLES.glob("*.yaml")):
        place = MANIFESTS / values.stem
        rendered = files(example(values.stem))
        parts = [f"# {name}\n{text.strip()}\n" for name, text in rendered.items()]
        head = f"# Made of the chart with deploy/chart/examples/{values.name}: `python -m tests.deploy.generated`.\n"
        made[place / "tokenlake.yaml"] = head + "---\n".join(parts)
        made[place / "kustomization.yaml"] = (
            "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
            f"namespace: {NAMESPACE}\nresources: [tokenlake.yaml]\n"
        )
    return made


def main() -> None:
    SCHEMA.write_text(schema())
    DASHBOARD.write_text(dashboard())
    for path, text in alerts().items():
        path.write_text(text)
    for path, text in manifests().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
