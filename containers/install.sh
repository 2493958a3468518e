#!/bin/sh
# All that is done inside the base, whichever recipe is built: system packages, Python 3.11 in /opt/venv, the lock.
#
# The recipes set
#   LOCK               which lock of locks/ is installed
#   FLASH_ATTN         GPU architectures that flash-attn is compiled for, such as 80;90, or 0 to leave it out
#   MAX_JOBS           compilers at once; each may take 9 GB
#   SOURCE_DATE_EPOCH  nothing in the image is younger
# /mnt, if something is there while building: `env`, lines NAME=VALUE that a site needs to reach its package index, and
# files that those name. It is mounted, not copied, and nothing of it stays.
set -eu

here=/opt/bridge
work=$here/work # removed at the end; beside the result, so that uv links files instead of copying them
venv=/opt/venv
lock_file=$here/locks/$LOCK.txt
uv=$work/uv/bin/uv
# The moment up to which files count: the same as in make_locks.py.
ubuntu_snapshot=20250425T000000Z
# uv knows the address and the hash of this build, and uv itself is locked by hash.
python=cpython-3.11.18-linux-x86_64-gnu
# The InfiniBand libraries are what NCCL needs to use more than TCP; the compilers are for Triton and DeepSpeed at run
# time; pip is for uv.
packages="build-essential ca-certificates ibverbs-providers libibverbs1 librdmacm1 python3 python3-pip"

refuse() { echo "install.sh: $*" >&2; exit 2; }

missing_packages() {
  for name in $packages; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$name" 2>&1)" = installed ] || printf '%s ' "$name"
  done
}

install_packages() {
  [ -n "$1" ] || return 0
  # shellcheck source=/dev/null
  . /etc/os-release
  [ "$ID" = ubuntu ] || refuse "this base is $ID, not Ubuntu, and lacks: $1. Take one that has them"
  # NVIDIA's own list has no snapshots, so nothing may come from there.
  rm -rf /etc/apt/sources.list /etc/apt/sources.list.d
  for suite in "$VERSION_CODENAME" "$VERSION_CODENAME-updates" "$VERSION_CODENAME-security"; do
    echo "deb https://snapshot.ubuntu.com/ubuntu/$ubuntu_snapshot $suite main universe"
  done > /etc/apt/sources.list
  # A snapshot is past its Valid-Until; where the image is built without root there is no second user to become.
  printf '%s\n' 'Acquire::Check-Valid-Until "false";' 'APT::Sandbox::User "root";' > "$work/apt.conf"
  APT_CONFIG=$work/apt.conf apt-get update
  # shellcheck disable=SC2086 # one word for each package
  APT_CONFIG=$work/apt.conf DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $1
  rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/ldconfig/* /var/log/apt /var/log/dpkg.log \
    /var/log/alternatives.log
}

# entries is NAME | entries not NAME: that entry of the lock, or all others.
entries() {
  awk -v wanted="$1" -v name="$2" '
    /^[^ #]/ { split($1, part, "=="); keep = (part[1] == name ? "is" : "not") == wanted }
    keep
  ' "$lock_file"
}

install_locked() { "$uv" pip install --python "$venv" --require-hashes --no-deps "$@"; }

[ -r "$lock_file" ] || refuse "there is no lock $LOCK; known: $(cd "$here/locks" && echo *.txt)"
[ "$FLASH_ATTN" = 0 ] || [ -x /usr/local/cuda/bin/nvcc ] ||
  refuse "flash-attn is compiled, and this base has no /usr/local/cuda/bin/nvcc; FLASH_ATTN=0 leaves it out"

mkdir -p "$work/tmp"
trap 'rm -rf "$work"' EXIT
if [ -r /mnt/env ]; then
  set -a
  # shellcheck source=/dev/null
  . /mnt/env
  set +a
fi
export HOME="$work" TMPDIR="$work/tmp" MAX_JOBS SOURCE_DATE_EPOCH
export PATH="$venv/bin:/usr/local/cuda/bin:$PATH"
# DeepSpeed's build asks the compiler of CUDA for its version if there is this name, and fails if there is no compiler.
if [ -x /usr/local/cuda/bin/nvcc ]; then export CUDA_HOME=/usr/local/cuda; else unset CUDA_HOME; fi
# Without a fixed seed the order of some lists in DeepSpeed's metadata, and of sets in compiled files, is by chance.
export PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=0
export UV_CACHE_DIR="$work/cache" UV_NO_CONFIG=1 UV_PYTHON_INSTALL_DIR=/opt/python UV_PYTHON_INSTALL_BIN=0

install_packages "$(missing_packages)"

python3 -m pip install --no-cache-dir --no-compile --require-hashes --no-deps \
  --target "$work/uv" -r "$here/locks/uv.txt"
if command -v python3.11; then # a base that brings it, such as Debian 12
  "$uv" venv --no-managed-python --python python3.11 "$venv"
else
  "$uv" venv --managed-python --python "$python" "$venv"
fi
headers=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[ -r "$headers/Python.h" ] || refuse "this base has python3.11 without $headers/Python.h, which Triton compiles against"

# DeepSpeed is there as source only. It comes second, because it looks at the torch that it is built for; what it is
# built with is in the lock.
entries not deepspeed > "$work/wheels.txt"
install_locked --no-build -r "$work/wheels.txt"
entries is deepspeed > "$work/source.txt"
[ ! -s "$work/source.txt" ] || DS_BUILD_OPS=0 install_locked --no-build-isolation -r "$work/source.txt"

cp "$lock_file" "$here/installed.txt"
if [ "$FLASH_ATTN" != 0 ]; then
  # FORCE_BUILD: else its setup fetches a wheel that no hash covers.
  FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTN_CUDA_ARCHS="$FLASH_ATTN" \
    install_locked --no-build-isolation -r "$here/locks/flash-attn.txt"
  cat "$here/locks/flash-attn.txt" >> "$here/installed.txt"
fi

# The image is read-only when it runs, so what is not compiled now is compiled at each start. By hash, not by time,
# and in one process, because the bytes depend on what it compiled before. Some packages ship files that no Python reads.
"$venv/bin/python" -m compileall -q --invalidation-mode unchecked-hash "$venv/lib" || true

rm -rf "$work" "$venv/.lock"
find / -xdev -newermt "@$SOURCE_DATE_EPOCH" ! -path '/mnt*' ! -path '/tmp*' \
  -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} + || true # a file that the builder mounts cannot be touched
