"""The parts of the documentation that are generated from the code: `python -m tests.house.pages` writes them.

Each part is between two comments of its page, `<!-- begin NAME ... -->` and `<!-- end NAME -->`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from click.testing import CliRunner

import tokenlake_server.control.server
import tokenlake_server.kv_events
import tokenlake_server.nixl.transport
import tokenlake_server.start.daemon
import tokenlake_server.tracing  # noqa: F401
from tokenlake.config import ServerConfig
from tokenlake.config.setting import table_of
from tokenlake.memory.region import RegionShape
from tokenlake.metrics import Metric
from tokenlake_client.engines.common import page_counts
from tokenlake_client.engines.common.page_settings import PageSettings
from tokenlake_client.engines.lmcache import metrics as lmcache_metrics
from tokenlake_client.engines.lmcache.settings import AdapterSettings
from tokenlake_client.engines.sglang import metrics as sglang_metrics
from tokenlake_client.engines.vllm.counters import COUNTS, PREFIX, TIMES
from tokenlake_client.engines.vllm.settings import EngineSettings
from tokenlake_client.routers.settings import RouterSettings
from tokenlake_server.page import document
from tokenlake_server.start import models
from tokenlake_server.start.config_command import config

ROOT = Path(__file__).parents[2]


class Part(NamedTuple):
    """`text` returns the text between the comments, including its last newline."""

    page: str
    name: str
    text: Callable[[], str]
    module: str = "tests.house.pages"
    """The module that writes it."""


def metrics() -> str:
    """All metrics of a daemon as a table in Markdown."""
    rows = ["| metric | labels | meaning |", "|---|---|---|"]
    for kind in ("counter", "histogram", "gauge"):
        for metric in sorted(Metric.all(kind), key=lambda metric: metric.name):
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            rows.append(f"| `{metric.name}`{', a histogram' * (kind == 'histogram')} | {labels} | {metric.help} |")
    return "\n".join(rows) + "\n"


def services() -> str:
    """All services of the control plane and their methods as a table in Markdown."""
    from tokenlake_proto.v1 import admin_pb2, events_pb2, role_pb2, scheduling_pb2

    rows = ["| method | takes -> gives | role | meaning |", "|---|---|---|---|"]
    for module in (scheduling_pb2, admin_pb2, events_pb2):
        text = (ROOT / "proto" / module.DESCRIPTOR.name).read_text()
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                comment = re.search(rf"((?: *//.*\n)+) *rpc {method.name}\(", text)
                assert comment is not None, f"{method.name} has no comment"
                meaning = " ".join(line.strip(" /") for line in comment[1].splitlines())
                role = role_pb2.Role.Name(method.GetOptions().Extensions[role_pb2.role])
                gives = f"{'stream of ' if method.server_streaming else ''}`{method.output_type.name}`"
                rows.append(
                    f"| `{service.full_name}/{method.name}` | `{method.input_type.name}` -> {gives} | "
                    f"{role.removeprefix('ROLE_').lower()} | {meaning} |"
                )
    return "\n".join(rows) + "\n"


def connector_counts() -> str:
    """The counts and times of vLLM's connector as a table in Markdown."""
    rows = ["| count | on vLLM's metrics page | meaning |", "|---|---|---|"]
    for name, count in COUNTS.items():
        rows.append(f"| `{name}` | `{count.series(PREFIX)}` | {count.meaning} |")
    rows += [f"| | `{PREFIX}{name}`, a histogram | {meaning} |" for name, meaning in TIMES.items()]
    return "\n".join(rows) + "\n"


def storage_counts() -> str:
    """The counts of SGLang's storage backend as a table in Markdown."""
    rows = ["| count | on SGLang's metrics page | meaning |", "|---|---|---|"]
    for name, count in page_counts.COUNTS.items():
        rows.append(f"| `{name}` | `{count.series(sglang_metrics.PREFIX)}` | {count.meaning} |")
    return "\n".join(rows) + "\n"


def adapter_counts() -> str:
    """The counts of LMCache's L2 adapter as a table in Markdown."""
    rows = ["| count | on LMCache's metrics page | meaning |", "|---|---|---|"]
    for name, count in page_counts.COUNTS.items():
        rows.append(f"| `{name}` | `{count.series(lmcache_metrics.PREFIX)}` | {count.meaning} |")
    return "\n".join(rows) + "\n"


def smallest_door() -> str:
    """The example of an integration, from its layout on, as a block of a page."""
    text = (ROOT / "docs" / "examples" / "door.py").read_text()
    return f"```python\n{text[text.index('LAYOUT = ') :]}```\n"


def sizes_of_models() -> str:
    """What `tokenlake config models` prints with the default memory, as a block of a page."""
    printed = CliRunner().invoke(config, ["models", "--memory", str(ServerConfig().memory)], catch_exceptions=False)
    return f"```\n{printed.output}```\n"


SIZED = (
    *("Llama-3.1-8B", "Llama-3.1-8B fp8", "Qwen3-32B", "Llama-3-70B", "Qwen3-235B-A22B", "gpt-oss-120b"),
    *("GLM-4.5-Air", "DeepSeek-V3"),
)
"""The models of the tables for sizing."""


def nodes_by_model() -> str:
    """For each model, what a conversation takes and how many nodes hold 10,000 of them, as a table in Markdown."""
    rows = [
        "| model | MiB per 1,000 tokens | tokens in 64 GiB | in 512 GiB | MiB of a conversation of 8,000 tokens | "
        "conversations in 512 GiB | nodes of 512 GiB for 10,000 |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in models.MODELS:
        if model.name in SIZED:
            layout = model.layout()
            slots, few = (RegionShape(gib * models.GIB, layout.segment_bytes).slots for gib in (512, 64))
            mib, each = layout.segment_bytes / models.MIB, -(-8000 // layout.segment_tokens) + model.prompt_segments
            held = slots // each
            rows.append(
                f"| {model.name} | {1000 / layout.segment_tokens * mib:,.0f} | {few * layout.segment_tokens:,} | "
                f"{slots * layout.segment_tokens:,} | {each * mib:,.0f} | {held:,} | {-(-10_000 // held)} |"
            )
    return "\n".join(rows) + "\n"


def scrape_configuration() -> str:
    """The example of a configuration of Prometheus, without its comments, as a block of a page."""
    lines = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text().splitlines(keepends=True)
    return f"```yaml\n{''.join(line for line in lines if not line.lstrip().startswith('#'))}```\n"


def packages() -> str:
    """Every package of the product, with the first paragraph of its docstring, as a table in Markdown."""
    rows = ["| package | what it is |", "|---|---|"]
    for top in ("tokenlake", "server", "client", "query", "bench"):
        for face in sorted((ROOT / top).rglob("__init__.py")):
            text = (ast.get_docstring(ast.parse(face.read_text())) or "").partition("\n\n")[0]
            name = ".".join(face.parent.relative_to(ROOT if top == "tokenlake" else ROOT / top).parts)
            rows.append(f"| `{name}` | {' '.join(text.split())} |")
    return "\n".join(rows) + "\n"


def page_fields() -> str:
    """The fields of `page.json` as a table in Markdown: one row for each field of each object."""
    rows = ["| object | field | type | meaning |", "|---|---|---|---|"]
    *parts, whole = document.PageStruct.__subclasses__()
    for each in (whole, *parts):
        rows.append(f"| **{each.__name__.removeprefix('Page')}** | | | {each.__doc__} |")
        for field in msgspec.structs.fields(each):
            kind = msgspec.json.schema_components([field.type], ref_template="{name}")[0][0]
            rows.append(f"| | `{field.name}` | {_kind(kind)} | {kind.get('description', '')} |")
    return "\n".join(rows) + "\n"


def _kind(schema: dict[str, Any]) -> str:
    """The type in a JSON schema, in words."""
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix("Page")
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema["type"] == "array":
        return f"list of {_kind(schema['items'])}"
    if "additionalProperties" in schema:
        return f"object: name to {_kind(schema['additionalProperties'])}"
    return str(schema["type"])


def decisions() -> str:
    """The decisions by number, with the first lines of their pages."""
    rows = ["| number | decision |", "|---|---|"]
    for page in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        rows.append(f"| {page.name[:3]} | [{page.read_text().partition(chr(10))[0].removeprefix('# ')}]({page.name}) |")
    return "\n".join(rows) + "\n"


PARTS = (
    Part("docs/decisions/README.md", "decisions", decisions),
    Part("docs/structure.md", "packages", packages),
    Part("docs/operations/sizing.md", "sizes of models", sizes_of_models),
    Part("docs/operations/sizing.md", "nodes by model", nodes_by_model),
    Part("docs/operations/grafana.md", "configuration of Prometheus", scrape_configuration),
    Part("docs/reference.md", "settings of a daemon", lambda: table_of(ServerConfig)),
    Part("docs/reference.md", "metrics of a daemon", metrics),
    Part("docs/reference.md", "methods of the control plane", services),
    Part("docs/integrate.md", "the smallest door", smallest_door),
    Part("docs/litellm.md", "settings of a router's plug-in", lambda: table_of(RouterSettings)),
    Part("docs/lmcache.md", "settings of the adapter", lambda: table_of(AdapterSettings)),
    Part("docs/lmcache.md", "counts of the adapter", adapter_counts),
    Part("docs/page.md", "fields of page.json", page_fields),
    Part("docs/sglang.md", "settings of the storage backend", lambda: table_of(PageSettings)),
    Part("docs/sglang.md", "counts of the storage backend", storage_counts),
    Part("docs/vllm.md", "settings of the connector", lambda: table_of(EngineSettings)),
    Part("docs/vllm.md", "counts of the connector", connector_counts),
)


def renewed(part: Part, page: str) -> str:
    """The text of the page with the part replaced. Raises ValueError where the page lacks the comments."""
    begin = f"<!-- begin {part.name}; `python -m {part.module}` writes this table -->\n"
    end = f"<!-- end {part.name} -->\n"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise ValueError(f"{part.page} must hold once:\n{begin}{end}")
    return pattern.sub(lambda _: begin + part.text() + end, page)


def write(parts: Iterable[Part]) -> None:
    """Write every part that differs."""
    for part in parts:
        path = ROOT / part.page
        page = path.read_text()
        fresh = renewed(part, page)
        if fresh != page:
            path.write_text(fresh)
            print(f"{part.page}: {part.name}")


if __name__ == "__main__":
    write(PARTS)
