#!/usr/bin/env bash
# Build the sdist and the wheel into dist/, check them, and try the wheel in a new environment without the checkout.
#
#   scripts/dist.sh PYTHON [TAG]
#
# PYTHON   the interpreter to build with; the new environment has the same
# TAG      the tag of a release: it and the changelog's first entry must have the package's version
set -euo pipefail
python=$(realpath --no-symlinks "$1") tag=${2:-}
cd "$(dirname "$0")/.."

version=$("$python" -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')
entry=$(grep --max-count=1 '^## \[' CHANGELOG.md)
case $entry in
  "## [$version]"*) ;;
  *) echo "dist.sh: the first entry of CHANGELOG.md is '$entry', and the version is $version" >&2; exit 1 ;;
esac
if [ -n "$tag" ]; then
  [ "$tag" = "v$version" ] || { echo "dist.sh: the tag is $tag, and the version is $version" >&2; exit 1; }
  [[ $entry =~ [0-9]{4}-[0-9]{2}-[0-9]{2}$ ]] || { echo "dist.sh: '$entry' in CHANGELOG.md has no date" >&2; exit 1; }
fi

rm -rf dist
"$python" -m uv build --quiet
"$python" -m uv tool run --quiet --from 'twine>=6.1' twine check --strict dist/*

empty=$(mktemp --directory)
trap 'rm -rf "$empty"' EXIT
wheel=$(realpath dist/*.whl)
cd "$empty"
"$python" -m uv venv --quiet --python "$python" environment
"$python" -m uv pip install --quiet --python environment/bin/python "${wheel}[report]"
export PYTHONSAFEPATH=1 PATH="$empty/environment/bin:$PATH"
ppl-client --version
python -c 'from scoremode.runs import load_corpus; print(load_corpus(preset="categories").info.in_words)'
time ppl-client example
test -s scoremode-example/report.html
