"""Scores from evaluation artifacts: one model, two models on the same problems, and the table of the demo."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from bridge.artifacts import open_artifact
from bridge.errors import UserError
from bridge.graph import Edge, canonical
from bridge.launch.show import console
from bridge.progress import duration
from bridge.runs import Run

Json = dict[str, Any]

COLUMNS = ("pass@1", "pass@8", "strict_maj@8", "maj@8")


def read_eval(folder: Path) -> Json:
    """What the eval.json of an evaluation holds; its seal and files are checked."""
    open_artifact(folder, "eval")
    value: Json = json.loads((folder / "eval.json").read_text(encoding="utf-8"))
    return value


def _verdicts(folder: Path) -> tuple[dict[str, list[bool]], dict[str, list[str | None]]]:
    """Question → verdicts and normalised answers of its samples, in order."""
    import pyarrow.parquet as pq

    open_artifact(folder, "eval")
    columns = ["question", "prompt", "gold", "sample", "correct", "answer"]
    rows = pq.read_table(folder / "samples.parquet", columns=columns).to_pylist()
    correct: dict[str, list[bool]] = {}
    answers: dict[str, list[str | None]] = {}
    for row in sorted(rows, key=lambda r: (r["question"], r["sample"])):
        asked = canonical([row["question"], row["prompt"], row["gold"]])  # a row number alone names no question
        correct.setdefault(asked, []).append(row["correct"])
        answers.setdefault(asked, []).append(row["answer"])
    return correct, answers


def comparison(a: Path, b: Path) -> list[Json]:
    """B against A on the same questions, one row per metric that both have.

    Raises:
        UserError: one of them is no evaluation, or they are not of the same questions.
    """
    import numpy as np

    from bridge.config.grading import Grading
    from bridge.metrics import compare, per_question

    tables, policies = [], []
    asked: list[list[str]] = []
    for folder in (a, b):
        correct, answers = _verdicts(folder)
        order = sorted(correct)
        samples = len(correct[order[0]])
        ks = sorted({2**power for power in range(samples.bit_length())} | {samples})
        verdicts = np.array([correct[q] for q in order])
        policies.append(Grading.model_validate(read_eval(folder)["settings"].get("grading", {})))
        ties_lose = policies[-1].ties == "lose"
        tables.append(per_question(verdicts, [answers[q] for q in order], ks, ties_lose=ties_lose))
        asked.append(order)
    if asked[0] != asked[1]:
        shared = len(set(asked[0]) & set(asked[1]))
        raise UserError(
            f"{a} has {len(asked[0])} questions and {b} has {len(asked[1])}, of which {shared} are the same; "
            "a paired comparison needs two evaluations of one dataset"
        )
    if policies[0] != policies[1]:
        raise UserError(f"{a} and {b} were graded by different rules (`grading` in their eval.json); grade them alike")
    return [{"questions": len(asked[0]), **row} for row in compare(*tables)]


def demo_result(run: Run, seconds: float) -> Json:
    """The result of the demo as `demo --json` prints it; every number is read from the sealed evaluations."""
    folders = {
        element.label.split()[0]: run.artifact(Edge(element.stage, element.index))
        for element in run.elements.values()
        if element.kind == "eval"
    }
    rows = []
    for model, folder in folders.items():
        metrics = read_eval(folder)["metrics"]
        rows.append(
            {
                "model": model,
                **{name: metrics[name]["value"] for name in COLUMNS},
                "interval": metrics["pass@1"]["interval"],
                "intervals": {name: metrics[name]["interval"] for name in COLUMNS},
            }
        )
    compared = {row["metric"]: row for row in comparison(folders["sft"], folders["rl"])}
    return {
        "run": run.id,
        "dir": str(run.folder),
        "seconds": round(seconds, 1),
        "questions": compared["pass@1"]["questions"],
        "rows": rows,
        "rl_minus_sft": {
            name: {"difference": compared[name]["difference"], "interval": list(compared[name]["interval"])}
            for name in COLUMNS
        },
    }


def _percent(value: float, interval: list[float]) -> str:
    return f"{100 * value:5.1f}  [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"


def print_demo(result: Json) -> None:
    """The table that the demo ends with."""
    table = Table(
        title=f"{result['questions']} held-out problems, 8 answers each at T = 1; percent, with 95 % intervals",
        title_justify="left",
    )
    table.add_column("model")
    for name in COLUMNS:
        table.add_column(name)
    for row in result["rows"]:
        table.add_row(row["model"], *(_percent(row[name], row["intervals"][name]) for name in COLUMNS))
    table.add_section()
    gains = result["rl_minus_sft"]
    table.add_row("RL − SFT", *(_percent(gains[name]["difference"], gains[name]["interval"]) for name in COLUMNS))
    console().print(table)
    sys.stdout.write(
        "pass@k: a right answer among k. strict_maj@8: more than half of 8 are right. maj@8: the most common answer is "
        "right.\nRL − SFT is paired: the same problems, problem by problem.\n"
        f"The run: {result['dir']}  ({duration(result['seconds'])})\n"
    )


def print_eval(result: Json) -> None:
    """One model's scores."""
    table = Table(title=f"{result['model']}: {result['questions']} questions, {result['samples']} answers each")
    for name in ("metric", "percent", "95 %"):
        table.add_column(name)
    for name, metric in result["metrics"].items():
        low, high = metric["interval"]
        table.add_row(name, f"{100 * metric['value']:.1f}", f"{100 * low:.1f} to {100 * high:.1f}")
    console().print(table)
    rates = f"truncated {result['truncated']:.1%}, no answer {result['no_answer']:.1%}, {result['tokens']:.0f} tokens"
    sys.stdout.write(f"{rates} per answer\n")


def print_comparison(rows: list[Json]) -> None:
    """B against A."""
    table = Table(title=f"B − A over {rows[0]['questions']} questions, paired", title_justify="left")
    for name in ("metric", "A", "B", "B − A", "95 %", "p"):
        table.add_column(name)
    for row in rows:
        low, high = row["interval"]
        table.add_row(
            row["metric"],
            f"{100 * row['a']:.1f}",
            f"{100 * row['b']:.1f}",
            f"{100 * row['difference']:+.1f}",
            f"{100 * low:+.1f} to {100 * high:+.1f}",
            f"{row['p_value']:.4f}",
        )
    console().print(table)
