#!/usr/bin/env bash
# The wheel of a revision, for bench/builds.py; what is not committed is left out.
#
#   bench/build_wheel.sh REVISION FOLDER     writes FOLDER/scoremode-*.whl and, next to it, the commit that it was made from
set -euo pipefail
commit=$(git -C "$(dirname "$0")" rev-parse --verify "$1^{commit}") folder=$2
sources=$(mktemp -d)
trap 'rm -rf "$sources"' EXIT
git -C "$(dirname "$0")/.." archive "$commit" | tar -x -C "$sources"
mkdir -p "$folder"
rm -f "$folder"/scoremode-*.whl
python3 -m pip wheel --quiet --no-deps --wheel-dir "$folder" "$sources"
echo "$commit" > "$folder/commit"
