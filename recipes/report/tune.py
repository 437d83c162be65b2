"""Settings that `draftsmith tune` found, on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...decode.methods import METHODS
from ..session.terminal import console
from .tables import Cell, Column, Table, interval_cell, number_cell, speedup_cell

_ALWAYS_SHOWN = (
    *("gamma", "k_config", "num_sequences", "num_drafts", "epsilon"),
    *("confidence_threshold", "likelihood_threshold", "fallback_threshold", "rollback_threshold"),
)
_COLUMNS = (
    Column("method", numeric=False),
    Column("settings", numeric=False),
    Column("found by", numeric=False),
    Column("tokens per step", "predicted"),
    Column("speedup", "predicted, steps only, ×"),
    Column("tokens per step"),
    Column("speedup", "×"),
    Column("interval", "95 %, ×"),
    Column("perplexity", "of the output"),
)
Row = Mapping[str, Any]


def describe_settings(name: str, options: Mapping[str, Any]) -> str:
    """Describe the settings that differ from the method's defaults; a long tree by its size."""
    shown, defaults = [], METHODS[name]()
    for key, value in options.items():
        if key == "tree" and "," in str(value):
            shown.append(f"tree of {len(set(str(value).replace(' ', '').split(',')))} nodes")
        elif getattr(defaults, key) != value or key in _ALWAYS_SHOWN:
            shown.append(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}")
    return ", ".join(shown) or "defaults"


def show_tuning(results: Row, folder: Path) -> None:
    """Print the settings, measured or only predicted, the methods left out, and the best setting."""
    confirmed = {(row["method"], str(row["options"])): row for row in results["confirmed"]}
    predicted = {
        (each["method"], str(each["options"])): each for found in results["methods"].values() for each in found
    }
    predicted |= {key: row["predicted"] for key, row in confirmed.items()}
    cells = [_cells(each, confirmed.get(key, {})) for key, each in predicted.items()]
    title = f"Settings, predicted from {results['positions']:,} recorded tokens and confirmed by decoding"
    console().print(Table(title, _COLUMNS, cells).rich())
    for each in results["left_out"]:
        console().print(f"not tuned: {each['method']}: {each['why']}", soft_wrap=True)
    console().print(describe_best(results), soft_wrap=True)
    console().print(f"results: {folder / 'tune.json'}; chosen settings: {folder / 'recipe.yaml'}", soft_wrap=True)


def _cells(predicted: Row, row: Row) -> list[Cell]:
    return [
        Cell(predicted["method"]),
        Cell(describe_settings(predicted["method"], predicted["options"])),
        Cell(predicted["found_by"]),
        number_cell(predicted["tokens_per_step"]),
        number_cell(predicted["speedup"]),
        number_cell(row.get("tokens_per_step")),
        speedup_cell(row) if row else number_cell(None),
        interval_cell(row.get("speedup_interval")),
        number_cell(row.get("perplexity", predicted["perplexity"])),
    ]


def describe_best(results: Row) -> str:
    """Describe the best lossless setting and its speedup."""
    best = next((row for row in results["confirmed"] if row["label"] == results["best"]), None)
    if best is None:
        return "No lossless method was tuned."
    low, high = best["speedup_interval"] or (None, None)
    interval = f" (95 % interval {low:.2f} to {high:.2f})" if low is not None else ""
    words = f"best: {best['label']}: {best['speedup']:.2f} times as fast as autoregressive decoding{interval}, with "
    words += f"{best['tokens_per_step']:.2f} tokens per step." + (
        " The times are unsteady." * (best["steady"] is False)
    )
    return words if best["speedup"] > 1 else f"{words} No setting is faster than autoregressive decoding here."
