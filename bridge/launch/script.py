"""The sbatch script of one array. Pure text: `plan --scripts` prints what `launch` submits, byte for byte.

The script holds no path of the run: sbatch is called with `--chdir RUN/code`, and everything else is relative to that.
So no folder name, however hostile, is ever read by a shell.
"""

from __future__ import annotations

import re
import shlex

from bridge.config.profile import Allocation, Profile
from bridge.graph import Array

SCRIPT = """\
#!/bin/bash
{% for option in options -%}
#SBATCH {{ option }}
{% endfor %}
# The host side of the job. It runs in RUN/code, the snapshot of the code that belongs to this run.
set -u
{% for name, value in env -%}
export {{ name }}={{ value }}
{% endfor -%}
{% for line in setup -%}
{{ line }}
{% endfor %}
# A cancelled job must not come back, even if the stage has just asked for it.
stopped=""
trap 'stopped=yes' TERM

srun --export=ALL --unbuffered --kill-on-bad-exit=1 {{ command }}
code=$?

# 75: the stage saved its state and wants to go on. Only this element is requeued.
if [ "$code" -eq 75 ] && [ -z "$stopped" ]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
fi
exit "$code"
"""


def minutes(time: str) -> int:
    """A limit such as `1h30m` in whole minutes, rounded up."""
    parts = re.findall(r"(\d+)([hms])", time)
    seconds = sum(int(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in parts)
    return -(-seconds // 60)


def sbatch_script(run_id: str, array: Array, allocation: Allocation, profile: Profile, python: str) -> str:
    """The script of one array.

    Args:
        run_id: names the job, together with the stage.
        array: which elements; task i is `array.elements[i]`.
        allocation: what one element gets.
        profile: how the cluster is used.
        python: path of the Python that runs the stage.
    """
    throttle = f"%{profile.throttle}" if profile.throttle else ""
    from jinja2 import Environment, StrictUndefined

    template = Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(SCRIPT)
    options = [
        f"--job-name={run_id}/{array.name}",
        f"--array=0-{len(array.elements) - 1}{throttle}",
        f"--output=../logs/{array.stage}/%A_%a.host.log",
        "--open-mode=append",
        "--export=NIL",
        "--requeue",
        "--kill-on-invalid-dep=yes",
        f"--signal=USR2@{profile.warn}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={allocation.cpus or 1}",
    ]
    if allocation.gpus:
        options.append(f"--gres=gpu:{allocation.gpus}")
    if allocation.mem:
        options.append(f"--mem={allocation.mem}")
    if allocation.time:
        options.append(f"--time={minutes(allocation.time)}")
    for name in ("partition", "account", "qos", "constraint"):
        value = getattr(allocation, name)
        if value is not None:
            options.append(f"--{name}={shlex.quote(value)}")
    options += allocation.sbatch
    env = {
        "LANG": "C.UTF-8",
        **({"SLURM_CONF": profile.slurm_conf} if profile.slurm_conf else {}),
        **profile.env,
    }
    # Slurm gives the login environment's PATH, which knows where srun is.
    lines = [("PATH", '"${PATH:+$PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"')]
    lines += [(name, shlex.quote(value)) for name, value in env.items()]
    lines += [("PYTHONPATH", '"$PWD"'), ("SUBMITIT_EXECUTOR", "slurm"), ("BRIDGE_CPUS", str(allocation.cpus or 1))]
    command = f"{shlex.quote(python)} -u -m submitit.core._submit ../scripts/{array.name}"
    return template.render(options=options, env=lines, setup=profile.setup, command=command)
