#!/usr/bin/env bash
# A real Slurm on this one machine, for trying and testing: see docs/devcluster.md.
# Everything of it lives in one folder: it can neither meet nor harm a Slurm, MariaDB or munge that it did not start.
set -euo pipefail
umask 022
export LC_ALL=C

usage="usage: cluster.sh up [--no-accounting] | down [--keep] | start DAEMON | stop DAEMON | kill DAEMON
DAEMON: munged mariadbd slurmdbd slurmctld n1 n2
state folder: \$BRIDGE_DEVCLUSTER, else /var/lib/bridge-devcluster"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
chosen=${BRIDGE_DEVCLUSTER:-/var/lib/bridge-devcluster}
state=$(realpath -m -- "$chosen") # one spelling, because pid_of looks for it in command lines
conf=$state/etc/slurm.conf
system_conf=/etc/slurm/slurm.conf
no_accounting=$state/no-accounting # is there if the cluster was made so
# Reached through a link: a name that Slurm makes itself would be that of every other Slurm of this machine.
cgroup=/sys/fs/cgroup/memory/devcluster${state//\//:}
path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# Daemons and clients see nothing of the caller's shell: `up` may be run from inside a job of another Slurm.
clean=(env -i PATH="$path" HOME=/root SLURM_CONF="$conf" MYSQL_UNIX_PORT="$state/run/mariadb.socket")
client=(timeout 20 "${clean[@]}")
PATH=$path
began=${EPOCHREALTIME/./}

say() { # with the seconds since the start
  local tenths=$(((${EPOCHREALTIME/./} - began) / 100000))
  printf '%5d.%d s  %s\n' $((tenths / 10)) $((tenths % 10)) "$*"
}
refuse() { echo "devcluster: $*" >&2; exit 2; }
fail() { echo "devcluster: $*" >&2; exit 1; }

need_root() { [ "$(id -u)" = 0 ] || refuse "only root can start or stop it; use sudo, as in: sudo make cluster-up"; }

# Slurm's files know no quoting, a socket's path has at most 107 bytes, and `down` removes this folder.
check_state_folder() {
  [[ $chosen == /* && $state =~ ^(/[A-Za-z0-9._-]+){2,}$ && ${#state} -le 60 ]] ||
    refuse "BRIDGE_DEVCLUSTER must be like /var/lib/NAME (letters, digits and ._- only, at most 60 long), not '$chosen'"
  [[ ! -e $state || -e $state/base-port || -z $(ls -A "$state" 2>&1) ]] ||
    refuse "$state exists and is no state folder of this program; choose another with BRIDGE_DEVCLUSTER"
}

# Locked is the folder above, because `down` removes the state folder, and a removed lock file locks nothing.
take_lock() {
  exec 9<"$(dirname "$state")"
  flock -n 9 || { say "waiting for another up or down to end" && flock 9; }
}

install_packages() {
  local program missing=() database=(mariadb-server-core mariadb-client-core)
  for program in munged mariadb mariadbd mariadb-install-db my_print_defaults slurmdbd slurmctld slurmd sbatch sacct; do
    command -v "$program" >/dev/null || missing+=("$program")
  done
  ((${#missing[@]})) || return 0
  command -v apt-get >/dev/null ||
    refuse "not found: ${missing[*]}; this is no Debian or Ubuntu: install Slurm, slurmdbd, munge and MariaDB by hand"
  say "installing Debian packages (missing: ${missing[*]})"
  local log
  log=$(mktemp --suffix=.devcluster-apt.log)
  {
    apt-get update
    # Older releases have these under names with a version. The core packages start no server of the system.
    apt-cache show "${database[@]}" >/dev/null 2>&1 || database=(mariadb-server)
    # --no-remove: MariaDB must not push out a MySQL that somebody uses.
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends --no-remove \
      -o DPkg::Lock::Timeout=300 slurm-wlm slurmdbd munge "${database[@]}"
  } >"$log" 2>&1 9>&- || fail "apt-get failed: $(tail -n 1 "$log") (all of it: $log)"
  rm "$log"
}

# Prints the first of the ports that the cluster takes: ten in a row where nobody listens, below the ephemeral range, and
# that no other cluster has taken which is just being started.
free_ports() {
  local base port taken
  for base in {26800..27700..10}; do
    taken=/run/lock/bridge-devcluster-$base
    [[ ! -e $taken || -e $(<"$taken")/base-port ]] || rm -f "$taken" # its cluster is gone
    (set -o noclobber && echo "$state" >"$taken") 2>/dev/null || continue
    for port in $(seq "$base" $((base + 9))); do
      (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null && continue 2
    done
    echo "$base" && return
  done
  fail "no ten free ports between 26800 and 27709"
}

# Can the kernel hold jobs to their memory? Needs version 1 of cgroups, with the limit on swap, and the right to use it.
make_cgroup() {
  mkdir "$cgroup" 2>/dev/null || [ -d "$cgroup" ] || return 1
  { [ -e "$cgroup/memory.memsw.limit_in_bytes" ] && (echo "$BASHPID" >"$cgroup/cgroup.procs"); } 2>/dev/null ||
    { remove_cgroup && return 1; }
}

remove_cgroup() { [ ! -d "$cgroup" ] || find "$cgroup" -depth -type d -exec rmdir {} \; 2>/dev/null || true; }

prepare() {
  mkdir -p "$state" && touch "$state/base-port"
  mkdir -p "$state"/{etc,log,run,tmp,cgroup,spool/{slurmctld,n1,n2}}
  [ -s "$state/base-port" ] || (flock 8 && free_ports >"$state/base-port") 8>/run/lock/bridge-devcluster
  local base file accounting=accounting cgroups=cgroups
  base=$(<"$state/base-port")
  [ ! -e "$no_accounting" ] || accounting=no-accounting
  # A cluster keeps the way it was made with: daemons that disagree would fail every job.
  if { [ ! -e "$conf" ] || [ -L "$state/cgroup/memory" ]; } && make_cgroup; then
    ln -sfn "$cgroup" "$state/cgroup/memory"
    say "memory: the kernel kills what takes more than its job asked for"
  else
    cgroups=no-cgroups
    rm -f "$state/cgroup/memory"
    say "memory: no cgroups (version 1) to use, so Slurm looks every 2 s and kills jobs that take more than they asked for"
  fi
  (umask 077 && touch "$state/etc/slurmdbd.conf") # slurmdbd insists
  for file in slurm.conf slurmdbd.conf cgroup.conf; do
    sed -E -e "s/^\[($accounting|$cgroups)\] //; /^\[/d" \
      -e "s|@STATE@|$state|g; s|@PORT_SLURMCTLD@|$base|; s|@PORT_SLURMDBD@|$((base + 1))|" \
      -e "s|@PORT_N1@|$((base + 2))|; s|@PORT_N2@|$((base + 3))|" "$here/$file.in" >"$state/etc/$file"
  done
  # Both are made aside and renamed: a kill in the middle leaves no half key and no half database.
  if [ ! -e "$state/etc/munge.key" ]; then
    (umask 077 && head -c 1024 /dev/urandom >"$state/etc/munge.key.new")
    mv "$state/etc/munge.key.new" "$state/etc/munge.key"
  fi
  if [[ ! -e $no_accounting && ! -e $state/mariadb ]]; then
    rm -rf "$state/mariadb.new"
    (umask 077 && mkdir "$state/mariadb.new")
    # A MariaDB that starts empties its folder for temporary files: two may not share one.
    TMPDIR=$state/tmp mariadb-install-db --no-defaults --user=root --datadir="$state/mariadb.new" --skip-test-db --skip-name-resolve \
      --innodb-log-file-size=16M >"$state/log/mariadb-install-db.log" 2>&1 ||
      fail "mariadb-install-db failed: see $state/log/mariadb-install-db.log"
    mv "$state/mariadb.new" "$state/mariadb"
    say "database made"
  fi
}

program_of() { case $1 in n1 | n2) echo slurmd ;; *) echo "$1" ;; esac; }

# The number in a pid file may by now belong to a stranger, or to a zombie.
is_ours() { # DAEMON PID
  [ "$(cat "/proc/$2/comm" 2>/dev/null)" = "$(program_of "$1")" ] &&
    [[ "$({ tr '\0' ' ' <"/proc/$2/cmdline"; } 2>/dev/null)" == *"$state/"* ]]
}

pid_of() { # DAEMON: prints its pid if it lives
  local pid
  { read -r pid <"$state/run/$1.pid"; } 2>/dev/null && is_ours "$1" "$pid" && echo "$pid"
}

answers() { # DAEMON: it lives and does its work. Needs no root.
  local node
  pid_of "$1" >/dev/null || return 1
  case $1 in
    munged) "${client[@]}" munge --socket="$state/run/munge.socket" --no-input >/dev/null 2>&1 ;;
    mariadbd) [ -S "$state/run/mariadb.socket" ] ;;
    slurmdbd) "${client[@]}" sacctmgr --noheader show cluster >/dev/null 2>&1 ;;
    slurmctld) "${client[@]}" scontrol ping 2>/dev/null | grep -q ' UP$' ;;
    *) node=$(node_state "$1") && [[ -n $node && ! $node =~ ^(down|drain|inval|fail|unk)|\*$ ]] ;; # "*": silent
  esac
}

node_state() { "${client[@]}" sinfo --noheader --nodes="$1" --partition=debug --format=%T 2>/dev/null; }

all_answer() {
  local name
  for name in "${daemons[@]}"; do answers "$name" || return 1; done
}

spawn() { # DAEMON PROGRAM ARGUMENTS…: in a session of its own, without our lock
  local name=$1
  shift
  (cd "$state" && exec "${clean[@]}" setsid "$@" </dev/null >"$state/log/$name.out" 2>&1 9>&-) &
  echo $! >"$state/run/$name.pid"
}

launch() { # DAEMON
  local run=$state/run
  case $1 in
    munged)
      rm -f "$run"/munge.socket*
      spawn munged munged --foreground --key-file="$state/etc/munge.key" --socket="$run/munge.socket" \
        --pid-file="$run/munged.pid" --seed-file="$run/munge.seed"
      ;;
    mariadbd)
      rm -f "$run/mariadb.socket"
      spawn mariadbd mariadbd --no-defaults --user=root --datadir="$state/mariadb" --tmpdir="$state/tmp" --socket="$run/mariadb.socket" \
        --skip-networking --pid-file="$run/mariadbd.pid" --innodb-log-file-size=16M --innodb-buffer-pool-size=64M \
        --innodb-lock-wait-timeout=900 --innodb-flush-log-at-trx-commit=0
      ;;
    slurmdbd)
      # It can make its database itself, but Debian 13's then stops with an error.
      "${client[@]}" mariadb --no-defaults --execute="CREATE DATABASE IF NOT EXISTS slurm" || true
      spawn slurmdbd slurmdbd -D "$state/" # it takes no arguments; the folder is there for is_ours
      ;;
    slurmctld)
      # It refuses to start without a cluster in the accounting; adding it a second time changes nothing.
      [ -e "$no_accounting" ] || "${client[@]}" sacctmgr --immediate add cluster devcluster >/dev/null 2>&1 || true
      spawn slurmctld slurmctld -D -f "$conf"
      ;;
    *)
      # Nothing may start on a node that was given up before its new slurmd has ended what still runs there: a job that
      # was requeued meanwhile, and came back within that second, would fail with "Job credential revoked".
      [[ $(node_state "$1") != down* ]] || "${client[@]}" scontrol update "nodename=$1" state=drain reason=return || true
      spawn "$1" slurmd -D -N "$1" -f "$conf"
      ;;
  esac
}

await() { # DAEMON
  local name=$1 start=$SECONDS
  while ((SECONDS < start + 60)); do
    ! answers "$name" || return 0
    # In its first moments it is still a shell and not yet the daemon.
    ((SECONDS < start + 3)) || pid_of "$name" >/dev/null || break
    # A node keeps what put it down (lost, drained, invalid) until somebody says otherwise.
    if [[ $name == n? && $(node_state "$name") =~ ^(down|drain|inval|fail)[a-z]*$ ]]; then
      sleep 2 # see launch
      "${client[@]}" scontrol update "nodename=$name" state=resume 2>/dev/null || true
    fi
    sleep 0.1
  done
  local out=$state/log/$name.out
  fail "$name does not come up (try: make cluster-down cluster-up); see $out:" \
    "$({ grep -iE 'fatal|error' "$out" || cat "$out"; } | tail -n 3)"
}

start() { # DAEMON
  if ! pid_of "$1" >/dev/null; then
    launch "$1"
    await "$1"
    say "$1 started"
  elif ! answers "$1"; then
    await "$1"
    say "$1 answers again"
  fi
}

up() {
  if all_answer; then
    say "already up"
  else
    need_root
    # One at a time, also of clusters in other folders: apt waits for no other.
    (flock 8 && install_packages) 8>/run/lock/bridge-devcluster
    prepare
    local name
    for name in "${daemons[@]}"; do start "$name"; done
    say "up: nodes n1 and n2, partitions debug, short, lowprio and scavenge; everything is in $state"
  fi
  # Without another Slurm, plain squeue and sacct work in every shell.
  if [[ $(id -u) == 0 && ! -e $system_conf && ! -L $system_conf ]]; then
    mkdir -p "$(dirname "$system_conf")" && { ln -s "$conf" "$system_conf" 2>/dev/null || true; } # another may be faster
  fi
  [ "$(readlink "$system_conf")" = "$conf" ] || say "$system_conf is not ours: every shell needs the next line"
  echo "export SLURM_CONF=$conf"
}

# Pids of our jobs, and of the slurmstepd of each: a killed slurmd or slurmctld leaves them behind.
job_pids() {
  local file pid
  { grep -lzxF "SLURM_CONF=$conf" /proc/[0-9]*/environ 2>/dev/null || true; } | while read -r file; do
    pid=${file//[^0-9]/}
    if grep -qzs '^SLURMD_NODENAME=' "$file" || [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = slurmstepd ]; then
      echo "$pid"
    fi
  done
}

stop_jobs() {
  local tries jobs pids
  if answers slurmctld; then
    jobs=$({ "${client[@]}" squeue --noheader --format=%A || true; } | sort -u)
    [ -z "$jobs" ] || say "cancelling $(wc -w <<<"$jobs") jobs"
    # shellcheck disable=SC2086 # one word a job
    [ -z "$jobs" ] || "${client[@]}" scancel $jobs || true
  fi
  for tries in {1..50}; do
    pids=$(job_pids)
    [ -n "$pids" ] || return 0
    # shellcheck disable=SC2086 # one word a pid
    ((tries < 30)) || kill -9 $pids 2>/dev/null || true
    sleep 0.1
  done
}

stop() { # DAEMON SIGNAL
  local pid tries
  pid=$(pid_of "$1") || return 0
  kill -s "$2" "$pid" 2>/dev/null || true
  for tries in {1..150}; do
    # Not pid_of: a daemon removes its pid file before it ends.
    is_ours "$1" "$pid" || { say "$1 stopped" && return 0; }
    ((tries != 100)) || kill -9 "$pid" 2>/dev/null || true
    sleep 0.1
  done
  fail "$1 (pid $pid) does not stop"
}

one_daemon() { # start|stop|kill DAEMON
  [[ -e $state && " ${daemons[*]} " == *" $2 "* ]] || refuse "there is no daemon '$2' in $state"
  need_root
  case $1 in
    start) start "$2" ;;
    stop) stop "$2" TERM ;;
    kill) stop "$2" KILL ;;
  esac
}

down() { # [--keep]
  if [ -e "$state" ]; then
    need_root
    local i
    stop_jobs
    for ((i = ${#daemons[@]} - 1; i >= 0; i--)); do stop "${daemons[i]}" TERM; done
    remove_cgroup
    [ "${1:-}" = --keep ] || rm -rf "$state"
    say "down"
  else
    say "already down"
  fi
  [ "$(readlink "$system_conf")" != "$conf" ] || rm -f "$system_conf"
}

case "$*" in
  up | "up --no-accounting" | down | "down --keep") ;;
  start\ * | stop\ * | kill\ *) (($# == 2)) || refuse "$usage" ;;
  *) refuse "$usage" ;;
esac
check_state_folder
[ -d "$(dirname "$state")" ] || { need_root && mkdir -p "$(dirname "$state")"; }
take_lock
if [[ $* == "up --no-accounting" && ! -e $no_accounting ]]; then
  [ ! -e "$state/base-port" ] || refuse "$state was made with accounting; take it down first, or choose another folder"
  need_root && mkdir -p "$state" && touch "$state/base-port" "$no_accounting"
fi
daemons=(munged mariadbd slurmdbd slurmctld n1 n2) # in the order of starting
[ ! -e "$no_accounting" ] || daemons=(munged slurmctld n1 n2)
case $1 in
  up | down) "$1" "${2:-}" ;;
  *) one_daemon "$@" ;;
esac
