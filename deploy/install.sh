#!/bin/sh
# Installs Atoll from this repository into a virtual environment: the only installing step of deploy/Containerfile.
#   deploy/install.sh PREFIX [EXTRAS]      EXTRAS as pip takes them, such as "parquet,vision"
# ATOLL_CONSTRAINTS names another file of pins than constraints.txt; "none": no pins, so that an index of your own chooses torch.
set -eu
prefix=${1:?give the folder of the virtual environment}
extras=${2:-}
here=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
pins=${ATOLL_CONSTRAINTS:-$here/constraints.txt}
[ -x "$prefix/bin/python" ] || "${PYTHON:-python3}" -m venv "$prefix"
set -- install --no-cache-dir --no-compile
[ "$pins" = none ] || set -- "$@" --constraint "$pins"
"$prefix/bin/python" -m pip "$@" "$here${extras:+[$extras]}"
"$prefix/bin/atoll" --version
