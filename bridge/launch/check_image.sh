#!/bin/bash
# check_image.sh FILE SHA256 SEEN [COPY]: is it the image that the run was launched with? With COPY it is copied there
# first. A file that is still the same one, as its inode and its times tell, is read once for each node only: the folder
# SEEN remembers it.
set -euo pipefail
file=$1 wanted=$2 seen=$3 copy=${4:-}

refuse() { echo "$file on $(uname -n): $*" >&2; exit 1; }

checked() { # checked FILE: refuse it unless its content is the wanted one
  local stamp found
  stamp=$seen/$wanted.$(stat -L -c '%d-%i-%s-%.Y-%.Z' -- "$1")
  [ ! -e "$stamp" ] || return 0
  found=$(sha256sum -- "$1") found=${found#\\} # a backslash stands before the sum of a file with a strange name
  [ "${found%% *}" = "$wanted" ] || refuse "is another image than at the launch: its SHA-256 is ${found%% *}, not" \
    "$wanted; put the old one back, or \`bridge-rl resume RUN --force\` (without $file.json, if that is of another one)"
  : >"$stamp"
}

mkdir -m 700 -- "$seen" 2>/dev/null || [ -O "$seen" ] || refuse "$seen cannot be made, or belongs to somebody else"
[ -r "$file" ] || refuse "there is no such file here, or you cannot read it"
if [ -z "$copy" ]; then
  checked "$file"
else
  exec 9>"$copy.lock" && flock 9 # one copy for all jobs of the node
  [ ! -e "$copy" ] || ! (checked "$copy") 2>/dev/null || exit 0
  # There is none, or a wrong one: it was made of another file, or changed since.
  { cp -- "$file" "$copy.new" && mv -- "$copy.new" "$copy"; } || { rm -f -- "$copy.new" && refuse "cannot be copied"; }
  (checked "$copy") || { rm -f -- "$copy" && exit 1; }
fi
