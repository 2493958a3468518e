"""Stage `data`: one split of a task as Parquet, with a description and, if asked, a tokenizer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from bridge import behaviors
from bridge.config.stages import Behavior, DataSettings, Starts
from bridge.config.tasks import FileTask, IgsmSettings, OwnTask, Style, TaskSettings
from bridge.errors import UserError
from bridge.progress import progress
from bridge.stages.job import Job
from bridge.tasks import Example, load_task, own, r3
from bridge.tasks.igsm.task import Igsm, Orders
from bridge.tasks.tables import write_table
from bridge.tasks.tokenizer import build_tokenizer

Advance = Callable[[int], None]
ROWS_PER_PROCESS = 5_000  # fewer are made faster than a process starts
MOST_ANSWERS = 20  # in the answer histogram
R3_FORM = {"sft": "train", "rl": "mix", "val": "test", "test": "test"}
"""Split → form of R³'s JSON."""


def run(job: Job) -> dict[str, object]:
    """Write data.parquet, dataset.json and, if asked, tokenizer/ into `job.out`; returns what dataset.json holds."""
    settings = job.settings
    assert isinstance(settings, DataSettings)
    job.out.mkdir(parents=True, exist_ok=True)
    with progress(job.label, settings.size, "rows") as meter:
        summary = write_split(job.task, settings, job.out / "data.parquet", meter.advance, workers=job.threads)
    if settings.tokenizer:
        phrases = load_task(job.task).vocabulary()
        if isinstance(job.task, IgsmSettings):
            phrases = phrases + behaviors.phrases(job.task.style)
        summary["vocabulary"] = build_tokenizer(phrases, job.out / "tokenizer")
    (job.out / "dataset.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def write_split(
    task: TaskSettings,
    data: DataSettings,
    path: Path,
    advance: Advance = lambda amount: None,
    look: Callable[[Example], None] = lambda row: None,
    workers: int = 1,
) -> dict[str, object]:
    """Write one split to a Parquet file, or to a JSON file in R³'s form, under a temporary name until it is whole;
    returns its description. `look` is shown every row. A large set of igsm is made by up to `workers` processes."""
    source = load_task(task)
    if data.behavior != Behavior() and not source.worded:
        raise UserError(f"task {task.name}: has no steps that a behavior could be injected into; leave `behavior` out")
    if data.size is None and not isinstance(task, FileTask):
        raise UserError(f"task {task.name}: size: is required: only public data sets have an end")
    style = task.style if isinstance(task, IgsmSettings) else Style()
    draw = source.rows
    if isinstance(source, Igsm):
        enough = max((data.size or 0) // ROWS_PER_PROCESS, 1)
        orders = Orders(data.solution_orders, data.premise_orders)
        draw = partial(source.rows, orders=orders, workers=min(workers, enough))
    elif isinstance(task, OwnTask):
        draw = partial(own.rows, source, task.name)
    if not isinstance(source, Igsm) and data.solution_orders * data.premise_orders > 1:
        raise UserError(f"task {task.name}: solution_orders and premise_orders are for igsm; leave them out")
    write = behaviors.writer(data.behavior, style) if source.worded else None
    rejected: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    ops: Counter[int] = Counter()

    def counted() -> Iterator[Example]:
        for row in draw(data.split, data.size, data.seed, write, rejected):
            answers[row.gold] += 1
            if "num_ops" in row.extra:
                ops[int(str(row.extra["num_ops"]))] += 1
            look(row)
            advance(1)
            yield row

    temporary = path.with_name(path.name + ".tmp")
    try:
        facts = {"answer_kind": source.answer_kind, "response_prefix": source.response_prefix}
        if data.solution_orders > 1:
            facts["repeats"] = "solutions"
        if path.suffix == ".json":
            rows = r3.write(temporary, counted(), source.answer_kind, R3_FORM[data.split], Starts())
        else:
            rows = write_table(counted(), data.split, task.name, temporary, facts)
        if answers.total() < (data.size or 1):
            raise UserError(
                f"task {task.name}: has {answers.total()} rows for split {data.split}, not the {data.size or 1} asked "
                "for; ask for fewer"
            )
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    top, count = answers.most_common(1)[0]
    summary: dict[str, object] = {
        "task": task.model_dump(mode="json"),
        "split": data.split,
        "seed": data.seed,
        "behavior": data.behavior.model_dump(mode="json"),
        "answer_kind": source.answer_kind,
        "response_prefix": source.response_prefix,
        "rows": rows,
        "rejected": dict(sorted(rejected.items())),
        "top_answer": {"answer": top, "share": count / answers.total()},
        "answers": dict(answers.most_common(MOST_ANSWERS)),
    }
    if isinstance(source, Igsm):
        summary |= {"solution_orders": data.solution_orders, "premise_orders": data.premise_orders}
    return summary | ({"ops": {str(number): ops[number] for number in sorted(ops)}} if ops else {})
