#!/bin/bash
# contain.sh NAME,NAME WORD...: become WORD... with the variables named, those of Slurm and of bridge-rl, and no other.
# It runs in each task: only there do Slurm's variables say which task it is.
set -u
keep=,$1,${BRIDGE_SECRETS:-},
shift
program=$(type -P -- "$1") || { echo "$1: there is no such program on $(uname -n): runtime of the profile" >&2; exit 1; }
# Apptainer, which is cleaned by --cleanenv, takes variables by another name, and so in no list of processes.
prefix=""
case $1 in apptainer | singularity) prefix=${1^^}ENV_ ;; esac
if [ -n "$prefix" ]; then
  # Where Slurm signals every process of a job (proctrack/linuxproc), the helper that keeps the image mounted would end
  # before the stage has saved, and the image with it.
  helpers=$(mktemp -d -- "${TMPDIR:-/tmp}/helpers.XXXXXX") || exit 1
  for name in squashfuse_ll squashfuse fuse-overlayfs; do
    real=$(type -P "$name") || continue
    printf '#!/bin/sh\ntrap "" HUP INT TERM USR1 USR2\nexec %q "$@"\n' "$real" >"$helpers/$name"
    chmod +x "$helpers/$name"
  done
  PATH=$helpers:$PATH
fi
for name in $(compgen -A function); do unset -f "$name"; done
for name in $(compgen -e); do
  case $name in
    APPTAINER* | SINGULARITY*) unset "$name" ;; # of the site's own profile, such as further binds
    SLURM_* | BRIDGE_*) [ -z "$prefix" ] || export "$prefix$name=${!name}" ;;
    *)
      if [[ $keep == *,$name,* ]]; then
        [ -z "$prefix" ] || export "$prefix$name=${!name}"
      elif [ -z "$prefix" ]; then
        unset "$name"
      else
        case ${name,,} in *_proxy | term) unset "$name" ;; esac # --cleanenv lets these through
      fi
      ;;
  esac
done
shift
exec "$program" "$@"
