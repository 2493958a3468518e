"""What sbatch is given for one array: the script, and the options that are not in it.

Pure text: `plan --scripts` prints what `launch` submits, byte for byte.

The script holds no path of the run: sbatch is called with `--chdir RUN/code`, and everything else is relative to that.
So no folder name, however hostile, is ever read by a shell.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from bridge.config.profile import MAX_ATTEMPTS, Allocation, Profile, processes
from bridge.config.stages import MEMORY, seconds
from bridge.graph import Array, ranges
from bridge.launch.container import Contained, Image, contained, shell

STEP = "srun --export=ALL --ntasks-per-node=1 "  # on each node; without the environment a step has no PATH
GPU_OPTION = "--gres=gpu:{gpus}"

# What a login finds on the node, `module` included, but nothing of the user's own files. A site's profile may set any
# variable and the umask, and Debian's replaces PATH. What only the launch knows, such as where srun is, comes last.
SITE = """\
kept=$({kept}) path=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
PATH=/usr/bin:/bin
. /etc/profile
eval "$kept"
export PATH="$PATH:$path"
"""

SCRIPT = """\
#!/bin/bash
{% for option in options -%}
#SBATCH {{ option }}
{% endfor %}
# The host side of the job. It runs in RUN/code, the snapshot of the code that belongs to this run.
{{ site }}set -u
{% for name, value in env -%}
export {{ name }}={{ value }}
{% endfor -%}
{% if secrets -%}
set -a && . {{ secrets }} && set +a || exit 1
{% if image -%}
BRIDGE_SECRETS=$(sed -nE 's/^ *(export +)?([A-Za-z_][A-Za-z0-9_]*)=.*/\\2/p' {{ secrets }} | paste -sd,)
export BRIDGE_SECRETS
{% endif -%}
{% endif -%}
{% if scratch -%}
TMPDIR=$(mktemp -d -- {{ scratch }}/bridge.XXXXXX) || exit 1
export TMPDIR
{% if nodes > 1 -%}
{{ each }}mkdir -p -m 700 -- "$TMPDIR" || exit 1
{% endif -%}
trap '{{ clean }}' EXIT
{% endif -%}
{% for line in setup -%}
{{ line }}
{% endfor -%}
{% if image -%}
cd -P .. && run=$PWD && cd code || exit 1
image={{ image }}
{{ each }}mkdir -p -- "$TMPDIR/home" || exit 1
{% if check -%}
{{ each }}bash bridge/launch/check_image.sh {{ check }} || exit 1
{% endif -%}
{% endif %}
# TERM comes from a cancel, which must not come back even if the stage has just asked for it, or from a preemption.
stopped=""
trap 'stopped=yes' TERM
trap : USR2

srun --export=ALL --cpus-per-task={{ cpus }} --unbuffered --kill-on-bad-exit=1 {{ srun }}{{ command }}
code=$?
{% if scratch and nodes > 1 -%}
{{ clean }} # now, because a job that is requeued has no nodes any more
trap - EXIT
{% endif %}
# 75: the stage saved its state and wants to go on. 140, 143: the warning came while Python was still starting. Only
# this element is requeued; the controller may be away for some minutes.
again=""
case $code in
  75) again=yes ;;
  140 | 143) [ "${SLURM_RESTART_COUNT:-0}" -ge {{ max_attempts }} ] || again=yes ;;
esac
for ((try = 0; try < 60; try++)); do
  [ -n "$again" ] && [ -z "$stopped" ] || break
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" && break
  sleep 5
done
exit "$code"
"""


def sbatch_options(folder: str, array: Array, dependency: str | None) -> list[str]:
    """What sbatch is told beside the script: all that holds a path of the run, or depends on other jobs.

    No shell reads these words, and a doubled % is a plain one to Slurm, so a folder may have any name. An array that
    waits for nothing of its own launch is held: it is let go when everything that waits for it is in the queue, so that
    no job can be over, and perhaps forgotten, before its children are tied to it.
    """
    words = ["--parsable", f"--chdir={folder}/code"]
    words.append(f"--output={folder.replace('%', '%%')}/logs/{array.stage}/%A_%a.host.log")
    if dependency:
        words.append(f"--dependency={dependency}")
    if is_root(array):
        words.append("--hold")
    return words


def site_environment(names: Sequence[str] = ()) -> str:
    """Lines of bash that give a job the environment of the site; the variables named stay as they are."""
    return SITE.format(kept="umask -p" + (f"; declare -px {' '.join(names)}" if names else ""))


def is_root(array: Array) -> bool:
    """Whether an array waits for no other array of its launch."""
    return all(after.array is None for after in array.after)


def minutes(time: str) -> int:
    """A limit such as `1h30m` in whole minutes, rounded up."""
    return -(-seconds(time) // 60)


def sbatch_script(
    run_id: str,
    array: Array,
    allocation: Allocation,
    profile: Profile,
    python: str,
    kind: str,
    image: Image | None = None,
) -> str:
    """The script of one array.

    Args:
        run_id: names the job, together with the stage.
        array: its elements and the numbers of their tasks.
        allocation: what one element gets.
        profile: how the cluster is used.
        python: path of the Python that runs the stage.
        kind: the kind of the stage.
        image: what the stage runs in, with the runtime of `allocation`; `python` is then a path inside.
    """
    from jinja2 import Environment, StrictUndefined

    template = Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(SCRIPT)
    throttle = f"%{profile.throttle}" if profile.throttle else ""
    options = [
        f"--job-name={run_id}/{array.name}",
        f"--array={ranges(sorted(array.tasks))}{throttle}",
        "--open-mode=append",
        "--export=ALL",  # sbatch has little (launch/slurm.py); a list of names would make slurmd run `su - USER` first
        "--requeue",
        "--kill-on-invalid-dep=yes",
        f"--signal=USR2@{profile.warn}",
        *resource_options(allocation),
    ]
    variables = {
        "LANG": "C.UTF-8",
        **({"SLURM_CONF": profile.slurm_conf} if profile.slurm_conf else {}),
        **profile.env,
        **allocation.env,
    }
    lines = [(name, shlex.quote(value)) for name, value in variables.items()]
    here = '"$(pwd -P)"' if image else '"$PWD"'
    lines += [("PYTHONPATH", here), ("SUBMITIT_EXECUTOR", "slurm"), ("BRIDGE_CPUS", str(allocation.cpus or 1))]
    nodes, together = allocation.nodes or 1, processes(kind, allocation)
    if nodes * together > 1:
        lines += [("BRIDGE_NODES", str(nodes)), ("BRIDGE_PROCESSES", str(together))]
    # submitit takes a % in a path for a pattern; by this name of the folder it sees none.
    folder = f"/proc/self/cwd/../scripts/{array.name}"
    how = Contained([], [python, "-u", "-m", "submitit.core._submit", folder])
    if image:
        names = [*profile.env, *allocation.env, *profile.secrets]
        how = contained(allocation.runtime or "none", image, allocation.binds, names, allocation.gpus or 0, how.command)
    scratch = allocation.scratch or ("/tmp" if image else None)
    return template.render(
        options=options,
        site=site_environment(profile.secrets),
        env=lines,
        secrets=shlex.quote(profile.secrets_file) if profile.secrets_file else None,
        scratch=shlex.quote(scratch) if scratch else None,
        nodes=nodes,
        each=STEP if nodes > 1 else "",
        clean='rm -rf -- "$TMPDIR"' + (f'; {STEP}rm -rf -- "$TMPDIR"' if nodes > 1 else ""),
        **(_image(image, profile.stage_image) if image else {"image": None}),
        max_attempts=allocation.max_attempts or MAX_ATTEMPTS,
        cpus=allocation.cpus or 1,  # since 22.05 a step no longer takes it over from the job
        setup=[*profile.setup, *allocation.setup],
        srun=f"{shell(how.srun)} " if how.srun else "",
        command=shell(how.command),
    )


def _image(image: Image, stage: bool) -> dict[str, str | None]:
    """Where the script finds the image, and what checks it before use (check_image.sh), as text for bash."""
    place, seen = shlex.quote(image.place), '"${TMPDIR%/*}/bridge-images-$UID"'
    if image.sha256 is None:
        return {"image": place, "check": None}
    check = f"{shlex.quote(image.checked)} {image.sha256} {seen}"
    if not stage or image.checked != image.place:
        return {"image": place, "check": check}
    copy = f"{seen}/{image.sha256}"
    return {"image": copy, "check": f"{check} {copy}"}


def resource_options(allocation: Allocation) -> list[str]:
    """What sbatch is asked for, for one element."""
    words = [
        f"--nodes={allocation.nodes or 1}",
        "--ntasks-per-node=1",  # torchrun starts the others
        f"--cpus-per-task={allocation.cpus or 1}",
    ]
    if allocation.gpus:
        words.append((allocation.gpu_option or GPU_OPTION).replace("{gpus}", str(allocation.gpus)))
    for name in MEMORY:  # one at most: `allocation` sees to that
        if value := getattr(allocation, name):
            words.append(f"--{name.replace('_', '-')}={value}")
    if allocation.time:
        words.append(f"--time={minutes(allocation.time)}")
    for name in ("partition", "account", "qos", "constraint"):
        if (value := getattr(allocation, name)) is not None:
            words.append(f"--{name}={shlex.quote(value)}")
    if allocation.exclusive:
        words.append("--exclusive")
    return words + allocation.sbatch
