#!/usr/bin/env bash
# Measures a known model and its copies on one GPU, from its GGUF file to the card; every step that is done is skipped.
#
#   LLM_COMPRESSOR=SITE bench/known_models.sh FOLDER TEXT [MODEL=qwen] [KEEP=6] [COPY ...]
#
# FOLDER has MODEL.gguf (`bench/known_models.py get`) and takes all that is written, TEXT is the text to measure, such
# as WikiText-2's test split as llama.cpp has it (wiki.test.raw). SITE is the folder of llm-compressor's packages
# (bench/README.md). QUICK has options of `ppl-client quick`, and flags of its servers after `--`; LAYERS flags of the
# servers that measure layers. A base model without a chat template is not measured on conversations.
set -euo pipefail
folder=$(realpath "$1") text=$(realpath "$2") name=${3:-qwen} keep=${4:-6} copies=("${@:5}")
here=$(dirname "$(realpath "$0")")
read -ra quick <<< "${QUICK:--- --max-model-len 8192}"
read -ra layers <<< "${LAYERS:---max-model-len 2048}"
step() { echo "== $(date -u +%T) $*"; }

step dequantize
model=${MODEL:-$(python "$here/known_models.py" dequantize "$folder" "$name" | tail -1)}
work=$folder/measured-$name
step quantize
python "$here/known_models.py" quantize "$model" "$work" "${copies[@]}"
parts=(text cache)
[ ! -f "$model/chat_template.jinja" ] || parts+=(conversations)
measure() { python "$here/known_models.py" measure "$model" "$work" --text "$text" --parts "$@" "${quick[@]}"; }
# The copies that are there first, because the recipe takes longest.
step text
measure text
step check
python "$here/known_models.py" check "$model" "$work" --text "$text" | tee "$work/check.txt" || step "check: see above"
gptq=$work/copies/W4A16-GPTQ
if [ -d "$gptq" ] && [ ! -d "$gptq-recipe" ]; then
  step "layers, and a recipe of $keep blocks"
  python "$here/layers.py" "$model" "$work/layers" --format w4a16-gptq --copy "$gptq" --keep "$keep" \
    --choices recipe random --tokens "${TOKENS:-16384}" "${layers[@]}" | tee "$work/layers.txt"
  cp -r "$work/layers/w4a16-gptq-recipe-$keep" "$gptq-recipe"
  cp -r "$work/layers/w4a16-gptq-random-$keep" "$gptq-random"
fi
step "${PARTS:=${parts[*]}}"
# shellcheck disable=SC2086
measure $PARTS
step done
