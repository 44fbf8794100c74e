"""The workload generators by name, and the construction of a trace from settings given as text or numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from tokenlake.errors import ConfigurationError
from tokenlake_bench.trace_lines import explain
from tokenlake_bench.workloads.agent import AgentSettings, agent_sessions
from tokenlake_bench.workloads.arrivals import bursts, poisson
from tokenlake_bench.workloads.base import Draw, TraceLine, TraceSettings
from tokenlake_bench.workloads.conversation import ConversationSettings, conversations
from tokenlake_bench.workloads.rag import RagSettings, questions
from tokenlake_bench.workloads.toolagent import ToolAgentSettings, tool_calls
from tokenlake_bench.workloads.uniform import UniformSettings, uniform_prompts


@dataclass(frozen=True, slots=True)
class Generator:
    """A workload generator. `lines` makes the lines of a trace from settings of the type `settings`, a source of draws
    (`Draw`), and the times at which sessions begin."""

    name: str
    summary: str
    settings: type[TraceSettings]
    lines: Callable[[Any, Draw, Iterator[float]], list[TraceLine]]


GENERATORS: Final[dict[str, Generator]] = {
    generator.name: generator
    for generator in (
        Generator("conversation", "Long conversations with little in common.", ConversationSettings, conversations),
        Generator("agent", "A coding agent's long sessions.", AgentSettings, agent_sessions),
        Generator("toolagent", "Hot prompt templates beside conversations.", ToolAgentSettings, tool_calls),
        Generator("rag", "Questions behind retrieved documents.", RagSettings, questions),
        Generator("uniform", "Equally popular prefixes, equal lengths.", UniformSettings, uniform_prompts),
    )
}


def generator_named(name: str) -> Generator:
    """The workload generator of this name. Raises ConfigurationError for a name that is not in `GENERATORS`."""
    if name not in GENERATORS:
        raise ConfigurationError("workload", name, " or ".join(GENERATORS))
    return GENERATORS[name]


def settings_of(generator: Generator, values: Mapping[str, object]) -> TraceSettings:
    """The settings of a generator, validated; text is converted to numbers. Raises a ConfigurationError that names the
    field."""
    try:
        return msgspec.convert(dict(values), generator.settings, strict=False)
    except msgspec.ValidationError as error:
        problem, field = explain(str(error), {})
        expected = problem.removeprefix("expected ")
        if field is None:
            unknown = [name for name in values if name not in generator.settings.__struct_fields__]
            if unknown:
                raise ConfigurationError(unknown[0], values[unknown[0]], _known(generator)) from None
            # Conditions over two fields are checked by the settings themselves, with the message `field: expected`.
            field, _, expected = expected.partition(": ")
        raise ConfigurationError(field, values.get(field), expected) from None


def generate(
    name: str, values: Mapping[str, object] | None = None, *, shape: Sequence[float] | None = None
) -> list[TraceLine]:
    """The lines of a generated trace in order of time. `values`: settings that differ from the defaults. `shape`:
    arrival times whose bursts the starts of sessions imitate (`arrivals.bursts`); None: a Poisson process. Raises
    ConfigurationError."""
    generator = generator_named(name)
    settings = settings_of(generator, values or {})
    rate = settings.rate / settings.turns_mean
    starts = poisson(rate, settings.seed) if shape is None else bursts(shape, rate, settings.seed)
    return generator.lines(settings, Draw(settings.seed), starts)


def _known(generator: Generator) -> str:
    return "one of " + ", ".join(generator.settings.__struct_fields__)
