"""Shows the study of eviction policies as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tokenlake_bench.eviction.results import Cell, StudyResult


def show(console: Console, result: StudyResult) -> None:
    """Print the hit rates of each trace, then the processor time of every policy."""
    for trace in dict.fromkeys(ceiling.trace for ceiling in result.ceilings):
        for nodes in dict.fromkeys(cell.nodes for cell in result.cells):
            console.print(_rates(result, trace, nodes))
    console.print(_means(result))


def _rates(result: StudyResult, trace: str, nodes: int) -> Table:
    known = {
        (cell.capacity_tokens, cell.policy): cell for cell in result.cells if (cell.trace, cell.nodes) == (trace, nodes)
    }
    ceilings = [ceiling for ceiling in result.ceilings if ceiling.trace == trace]
    title = f"{trace.split('.')[0]}, {_nodes(nodes)}{_hint(result)}: token hit %, share of clairvoyant"
    table = Table(title=title, title_justify="left")
    table.add_column("policy")
    for ceiling in ceilings:
        table.add_column(f"{ceiling.capacity_tokens:,}", justify="right")
    for policy in dict.fromkeys(policy for _, policy in known):
        mine = [known.get((ceiling.capacity_tokens, policy)) for ceiling in ceilings]
        table.add_row(policy, *("" if cell is None else _rate(cell) for cell in mine))
    table.add_row("clairvoyant", *(f"{ceiling.clairvoyant:.1%}     " for ceiling in ceilings))
    table.add_row("infinite", *(f"{ceiling.infinite:.1%}     " for ceiling in ceilings))
    return table


def _rate(cell: Cell) -> str:
    share = "    " if cell.of_clairvoyant is None else f"{cell.of_clairvoyant:.2f}"
    return f"{cell.hit_rate:.1%} {share}"


def _means(result: StudyResult) -> Table:
    table = Table(title="over all traces and capacities", title_justify="left")
    titles = ("nodes", "mean / bound", "least / LRU", "least / 1 node", "orphans", "policy us", "policy / LRU")
    table.add_column("policy")
    for title in titles:
        table.add_column(title, justify="right")
    for mean in result.means:
        mine = [cell for cell in result.cells if (cell.policy, cell.nodes) == (mean.policy, mean.nodes)]
        kept = [cell.of_one_node for cell in mine if cell.of_one_node is not None]
        times = [cell.policy_of_lru for cell in mine if cell.policy_of_lru is not None]
        table.add_row(
            mean.policy,
            str(mean.nodes),
            f"{mean.of_clairvoyant:.3f}",
            "" if mean.worst_of_lru is None else f"{mean.worst_of_lru:.2f}",
            f"{min(kept):.3f}" if kept else "",
            f"{max(cell.orphan_share for cell in mine):.1%}",
            f"{max(cell.policy_us for cell in mine):.1f}",
            f"{max(times):.2f}" if times else "",
        )
    return table


def _nodes(nodes: int) -> str:
    return "one cache" if nodes == 1 else f"{nodes} nodes"


def _hint(result: StudyResult) -> str:
    return "" if result.hint_accuracy is None else f", hints {result.hint_accuracy:.0%} right"
