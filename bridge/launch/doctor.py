"""Is this machine, or this cluster, ready? Each check with its remedy."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bridge.config.profile import Profile
from bridge.config.stages import MEMORY
from bridge.errors import UserError, WorkFailedError
from bridge.launch import nodes
from bridge.launch.nodes import Problem, Wish
from bridge.launch.prepare import load_profile
from bridge.launch.script import resource_options, site_environment

PACKAGES = ("torch", "transformers", "tokenizers", "submitit", "pyarrow", "safetensors")
FREE_GB = 2.0  # the demo needs far less; training runs far more
NO_FLOCK = "choose a runs folder with --runs or BRIDGE_RUNS where file locks work (Lustre: mounted with `-o flock`)"
IMAGE_MEMORY = "4G"  # enough to import vLLM
IMMEDIATE, AT_MOST = 15, 40  # seconds to wait for a free node, and to work there; together below the limit of a call


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `ok` with a remedy is a hint: nothing is wrong, but it is worth knowing."""

    name: str
    ok: bool
    found: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _check(name: str, ok: bool, found: str, remedy: str) -> Check:
    return Check(name, ok, found, "" if ok else remedy)


def examine(profile_name: str, runs: Path) -> list[Check]:
    """All checks for a profile; none of them changes anything."""
    profile = load_profile(profile_name)
    checks = [_python(), _runs_folder(runs), _locks(runs), _disk(runs)]
    if profile.cluster == "local":
        return [*checks, *_packages(profile), _cores(profile)]
    return [*checks, *_slurm(profile, runs)]


def print_checks(checks: list[Check]) -> None:
    """One line per check, and the remedy below what failed."""
    for check in checks:
        word = "FAIL" if not check.ok else "note" if check.remedy else "ok  "
        sys.stdout.write(f"{word}  {check.name}: {check.found}\n")
        if check.remedy:
            sys.stdout.write(f"      → {check.remedy}\n")


# ---- this machine


def _python() -> Check:
    version = sys.version.split()[0]
    return _check("python", sys.version_info >= (3, 10), version, "install Python 3.10 or newer")


def _place(runs: Path) -> Path:
    """The runs folder, or the folder in which it would be made."""
    return next(p for p in (runs, *runs.parents) if p.exists())


def _runs_folder(runs: Path) -> Check:
    try:
        with tempfile.TemporaryFile(dir=_place(runs)):
            return Check("runs folder", True, f"{runs} can be written")
    except OSError as error:
        return Check("runs folder", False, f"{runs}: {error.strerror}", "choose another with --runs or BRIDGE_RUNS")


def _locks(runs: Path) -> Check:
    try:
        with tempfile.TemporaryFile(dir=_place(runs)) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return Check("file locks", True, "work in the runs folder")
    except OSError as error:
        return Check("file locks", False, f"{runs}: {error.strerror}", NO_FLOCK)


def _disk(runs: Path) -> Check:
    place = _place(runs)
    free = shutil.disk_usage(place).free / 1e9
    return _check("disk", free >= FREE_GB, f"{free:.1f} GB free at {place}", "make room, or choose another runs folder")


def _cores(profile: Profile) -> Check:
    return Check("cores", True, f"{profile.cpus or os.cpu_count()} for all elements together")


# Prints what the Python of the jobs has, and whether it sees a lock that another machine holds.
PROGRAM = f"""
import fcntl, importlib.metadata as m, json, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
print("@packages", json.dumps({{name: version(name) for name in {PACKAGES!r}}}), flush=True)
for path in sys.argv[1:]:
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            print("@lock unseen")
        except BlockingIOError:
            print("@lock seen")
"""


def _packages(profile: Profile) -> Iterator[Check]:
    """What the Python of the jobs has on this machine."""
    python = profile.python or sys.executable
    try:
        done = subprocess.run([python, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield Check("python of the jobs", False, f"{python}: {error}", "set `python` in the profile to one that runs")
        return
    yield Check("python of the jobs", True, python)
    yield from _versions(_answers(done.stdout)["packages"])


def _versions(text: str) -> Iterator[Check]:
    remedy = "install bridge-rl with its extra `train` in the Python of the jobs"
    for package, version in json.loads(text).items():
        yield _check(package, version is not None, version or "not installed", remedy)


def _answers(text: str) -> dict[str, str]:
    """Lines `@NAME VALUE` among whatever else was printed."""
    return {m[1]: m[2] for m in re.finditer(r"^@(\w+) (.*)$", text, re.MULTILINE)}


# ---- the cluster


def _slurm(profile: Profile, runs: Path) -> Iterator[Check]:
    from bridge.launch import slurm

    missing = [name for name in ("sbatch", "srun", "squeue", "sinfo", "scancel", "scontrol") if not shutil.which(name)]
    yield _check("slurm commands", not missing, f"missing: {missing}" if missing else "found", "run on a login node")
    if missing:
        return
    if profile.slurm_conf and not Path(profile.slurm_conf).is_file():  # Slurm itself would look for it for a minute
        remedy = "is this the right machine? else correct `slurm_conf` in the profile"
        yield Check("slurm controller", False, f"slurm_conf: {profile.slurm_conf} does not exist", remedy)
        return
    try:
        config = read_config(slurm.call(profile, ["scontrol", "show", "config"]))
        there = nodes.read_nodes(slurm.call(profile, ["sinfo", "-h", "-a", "-e", "-o", nodes.SINFO]))
    except WorkFailedError as error:
        yield Check("slurm controller", False, str(error), "is slurmctld up? is `slurm_conf` in the profile right?")
        return
    yield Check("slurm controller", True, f"answers; Slurm {config.get('SLURM_VERSION', '?')}")
    yield _accounting(profile, config)
    wishes = nodes.wishes(profile)
    names = ", ".join(dict.fromkeys(n.partition for n in there))
    yield from _topic("partitions", names, (nodes.partition_problems(wish, there) for wish in wishes))
    limits = (nodes.time_problems(wish, there, profile.warn) for wish in wishes)
    yield from _topic("time", "within the limits of the partitions", limits)
    yield _warning(profile, config)
    yield from _topic("gpus", nodes.gpus(there), (nodes.gpu_problems(wish, there) for wish in wishes))
    if named := " ".join(wish.need.constraint for wish in wishes if wish.need.constraint):
        yield from _topic("constraint", named, (nodes.feature_problems(wish, there) for wish in wishes))
    yield from _memory(wishes, config)
    accepted = "accepts what each kind of stage asks for (--test-only)"
    yield from _topic("sbatch", accepted, (_refusals(profile, wish) for wish in wishes))
    limit = int(config.get("MaxArraySize", "0"))
    remedy = f"set `max_array: {limit}` in the profile"
    yield _check("array limit", (profile.max_array or 0) <= limit, f"MaxArraySize {limit}", remedy)
    yield from _secrets(profile)
    yield from _probe(profile, wishes, runs)
    yield from _images(profile, wishes)


def read_config(text: str) -> dict[str, str]:
    """What `scontrol show config` printed."""
    return {m[1]: m[2] for m in re.finditer(r"^(\w+)\s*= (.*?)\s*$", text, re.MULTILINE)}


def _topic(name: str, fine: str, found: Iterable[Iterable[Problem]]) -> Iterator[Check]:
    """One check for each problem, or one that says that all is well."""
    problems = [problem for several in found for problem in several]
    for problem in problems:
        yield Check(name, False, problem.found, problem.remedy)
    if not problems:
        yield Check(name, True, fine)


def _accounting(profile: Profile, config: Mapping[str, str]) -> Check:
    from bridge.launch import slurm

    try:
        slurm.call(profile, ["sacct", "-X", "-n", "-S", "now"])
    except WorkFailedError as error:
        remedy = "everything works without it, but how a job ended is known only while the controller remembers it "
        remedy += f"(MinJobAge {config.get('MinJobAge', '?')}); ask the administrators for slurmdbd"
        return Check("accounting", False, str(error), remedy)
    return Check("accounting", True, "answers")


def _warning(profile: Profile, config: Mapping[str, str]) -> Check:
    kill = f"TERM at the limit, KILL {config.get('KillWait', '?')} later"
    if profile.warn == 0:
        remedy = "set `warn` above 0: a stage that is not told in time is not requeued"
        return Check("warning", True, f"none before the time limit; {kill}", remedy)
    return Check("warning", True, f"USR2 {profile.warn} s before the time limit; {kill}")


def _memory(wishes: Sequence[Wish], config: Mapping[str, str]) -> Iterator[Check]:
    """Without a size and without a default of the cluster, one small job takes the memory of a whole node."""
    unnamed = [wish.who for wish in wishes if not any(getattr(wish.need, form) for form in MEMORY)]
    default = next((config[key] for key in ("DefMemPerNode", "DefMemPerCPU") if key in config), "")
    if unnamed and "MEMORY" in config.get("SelectTypeParameters", "") and default == "UNLIMITED":
        said = f"{', '.join(unnamed)}: none is named, and the cluster's default is all of a node"
        yield Check("memory", True, said, "set `defaults.mem` in the profile, or nothing else fits beside a job")


YOURS = "`sacctmgr show assoc user=$USER format=account,partition,qos` lists what you may use"
REFUSALS = {
    "account": YOURS,
    "qos": YOURS,
    "partition": "change `partition`",
    "time limit": "lower `time`",
    "node configuration": "no node has so many `cpus`, `gpus` or so much memory; see `sinfo -o '%P %c %m %G'`",
    "feature": "change `constraint`",
    "gres": "change `gpus` or `gpu_option`",
}
"""What sbatch says when it refuses → what to do."""


def _refusals(profile: Profile, wish: Wish) -> Iterator[Problem]:
    """Whether sbatch would take a wish; it is asked, and nothing is submitted."""
    from bridge.launch import slurm

    fixed = ["--test-only", "--array=0", "--requeue", f"--signal=USR2@{profile.warn}", "--wrap=true"]
    words = [part for option in resource_options(wish.need) for part in shlex.split(option)]
    try:
        slurm.call(profile, ["sbatch", *fixed, *words])
    except WorkFailedError as error:
        said = str(error).removeprefix("sbatch: ")
        known = (remedy for word, remedy in REFUSALS.items() if word in said.lower())
        yield Problem(f"{wish.who}: {said}", next(known, f"change one of: {' '.join(words)}"))


def _secrets(profile: Profile) -> Iterator[Check]:
    from bridge.launch import slurm

    names = [*profile.secrets, *([profile.secrets_file] if profile.secrets_file else [])]
    try:
        slurm.require_secrets(profile, "")
    except UserError as error:
        said, _, remedy = str(error).removeprefix("profile : ").partition("; ")
        yield Check("secrets", False, said, remedy or "write it, with lines NAME=VALUE and mode 0600")
        return
    if names:
        yield Check("secrets", True, f"{', '.join(names)} found")


# ---- one job on one node

PROBE = """
exec 2>&1
{site}say() {{ printf '@%s %s\\n' "$@"; }}
say node "${{SLURMD_NODENAME:-$(hostname)}}"
[ "$(cat -- {folder}/from-login)" = {word} ] && say reads yes
printf %s {word} > {folder}/from-node && say writes yes
for place in {scratch}; do [ -d "$place" ] && [ -w "$place" ] && say scratch yes; done
for file in {secrets}; do [ -r "$file" ] && say secrets yes; done
{setup}
{python} -c {program} {folder}/lock
true
"""


def _probe(profile: Profile, wishes: Sequence[Wish], runs: Path) -> Iterator[Check]:
    """What a node sees and can do: the only check that runs a job, for a few seconds, and only where a node is free."""
    wish, place, word = wishes[0], _place(runs), secrets.token_hex(8)
    try:
        with tempfile.TemporaryDirectory(prefix=".bridge-doctor-", dir=place) as name:
            folder = Path(name)
            (folder / "from-login").write_text(word, encoding="utf-8")
            with (folder / "lock").open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                said, complaint = _on_a_node(profile, wish, probe_script(profile, wish, folder, word))
            shared = "reads" in said and "writes" in said and _appears(folder / "from-node", word)
    except OSError as error:  # told by the checks of the runs folder and of file locks
        yield Check("a node", True, f"not tried: {place}: {error.strerror}", "make the runs folder work first")
        return
    if "node" not in said:
        remedy = "whether nodes see the runs folder and run Python is not known; call doctor again when one is free"
        yield Check("a node", True, f"could not be tried: {complaint}", remedy)
        return
    node, python = said["node"], profile.python or sys.executable
    yield Check("a node", True, f"{node} ran a job")
    found = f"{place} is shared with {node}" if shared else f"{node} does not see {place}, or cannot write there"
    remedy = "choose with --runs or BRIDGE_RUNS a folder that login and compute nodes share"
    yield _check("runs folder on the node", shared, found, remedy)
    if shared and "lock" in said:
        found = f"{node} {'sees' if said['lock'] == 'seen' else 'does not see'} the locks of this machine"
        yield _check("file locks on the node", said["lock"] == "seen", found, NO_FLOCK)
    if wish.need.scratch:
        found = f"{wish.need.scratch} {'can' if 'scratch' in said else 'is no folder that can'} be written on {node}"
        yield _check("scratch", "scratch" in said, found, f"change {wish.at('scratch')}")
    if profile.secrets_file:
        found = f"{node} {'reads' if 'secrets' in said else 'cannot read'} {profile.secrets_file}"
        yield _check("secrets on the node", "secrets" in said, found, "move it to a folder that the nodes share")
    remedy = "set `python` in the profile to one that runs there, and `setup` to what it needs (`module load …`)"
    found = f"{python} on {node}" + ("" if "packages" in said else f": {complaint or 'does not run'}")
    yield _check("python of the jobs", "packages" in said, found, remedy)
    yield from _versions(said.get("packages", "{}"))


def probe_script(profile: Profile, wish: Wish, folder: Path, word: str) -> str:
    """What the node is asked to do: bash that prints lines `@NAME VALUE`."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in (profile.env | wish.need.env).items()]
    return PROBE.format(
        site=site_environment(),
        folder=shlex.quote(str(folder)),
        word=word,
        scratch=shlex.quote(wish.need.scratch) if wish.need.scratch else "",
        secrets=shlex.quote(profile.secrets_file) if profile.secrets_file else "",
        setup="\n".join([*exports, *profile.setup, *wish.need.setup]),
        python=shlex.quote(profile.python or sys.executable),
        program=shlex.quote(PROGRAM),
    )


# ---- each image on one node


def _images(profile: Profile, wishes: Sequence[Wish]) -> Iterator[Check]:
    """Whether a node starts each image that the profile names, what is in it, and whether that can be imported."""
    from bridge.launch import runtime, slurm

    ways = {wish.need.runtime: wish for wish in wishes if wish.need.runtime not in (None, "none", "pyxis")}
    for (way, wish), name in itertools.product(ways.items(), profile.images):
        try:
            image = runtime.find(name, profile, {})
        except UserError as error:
            yield Check(f"image {name}", False, str(error), "correct `images` in the profile")
            continue
        words = runtime.look_words(image, way, wish.need.gpus or 0, "imports")
        memory = [f"--mem={IMAGE_MEMORY}"] if wish.need.mem else []
        command = ["srun", f"--immediate={IMMEDIATE}", "-n1", "-c1", "-t5", "--job-name=bridge-doctor", "--chdir=/"]
        enter = ["bash", "-c", f'{site_environment()}"$@"', "-"]
        where = [f"--{key}={value}" for key in ("partition", "account", "qos") if (value := getattr(wish.need, key))]
        try:
            printed = slurm.call(profile, [*command, *where, *memory, *enter, *words], 300)
        except WorkFailedError as error:
            said = _said(error)
            if "Unable to allocate resources" in said:  # it was not started: nothing is known of it
                remedy = "call doctor again when a node is free"
                yield Check(f"image {name}", True, f"could not be tried: {said}", remedy)
                continue
            remedy = f"is {way} on the nodes, and can you read {image.place} there? else correct `runtime`, `images`"
            yield Check(f"image {name}", False, f"{way}: {said}", remedy)
            continue
        yield from image_checks(name, runtime.answer(printed))


def image_checks(name: str, found: Mapping[str, Any] | None) -> Iterator[Check]:
    """What inside.py found, as checks: the packages against the lock that is in the image, and each import."""
    if found is None:
        yield Check(f"image {name}", False, "its Python said nothing", "build the image again")
        return
    locked, packages = found["locked"], found["packages"]
    wrong = [
        f"{key} {packages.get(key, 'missing')}, not {want}" for key, want in locked.items() if packages.get(key) != want
    ]
    wrong += [f"{key} {packages[key]}, not in the lock" for key in packages.keys() - locked.keys() - {"pip"}]
    good = f"Python {found['python']}, {len(packages)} packages, as locked"
    said = "; ".join(wrong[:10]) if locked else "it holds no list of what was installed"
    yield _check(f"image {name}", bool(locked) and not wrong, said if wrong or not locked else good, "build it again")
    for package, (fine, words) in found["imports"].items():
        yield _check(f"image {name}: {package}", fine, words, "build the image again; see docs/containers.md")
    if "flash-attn" not in packages:
        yield Check(f"image {name}: flash_attn", True, "left out", "training then uses torch's own attention")


def _said(error: WorkFailedError) -> str:
    """What srun complained of, without its name and its note that the job waits."""
    waits = r"job \d+ (queued and waiting for|has been allocated) resources"
    return re.sub(rf"srun: ({waits}|error:)?\s*", "", str(error))


def _on_a_node(profile: Profile, wish: Wish, script: str) -> tuple[dict[str, str], str]:
    """What the script answered on a node, and the last of whatever else was printed. Waits 15 s for a free node."""
    from bridge.launch import slurm

    words = [f"--{name}={value}" for name in ("partition", "account", "qos") if (value := getattr(wish.need, name))]
    # The smallest job that the site's own way of asking for memory allows: without any, it may take a whole node.
    words += [f"--{form.replace('_', '-')}=512M" for form in ("mem", "mem_per_cpu") if getattr(wish.need, form)]
    command = ["srun", f"--immediate={IMMEDIATE}", "-n1", "-c1", "-t1", "--job-name=bridge-doctor", "--chdir=/"]
    try:
        limited = ["timeout", str(AT_MOST), "bash", "-c", script]
        printed = slurm.call(profile, [*command, "--input=none", *words, *limited])
    except WorkFailedError as error:
        late = f"no end within {AT_MOST} s; does a line of `setup` wait for something?"
        return {}, late if "exit code 124" in str(error) else _said(error)
    rest = [line for line in printed.splitlines() if line.strip() and not line.startswith("@")]
    return _answers(printed), rest[-1] if rest else ""


def _appears(path: Path, word: str) -> bool:
    """Whether what a node wrote is seen here; a network file system may take a moment."""
    for _ in range(20):
        try:
            if path.read_text(encoding="utf-8") == word:
                return True
        except OSError:
            pass
        time.sleep(0.25)
    return False
