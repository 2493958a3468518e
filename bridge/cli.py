"""The command line: one function per command, no logic. Heavy imports happen inside the commands."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from bridge import __version__
from bridge.errors import UserError, WorkFailedError, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bridge.launch.container import Image
    from bridge.launch.states import ElementState
    from bridge.runs import Run

app = typer.Typer(
    name="bridge-rl",
    help="Take a language model through data, SFT, RL and evaluation, on this machine or on a Slurm cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Experiment = Annotated[Path, typer.Argument(metavar="EXP", help="The experiment file, such as jobs/demo.yaml.")]
Settings = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, such as stages.sft.lr=1e-5.")
]
ProfileName = Annotated[
    str, typer.Option("--profile", "-p", metavar="NAME", help="How to run: slurm/NAME.yaml, or a file.")
]
Runs = Annotated[
    Path | None, typer.Option("--runs", metavar="DIR", help="Where runs lie. Default: $BRIDGE_RUNS, else runs/.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, the beginning of it, or its folder.")]
Where = Annotated[str, typer.Argument(metavar="STAGE[/ELEMENT]", help="Such as sft or sft/3.")]


def main() -> NoReturn:
    """Run the command line and leave with its exit code."""
    debug = "--debug" in sys.argv
    usage_error = typer.BadParameter.__mro__[2]  # ClickException, of click or of the copy of it inside typer
    try:
        code = app(standalone_mode=False)
        if code == 130:  # typer turns Ctrl-C into this code
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except UserError as error:
        _fail(error, 2, debug)
    except WorkFailedError as error:
        _fail(error, 1, debug)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    except BrokenPipeError:  # `bridge-rl status | head`
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        if debug:
            raise
        sys.stderr.write(f"error: {error.filename or 'the system'}: {error.strerror or error}\n")
        sys.exit(1)
    except Exception as error:
        if isinstance(error, usage_error):
            error.show()  # type: ignore[attr-defined]
            sys.exit(2)
        if debug:
            raise
        sys.stderr.write(
            f"error: {type(error).__name__}: {error}\n(this is a fault of bridge-rl; --debug shows where)\n"
        )
        sys.exit(1)


def _fail(error: Exception, code: int, debug: bool) -> NoReturn:
    if debug:
        raise error
    sys.stderr.write(f"error: {printable(error)}\n")
    sys.exit(code)


def _print_json(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False)
    # A name that is no Unicode gets JSON's escape for it; every other character stays.
    sys.stdout.write(text.encode("utf-8", "backslashreplace").decode("utf-8") + "\n")


def _print_mapping(value: dict[str, Any]) -> None:
    """A mapping, one key per line; long lists are cut."""
    for key, item in value.items():
        if isinstance(item, dict):
            sys.stdout.write(f"{key}:\n")
            for name, inner in list(item.items())[:200]:
                sys.stdout.write(f"  {printable(name)}: {printable(inner)}\n")
        elif isinstance(item, list):
            sys.stdout.write(f"{key}: {len(item)}\n")
            for inner in item[:200]:
                words = inner.values() if isinstance(inner, dict) else [inner]
                sys.stdout.write(f"  {'  '.join(map(printable, words))}\n")
            if len(item) > 200:
                sys.stdout.write(f"  … and {len(item) - 200} more (--json shows all)\n")
        else:
            sys.stdout.write(f"{key}: {printable(item)}\n")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def _version(value: bool) -> None:
    if value:
        sys.stdout.write(f"bridge-rl {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error (give it first).")] = False,
) -> None:
    """Options of every command."""


# ---- the experiment


@app.command(epilog="Example: bridge-rl plan jobs/demo.yaml --profile devcluster --scripts")
def plan(
    experiment: Experiment,
    settings: Settings = None,
    profile: ProfileName = "local",
    runs: Runs = None,
    scripts: Annotated[bool, typer.Option("--scripts", help="Print the exact sbatch scripts.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check everything that can be checked and show the graph. Submits nothing, needs no cluster."""
    from bridge.launch import show
    from bridge.launch.prepare import prepare
    from bridge.runs import runs_folder

    planned = prepare(experiment, settings or [], profile)
    overview = show.overview(planned, runs_folder(runs))
    if scripts:
        sys.stdout.write(show.scripts_text(planned, runs_folder(runs)))
    elif as_json:
        _print_json(overview)
    else:
        show.print_overview(overview)


@app.command(epilog="Example: bridge-rl launch jobs/demo.yaml stages.rl.steps=40 --profile devcluster --wait")
def launch(
    experiment: Experiment,
    settings: Settings = None,
    profile: ProfileName = "local",
    runs: Runs = None,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until the end; 0 only if every stage sealed.")] = False,
    prepare_only: Annotated[
        bool, typer.Option("--prepare", help="Only make the run's folder, for slurm/*.sbatch; submit nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Submit an experiment. The same experiment again goes on where the run stands, and repeats nothing."""
    from bridge.launch.prepare import make_run, prepare
    from bridge.launch.submit import require_scheduler
    from bridge.runs import runs_folder

    planned = prepare(experiment, settings or [], profile)
    if not prepare_only:
        require_scheduler(planned.profile, profile, planned.all_in_image)
    run, image = make_run(planned, runs_folder(runs))
    if prepare_only:
        facts = {"run": run.id, "dir": str(run.folder), "jobs": {}}
        _print_json(facts) if as_json else sys.stdout.write(f"{run.folder}\n")
        return
    _launch(run, planned.profile, profile, wait, as_json, image)


@app.command(epilog="Example: bridge-rl resume demo-1a2b3c4d --wait")
def resume(
    run: RunName,
    runs: Runs = None,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until the end; 0 only if every stage sealed.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Go on although the image is another than before.")] = False,
    as_json: AsJson = False,
) -> None:
    """Launch the same run again: only what is not sealed and not in hand."""
    from bridge.launch.runtime import image_of
    from bridge.runs import open_run, runs_folder

    found = open_run(run, runs_folder(runs))
    image = image_of(found.record.get("image"), found.profile(), found.record["externals"])
    _launch(found, found.profile(), found.record["profile_name"], wait, as_json, image, force)


def _launch(
    run: Run, profile: Any, profile_name: str, wait: bool, as_json: bool, image: Image | None, force: bool = False
) -> None:
    from bridge.launch.runtime import require_same, require_same_lock
    from bridge.launch.submit import launch as submit

    (require_same_lock if force else require_same)(run, image)
    with _interruptible(run):
        jobs = submit(run, profile, profile_name, image)
        if as_json:
            _print_json({"run": run.id, "dir": str(run.folder), "jobs": jobs})
        else:
            sys.stdout.write(f"{run.id}\n")
            sys.stdout.flush()
        if not jobs:
            _say("nothing to submit: every stage is sealed or in hand")
        elif profile.cluster == "local" and not wait:
            pid = next(iter(jobs.values()))[0]
            _say(
                f"runs in the background (process {pid}); see it with `bridge-rl status {run.id}`, "
                f"stop it with `bridge-rl cancel {run.id}`"
            )
        if wait:
            _wait(run)


@contextmanager
def _interruptible(run: Run) -> Iterator[None]:
    """On Ctrl-C, TERM or a closed terminal, stop what runs on this machine, or say that the cluster's jobs go on."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # not under nohup
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a second one must not leave anything half-stopped
        if run.profile().cluster == "local":
            from bridge.launch.submit import cancel as stop

            _say("stopping …")
            stop(run, list(run.elements.values()))
            _say(f"stopped; what was done is kept: go on with `bridge-rl resume {run.id}`")
        elif next((line["event"] for line in reversed(run.submissions())), "") == "release":
            _say(f"the jobs go on; see `bridge-rl status {run.id}`, stop them with `bridge-rl cancel {run.id}`")
        raise


def _wait(run: Run) -> Sequence[ElementState]:
    """Wait for the end of a run; WorkFailedError if not everything was sealed."""
    from bridge.launch.watch import wait

    states = wait(run)
    wrong = [s for s in states if s.state != "done"]
    if wrong:
        lines = "\n".join(f"  {s.stage}/{s.element}: {s.state}: {s.reason}" for s in wrong[:20])
        raise WorkFailedError(f"{run.id}: {len(wrong)} of {len(states)} elements are not sealed\n{lines}")
    return states


@app.command(epilog="Example: bridge-rl demo --seed 1")
def demo(
    seed: Annotated[int, typer.Option(help="Seed of init, SFT, RL and sampling; the problems stay the same.")] = 0,
    profile: ProfileName = "local",
    runs: Runs = None,
    as_json: AsJson = False,
) -> None:
    """The whole chain on this machine with the small shipped experiment: data, SFT, convert, RL, convert, evaluate."""
    import time

    from bridge.launch import scores
    from bridge.launch.prepare import make_run, prepare, shipped
    from bridge.launch.submit import launch as submit
    from bridge.launch.submit import require_scheduler
    from bridge.runs import runs_folder

    experiment = shipped("jobs", "demo.yaml")
    if experiment is None:
        raise UserError("jobs/demo.yaml is missing from this installation; install bridge-rl again")
    started = time.monotonic()
    planned = prepare(experiment, [f"seed={seed}"], profile)
    require_scheduler(planned.profile, profile, planned.all_in_image)
    run, image = make_run(planned, runs_folder(runs))
    _say(f"{run.id}: {len(run.elements)} jobs, in {run.folder}")
    with _interruptible(run):
        submit(run, planned.profile, profile, image)
        _wait(run)
    result = scores.demo_result(run, time.monotonic() - started)
    if as_json:
        _print_json(result)
    else:
        scores.print_demo(result)


# ---- what became of it


@app.command(epilog="Example: bridge-rl status demo --watch")
def status(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Without it: all runs.")] = None,
    runs: Runs = None,
    watch: Annotated[bool, typer.Option("--watch", help="Stay and redraw until the run is over.")] = False,
    as_json: AsJson = False,
) -> None:
    """One line per element, with reasons; without RUN, one line per run."""
    from bridge.launch import show
    from bridge.runs import open_run, runs_folder

    if run is None:
        list_runs(runs, as_json)
        return
    found = open_run(run, runs_folder(runs))
    if watch and not as_json:
        show.watch_status(found)
    elif as_json:
        _print_json(show.status(found))
    else:
        show.print_status(show.status(found))


@app.command("runs", epilog="Example: bridge-rl runs --runs /shared/runs")
def list_runs(runs: Runs = None, as_json: AsJson = False) -> None:
    """All runs, one line each: state, what is done, size on disk."""
    from bridge.launch import prune, show
    from bridge.runs import all_runs, runs_folder

    found = all_runs(runs_folder(runs))
    summaries = [show.run_summary(run) | {"bytes": prune.size(run.folder)} for run in found]
    _print_json(summaries) if as_json else show.print_runs(summaries, runs_folder(runs))


@app.command(epilog="Example: bridge-rl logs demo rl/0 --follow")
def logs(
    run: RunName,
    where: Where,
    runs: Runs = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing until the job is over.")] = False,
    attempt: Annotated[int | None, typer.Option(min=1, help="An earlier attempt. Default: the last.")] = None,
) -> None:
    """What a job printed."""
    from bridge.launch import show
    from bridge.runs import open_run, runs_folder

    show.print_logs(open_run(run, runs_folder(runs)), where, attempt, follow)


@app.command(epilog="Example: bridge-rl cancel demo rl")
def cancel(
    run: RunName,
    where: Annotated[str | None, typer.Argument(metavar="[STAGE[/ELEMENT]]", help="Without it: the whole run.")] = None,
    runs: Runs = None,
) -> None:
    """Cancel a run, a stage or an element, and everything that waits for it. What is sealed stays."""
    from bridge.launch import show
    from bridge.launch.submit import cancel as stop
    from bridge.runs import open_run, runs_folder

    found = open_run(run, runs_folder(runs))
    stopped = stop(found, found.find(where) if where else list(found.elements.values()))
    _say(f"cancelled: {show.names(stopped)}" if stopped else "nothing to cancel: nothing is open")


@app.command(epilog="Example: bridge-rl prune demo-1a2b3c4d")
def prune(
    run: RunName,
    runs: Runs = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove what can be made again: training checkpoints whose model is sealed, left-over work folders. Asks first."""
    from bridge.launch import prune as pruning
    from bridge.runs import open_run, runs_folder

    found = open_run(run, runs_folder(runs))
    items = pruning.removable(found)
    if items and not yes:
        _say(pruning.listing(found, items))
        if not sys.stdin.isatty():
            raise UserError(f"{found.id}: nothing was removed: there is no terminal to ask at; --yes does not ask")
        if not typer.confirm("remove these?", err=True):
            items = []
    pruning.remove(found, items)
    if as_json:
        _print_json(pruning.to_json(found, items))
    else:
        _say(f"removed:\n{pruning.listing(found, items)}" if items else "nothing was removed")


# ---- single steps


@app.command(epilog="Example: bridge-rl data igsm --split sft --size 2000 --seed 0 -o sft.parquet ops=[15,20]")
def data(
    task: Annotated[str | None, typer.Argument(metavar="[TASK]", help="Such as igsm, gsm8k or my.py:Task.")] = None,
    split: Annotated[str | None, typer.Option(help="sft, rl, val or test.")] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Number of rows. Default: all, of a public data set.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write: .parquet, or R³'s .json.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the problems and the wording.")] = 0,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Also tell the lengths in tokens of this model.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option("--check", metavar="FILE", help="Write nothing; look whether FILE is sound.")
    ] = None,
    against: Annotated[
        list[Path] | None, typer.Option("--against", metavar="FILE", help="With --check: other splits, for overlap.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Such as ops=[15,20] or behavior=bridge.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one split of a task, or check a data file. KEY=VALUE sets the task's settings, or `behavior`."""
    from bridge.stages import alone, datacheck

    if check is not None:
        found = datacheck.check(check, against or [])
        _print_json(found) if as_json else _say(datacheck.describe(found))
        if not found["ok"]:
            raise typer.Exit(1)
        return
    if task is None or split is None or output is None:
        raise UserError("data: give TASK, --split and --output, or --check FILE")
    summary = alone.write_data(task, split, size, seed, output, tokenizer, settings or [])
    _print_json(summary) if as_json else _say(alone.describe_data(summary, output))


@app.command(
    "eval", epilog="Example: bridge-rl eval ./model --task test.parquet --samples 8 -o ./scores temperature=0.7"
)
def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model folder, or a hub name with its owner (OWNER/NAME).")
    ],
    task: Annotated[
        str, typer.Option(metavar="T", help="A task (igsm, gsm8k, my.py:Task), a dataset artifact, or a data file.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the evaluation goes.")],
    samples: Annotated[int, typer.Option(min=1, help="Answers per problem.")] = 8,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many problems.")] = None,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Such as temperature=0.7 or task.ops=[3,5].")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Sample, grade and score a model. KEY=VALUE sets the stage's settings; `task.KEY=VALUE` the task's."""
    from bridge.launch import scores
    from bridge.stages import alone

    result = alone.evaluate(model, task, output, samples, limit, settings or [])
    _print_json(result) if as_json else scores.print_eval(result)


@app.command(epilog="Example: bridge-rl compare runs/demo-1a2b/stages/eval/1 runs/demo-1a2b/stages/eval/2")
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="An evaluation.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one, of the same problems.")],
    as_json: AsJson = False,
) -> None:
    """Paired comparison of two evaluations: B − A, question by question."""
    from bridge.launch import scores

    rows = scores.comparison(a, b)
    _print_json(rows) if as_json else scores.print_comparison(rows)


@app.command(epilog="Example: bridge-rl grade answers.jsonl -o graded.jsonl")
def grade(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Rows with response, gold and kind.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="Where to write.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Grading settings, such as percent=hundredth.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Grade answers: adds answer, correct and reason to each row."""
    from bridge.stages import alone

    summary = alone.grade_file(source, output, settings or [])
    _print_json(summary) if as_json else _say(alone.describe_grades(summary, output))


@app.command(
    epilog="Example: bridge-rl audit graded.jsonl -o verdicts.jsonl --judge http://localhost:8000/v1 --judge-model M"
)
def audit(
    source: Annotated[Path, typer.Argument(metavar="GRADED", help="A file that `grade` wrote, or an evaluation.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="Where the verdicts go.")],
    judge: Annotated[str, typer.Option(metavar="URL", help="The base URL of an OpenAI-compatible API.")],
    judge_model: Annotated[str, typer.Option(metavar="NAME", help="The model that judges.")],
    key_env: Annotated[
        str | None, typer.Option(metavar="VAR", help="The environment variable that holds the API key.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many rows.")] = None,
    as_json: AsJson = False,
) -> None:
    """Ask a language model about rows graded wrong or no_answer. Its verdicts stand beside the grades."""
    from bridge.stages import alone

    summary = alone.audit_file(source, output, judge, judge_model, key_env, limit)
    _print_json(summary) if as_json else _say(alone.describe_audit(summary, output))


@app.command(epilog="Example: bridge-rl convert runs/x/stages/sft/0/checkpoint.pt ./model --dtype bfloat16")
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint file, or the folder that holds it.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to make.")],
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    base: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="Model to merge an adapter into; else its config serves last."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest weight file.")] = "5GB",
    follow: Annotated[bool, typer.Option("--follow", help="Convert each step in SRC as it is saved.")] = False,
    until: Annotated[int | None, typer.Option(metavar="STEP", help="With --follow: end after this step.")] = None,
    as_json: AsJson = False,
) -> None:
    """A training checkpoint becomes a safetensors folder that transformers and vLLM load. Nothing is unpickled."""
    from bridge.convert import commands

    if until is not None and not follow:
        raise UserError("--until says when --follow ends; give both")
    if follow:
        report = commands.follow_folder(source, output, dtype, base, max_shard_size, until)
    else:
        report = commands.convert_file(source, output, dtype, base, max_shard_size)
    _print_json(report) if as_json else _print_mapping(report)


@app.command(epilog="Example: bridge-rl inspect runs/demo-1a2b/stages/sft/0")
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint, model folder or artifact.")],
    as_json: AsJson = False,
) -> None:
    """What a checkpoint, a model folder or an artifact holds. Nothing is unpickled."""
    from bridge.convert import commands

    facts = commands.inspect_path(path)
    _print_json(facts) if as_json else _print_mapping(facts)


@app.command(epilog="Example: bridge-rl doctor --profile devcluster")
def doctor(profile: ProfileName = "local", runs: Runs = None, as_json: AsJson = False) -> None:
    """Is this machine or cluster ready? Each check with its remedy."""
    from bridge.launch import doctor as checks
    from bridge.runs import runs_folder

    found = checks.examine(profile, runs_folder(runs))
    _print_json([c.to_json() for c in found]) if as_json else checks.print_checks(found)
    if not all(check.ok for check in found):
        raise typer.Exit(1)


# ---- images

image = typer.Typer(
    name="image",
    help="The containers of containers/images.yaml: build, pull, check and keep them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(image)

ImageName = Annotated[str, typer.Argument(metavar="NAME", help="An image of images.yaml, such as train.")]
AnyImage = Annotated[str | None, typer.Argument(metavar="[NAME]", help="An image of images.yaml. Default: all.")]
ImagesFile = Annotated[
    Path | None,
    typer.Option("--file", metavar="IMAGES.yaml", help="Default: containers/images.yaml here, else bridge-rl's own."),
]
With = Annotated[str | None, typer.Option("--with", metavar="TOOL", help="The tool. Default: the first that is here.")]


@image.command("list", epilog="Example: bridge-rl image list")
def image_list(name: AnyImage = None, file: ImagesFile = None, as_json: AsJson = False) -> None:
    """The images, what lies here of them, and what differs from images.yaml. Reads no image."""
    from bridge.launch.image import look, store

    found = look.overview(store.open_source(file), name)
    _print_json(found) if as_json else look.print_overview(found)


@image.command("build", epilog="Example: bridge-rl image build train FLASH_ATTN=0 --with buildah")
def image_build(
    name: ImageName,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="FLASH_ATTN=80;90 or 0; MAX_JOBS=4.")
    ] = None,
    tool: With = None,
    base: Annotated[
        str | None, typer.Option("--base", metavar="BASE", help="A stand-in: an archive, or an address with a digest.")
    ] = None,
    mirror: Annotated[
        Path | None, typer.Option("--mirror", metavar="DIR", help="What `image mirror` saved; no index is asked.")
    ] = None,
    file: ImagesFile = None,
    as_json: AsJson = False,
) -> None:
    """Build an image: a SIF with apptainer or singularity, an OCI archive with buildah, podman or docker."""
    from bridge.launch.image import build, look, store

    source = store.open_source(file)
    record = build.build(source, name, settings or [], tool, base, mirror)
    folder = store.images_folder(source)
    _print_json(look.facts(record, folder)) if as_json else look.print_made(record, folder)


@image.command("pull", epilog="Example: bridge-rl image pull train")
def image_pull(name: ImageName, tool: With = None, file: ImagesFile = None, as_json: AsJson = False) -> None:
    """Bring a published image by its digest, with apptainer, singularity or skopeo, and check it."""
    from bridge.launch.image import look, pull, store

    source = store.open_source(file)
    record = pull.pull(source, name, tool)
    folder = store.images_folder(source)
    _print_json(look.facts(record, folder)) if as_json else look.print_made(record, folder)


@image.command("verify", epilog="Example: bridge-rl image verify train")
def image_verify(name: AnyImage = None, file: ImagesFile = None, as_json: AsJson = False) -> None:
    """Read the images that lie here, every byte, and compare them with their records and with images.yaml."""
    from bridge.launch.image import look, store

    rows = look.verify(store.open_source(file), name)
    _print_json(rows) if as_json else look.print_verified(rows)
    if not all(row["ok"] for row in rows):
        raise typer.Exit(1)


@image.command("sbom", epilog="Example: bridge-rl image sbom train")
def image_sbom(name: ImageName, file: ImagesFile = None, as_json: AsJson = False) -> None:
    """Write the bill of materials (CycloneDX) beside each image of that name. `build` and `pull` do so too."""
    from bridge.launch.image import look, store

    written = look.sbom(store.open_source(file), name)
    _print_json(written) if as_json else sys.stdout.write("".join(f"{path}\n" for path in written))


@image.command("mirror", epilog="Example: bridge-rl image mirror /shared/mirror train")
def image_mirror(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to keep it; about 5 GB and the base.")],
    name: AnyImage = None,
    file: ImagesFile = None,
    as_json: AsJson = False,
) -> None:
    """Save base and packages for a day when upstream deletes them. The same command again goes on."""
    from bridge.launch.image import index, look, mirror, store

    source = store.open_source(file)
    saved = mirror.save(source, name, index.Index(index.index_url()), folder)
    _print_json(saved) if as_json else look.print_saved(saved)


@image.command("check", epilog="Example: bridge-rl image check")
def image_check(name: AnyImage = None, file: ImagesFile = None, as_json: AsJson = False) -> None:
    """Which locked files and bases no longer exist upstream. 1 if any is gone or could not be asked for."""
    from bridge.launch.image import index, look, mirror, store

    source = store.open_source(file)
    found = mirror.check(source, name, index.Index(index.index_url()))
    _print_json(found) if as_json else look.print_check(found)
    if not found["ok"]:
        raise typer.Exit(1)
