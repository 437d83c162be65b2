"""`draftsmith table`: finished tables shown, merged and pruned."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

table_app = typer.Typer(help="Show, merge and prune finished correlation tables.", no_args_is_help=True)

Table = Annotated[Path, typer.Argument(help="A table's folder.")]
Out = Annotated[Path, typer.Option(help="Folder of the new table.")]


@table_app.command()
def show(
    table: Table,
    tokenizer: Annotated[
        str | None, typer.Option(help="Shows tokens as text; by default the recipe's, where it lies here.")
    ] = None,
) -> None:
    """Sizes, sources and the most extreme correlations of a table."""
    from .table_show import show_table

    show_table(table, tokenizer)


@table_app.command()
def merge(
    tables: Annotated[list[Path], typer.Argument(help="Folders of two tables or more.")],
    out: Out,
    again: Annotated[bool, typer.Option("--again", help="Also tables that were counted from the same data.")] = False,
) -> None:
    """The table of all their documents together; counts add up exactly."""
    from .tables import merge_tables

    merge_tables(tables, out, again=again)


@table_app.command()
def prune(
    table: Table,
    out: Out,
    min_count: Annotated[int, typer.Option(min=1, help="Keep pairs that were seen at least so often.")] = 1,
    top: Annotated[int, typer.Option(min=0, help="Keep so many pairs a left token, the most frequent; 0: all.")] = 0,
    megabytes: Annotated[
        float | None, typer.Option(help="Keep the most frequent pairs that fit into a file of this size.")
    ] = None,
) -> None:
    """A smaller table; the whole one stays as it is."""
    from .tables import prune_table

    prune_table(table, out, min_count=min_count, top=top, megabytes=megabytes)
