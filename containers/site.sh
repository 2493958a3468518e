#!/bin/sh
# Fills a folder with what this machine needs to reach its package index: site.sh FOLDER
# That folder is what install.sh finds as /mnt: `env`, and a CA bundle if one is set here.
set -eu
umask 077

setting() { python3 -m pip config get "global.$1" 2>/dev/null || true; }
put() { printf "%s='%s'\n" "$1" "$2" >>"$folder/env"; }

folder=$1
mkdir -p "$folder"
: >"$folder/env"
bundle=${SSL_CERT_FILE:-${PIP_CERT:-$(setting cert)}}
if [ -n "$bundle" ]; then
  cp "$bundle" "$folder/ca.pem"
  put SSL_CERT_FILE /mnt/ca.pem
  put PIP_CERT /mnt/ca.pem
fi
index=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-$(setting index-url)}}
case $index in
'' | file:*) ;; # a folder of this machine is not there inside
*\'*) echo "site.sh: the address of the package index has a quote in it" >&2 && exit 2 ;;
*)
  put PIP_INDEX_URL "$index"
  put UV_DEFAULT_INDEX "$index"
  ;;
esac
