#!/usr/bin/env bash
# The recipes without a registry and without a GPU: Debian 12 takes NVIDIA's place as the base.
# For machines that can be thrown away, Debian 12 on x86-64: `tools` puts Apptainer into /usr.
set -euo pipefail
umask 022
export LC_ALL=C

usage="usage: standin.sh tools | base | sif [LOCK]
tools  install what the others need, Apptainer from Debian's next release among it (root)
base   make the stand-in base as a docker archive (root)
sif    build Apptainer.def over it, without flash-attn, as the ordinary user bridge-standin (root starts it)
Prints the path of what it made. What is there already, from the same inputs, is not made again.
state folder: \$BRIDGE_STANDIN, else /var/lib/bridge-standin"
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
state=${BRIDGE_STANDIN:-/var/lib/bridge-standin}
user=bridge-standin
libraries=$state/lib # what Apptainer is run with: its Debian is newer than this one
# What install.sh wants, and what it cannot install on a base that is not Ubuntu: Python 3.11 and its headers.
packages="$(sed -n 's/^packages="\(.*\)"$/\1/p' "$repo/containers/install.sh") python3-dev"

refuse() { echo "standin.sh: $*" >&2; exit 2; }
say() { echo "standin.sh: $*" >&2; }

epoch() { sed -n 's/^ARG SOURCE_DATE_EPOCH=//p' "$repo/Dockerfile"; }

# 16 characters that change with the inputs.
digest() { sha256sum | cut -c 1-16; }

apt() { DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 "$@" >&2; }

tools() {
  apt update
  apt install --yes --no-install-recommends mmdebstrap podman buildah skopeo patchelf squashfs-tools squashfuse uidmap \
    fakeroot fuse-overlayfs libsqlite3-0
  # In use by other users too: without it Apptainer unpacks the whole image at each start.
  [ ! -e /dev/fuse ] || chmod 666 /dev/fuse
  id "$user" >/dev/null 2>&1 || useradd --create-home --shell /bin/sh "$user"
  command -v apptainer >/dev/null || install_apptainer
  apptainer --version
}

# Debian 12 has no Apptainer. That of sid runs here with sid's C library beside it, in a folder of its own.
install_apptainer() {
  local sid=$state/sid mirror options
  # shellcheck disable=SC2016 # apt's own variable
  mirror=$(apt-get indextargets --format '$(REPO_URI)' | awk '/\/debian\/$/ { found = $0 } END { print found }')
  [ -n "$mirror" ] || refuse "this machine's apt knows no mirror of Debian"
  mkdir -p "$sid/lists/partial" "$sid/unpacked" "$libraries"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid main" >"$sid/sources.list"
  # Its own sources and lists: nothing else of sid can ever be installed by accident.
  options=(-o Dir::Etc::SourceList="$sid/sources.list" -o Dir::Etc::SourceParts=- -o Dir::State::Lists="$sid/lists"
    -o APT::Sandbox::User=root)
  apt "${options[@]}" update
  (cd "$sid" && apt "${options[@]}" download apptainer libc6 libseccomp2)
  dpkg-deb -x "$sid"/libc6_*.deb "$sid/unpacked"
  dpkg-deb -x "$sid"/libseccomp2_*.deb "$sid/unpacked"
  local name found
  for name in libc.so.6 libm.so.6 libseccomp.so.2 ld-linux-x86-64.so.2; do
    found=$(find "$sid/unpacked" -name "$name" -print -quit)
    cp --dereference "$found" "$libraries/$name"
  done
  cp --dereference /usr/lib/x86_64-linux-gnu/libsqlite3.so.0 "$libraries/"
  dpkg-deb -x "$sid"/apptainer_*.deb "$sid/apptainer"
  find "$sid/apptainer" -type f \( -path '*/bin/apptainer' -o -path '*/apptainer/bin/starter' \) \
    -exec patchelf --set-interpreter "$libraries/ld-linux-x86-64.so.2" --set-rpath "$libraries" {} \;
  # Last, and as a whole: an Apptainer that is there works.
  cp -a "$sid/apptainer/." /
  rm -rf "$sid"
}

base() {
  local made name
  # shellcheck disable=SC2086 # one word for each package
  name=base-$(printf '%s\n' $packages | digest)
  made=$state/$name.tar
  if [ ! -e "$made" ]; then
    say "making the stand-in base"
    mkdir -p "$state"
    # /etc/hosts and /etc/resolv.conf: Apptainer mounts over them, and over what is there only.
    # shellcheck disable=SC2016 # mmdebstrap's own variable
    SOURCE_DATE_EPOCH=$(epoch) mmdebstrap --quiet --variant=minbase --include="${packages// /,}" \
      --customize-hook='touch "$1/etc/hosts" "$1/etc/resolv.conf"' bookworm "$state/$name.rootfs.tar" >&2
    podman import --quiet "$state/$name.rootfs.tar" "localhost/bridge-standin:$name" >&2
    podman save --quiet --format docker-archive --output "$made.new" "localhost/bridge-standin:$name" >&2
    rm "$state/$name.rootfs.tar"
    mv "$made.new" "$made"
  fi
  echo "$made"
}

sif() {
  local lock=${1:-train-cu124-py311} from made work
  [ -e "$repo/containers/locks/$lock.txt" ] || refuse "there is no lock $lock in containers/locks"
  command -v apptainer >/dev/null || refuse "there is no apptainer; run: standin.sh tools"
  from=$(base)
  made=$state/$lock-$(cat "$repo/Apptainer.def" "$repo/containers/install.sh" "$repo/containers/locks/$lock.txt" \
    "$repo/containers/locks/uv.txt" <(basename "$from") | digest).sif
  if [ ! -e "$made" ]; then
    say "building $made"
    work=$(mktemp -d "$state/build.XXXXXX")
    # shellcheck disable=SC2064 # the folder of now
    trap "rm -rf '$work'" EXIT
    mkdir "$work/tmp" "$work/cache" "$work/context"
    cp -r "$repo/Apptainer.def" "$repo/containers" "$work/context/"
    sh "$repo/containers/site.sh" "$work/site"
    chown -R "$user:" "$work"
    chmod 755 "$work"
    (cd "$work/context" && runuser -u "$user" -- env -i HOME="/home/$user" USER="$user" \
      PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin SOURCE_DATE_EPOCH="$(epoch)" \
      APPTAINER_TMPDIR="$work/tmp" APPTAINER_CACHEDIR="$work/cache" \
      apptainer build --bind "$work/site:/mnt" --mksquashfs-args "-comp zstd -Xcompression-level 1" \
      --build-arg BOOTSTRAP=docker-archive --build-arg BASE="$from" --build-arg LOCK="$lock" \
      --build-arg FLASH_ATTN=0 "$work/image.sif" Apptainer.def) >&2
    # What `bridge-rl image build` would write beside it: else each launch reads the whole file.
    printf '{"sha256": "%s"}\n' "$(sha256sum "$work/image.sif" | cut -c 1-64)" >"$made.json"
    mv "$work/image.sif" "$made"
  fi
  echo "$made"
}

[ "$(id -u)" = 0 ] || refuse "only root can start it"
mkdir -p "$state"
exec 8>"$state/lock" && flock 8 # two that start at once make nothing twice
case "${1:-}" in
tools | base | sif) "$@" ;;
*) echo "$usage" >&2 && exit 2 ;;
esac
