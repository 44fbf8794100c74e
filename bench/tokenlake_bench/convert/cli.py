"""The command line of `tokenlake workload convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from tokenlake.errors import TokenLakeError
from tokenlake_bench.convert.command import FORMATS, ConvertArguments, run_convert

_PATH: Final = click.Path(dir_okay=False, allow_dash=True, path_type=Path)
_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)
_DIRECTORY: Final = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(short_help="Make a trace of a log of your own traffic, without its text.")
@click.argument("logs", nargs=-1, required=True, type=_PATH)
@click.option("--from", "source", type=click.Choice(FORMATS), required=True, help="The format of the logs.")
@click.option("--out", type=_PATH, required=True, help="The trace: .jsonl, .jsonl.gz, .jsonl.zst, or -.")
@click.option("--tokenizer", type=_DIRECTORY, help="Directory of the model's tokenizer. [openai, sharegpt]")
@click.option("--chat-template", type=_FILE, help="A chat template in place of the tokenizer's.")
@click.option("--block-tokens", type=int, help="Tokens of a block. [default: the log's; 64 where it has none]")
@click.option(
    "--log-block-tokens", type=int, help="Tokens of the log's own blocks. [default: bailian 16, mooncake 512]"
)
@click.option("--time-field", help="openai: the field with the time. [default: timestamp, time, created and others]")
@click.option("--rate", type=float, help="Requests per second, where the log has no times. [default: sharegpt 1]")
@click.option("--seed", default=0, show_default=True, help="Seed of the times that are drawn.")
@click.option("--model", help="Size the cache of all prompts: llama-3-8b or others, or a path of a config.json.")
@click.option("--output-tokens", default=0, show_default=True, help="Tokens of an answer that the log does not have.")
@click.option(
    "--key-file", type=_PATH, help="Keep the key of the ids here, for conversions to join. [default: drop it]"
)
@click.option("--wrong-lines", default=100, show_default=True, help="Lines of another format to leave out at most.")
@click.option("--unshared", is_flag=True, help="azure: take each prompt as unlike all others.")
def convert(**arguments: Any) -> None:
    """Make one trace of LOGS, files of one format (.gz and .zst too; - is standard input).

    The trace has times, lengths and ids of blocks of tokens, and neither text nor token ids. 'tokenlake bench cache-hit
    --trace' reads it. docs/traces.md has the formats and an example.
    """
    try:
        run_convert(ConvertArguments(**arguments))
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error
