#!/usr/bin/env bash
# Measures kernel paths of a model and its copies on one GPU with `ppl-client paths`, some with planted faults.
#
#   [FLAGS=...] [LAYER=11] [LIMIT=300] bench/paths.sh MODEL TEXT FOLDER RESULTS [PART ...]
#
# MODEL is a bfloat16 folder with one safetensors file, TEXT a file of 140,000 tokens, FOLDER takes copies and runs. Each
# PART is one command, which ends after LIMIT seconds, and resumes when it is called again:
#
#   bf16 w4a16 fp8   all paths that vLLM has for the model, in both lanes
#   equal            W4A16 on 20 equal paths, in prefill
#   faults           W4A16 with a fault in a layer's attention, and in steps with few rows, in both lanes
#   scales           FP8 with scales of an FP8 KV cache; one is halved on a path
#   mixtral          a random Mixtral under its MoE backends, and with an expert that is wrong under `triton` alone
#   version          MODEL on another vLLM, in both lanes: OTHER is its `scoremode serve`
#   cache            KV cache types of LONG (or MODEL) in windows of 32,768 tokens
#   norm invariant   eager steps of one window next to steps of many, for windows of 200, 255, 256 and 300 tokens of a
#                    wide random Llama: vLLM's RMSNorm takes other blocks in steps of fewer than 256 rows; then with
#                    batch invariance
#   suffixes         tokens of such windows in a step of their own after a cached prefix, with and without batch
#                    invariance; takes two minutes
#
# RESULTS/paths.txt gets each part's output with its seconds, and RESULTS/paths.tgz has all runs, tables and logs.
# FLAGS are flags of all servers. With 16 sequences, decode steps have few rows. SHORT has the options of most parts; for
# bf16, w4a16 and fp8 add --try there, because vLLM has some fifteen paths. Eager servers decode ten times slower.
set -uo pipefail
here=$(dirname "$(realpath "$0")")
model=$(realpath "$1") text=$(realpath "$2")
mkdir -p "$3" "$4"
folder=$(realpath "$3") results=$(realpath "$4") layer=${LAYER:-11}
shift 4
memory="--gpu-memory-utilization 0.06 --kv-cache-memory-bytes 1G"
flags=${FLAGS:---dtype bfloat16 --max-num-seqs 16 $memory}
short=${SHORT:---context-length 512 --max-windows 16}
copies=$folder/known/copies
[ -d "$folder/site" ] || { mkdir "$folder/site"; python "$here/paths.py" faults "$folder/site"; }
export PYTHONPATH=$folder/site${PYTHONPATH:+:$PYTHONPATH}

measure() { # MODEL OPTION ...
  # shellcheck disable=SC2086
  timeout -k 60 "${LIMIT:-300}" python -m scoremode.cli paths "$1" --text-file "$text" --output "$folder/$part" --quiet \
    --fail-if differs "${@:2}" -- $flags
}
quantized() { [ -d "$copies/$1" ] || python "$here/known_models.py" quantize "$model" "$folder/known" "$1"; }
random_model() { [ -d "$copies/$1" ] || python "$here/paths.py" "$1" "$copies/$1"; }
lengths() {
  random_model wide
  python "$here/paths.py" lengths "$copies/wide" "$text" "$folder/$part" --enforce-eager $flags
  timeout -k 60 "${LIMIT:-300}" python -m scoremode.cli sweep "$folder/$part/plan.yaml" --quiet
}
run() {
  case $part in
    bf16) measure "$model" $short ;;
    w4a16 | fp8) quantized "${part^^}" && measure "$copies/${part^^}" $short ;;
    equal) quantized W4A16 && measure "$copies/W4A16" $short --lane prefill --no-blocks \
      --try "SOME_VARIABLE=$(seq -s , "${EQUAL:-20}")" ;;
    faults) quantized W4A16 && measure "$copies/W4A16" $short \
      --try "PLANTED_FAULT=attention:$layer:1.02,single-rows:$layer:1.02,single-rows:$layer:1.05" ;;
    scales)
      quantized "${SCALED:=FP8}"
      [ -d "$copies/scales" ] || python "$here/paths.py" scales "$model" "$copies/$SCALED" "$text" "$copies/scales"
      measure "$copies/scales" $short --try "PLANTED_FAULT=none,k-scale:$layer:0.5" ;;
    mixtral)
      random_model mixtral
      measure "$copies/mixtral" $short --product --try moe-backend=triton,batched_triton \
        --try PLANTED_FAULT=expert:1:2:1.05:triton ;;
    version) measure "$model" $short --try "command=$OTHER" ;;
    cache) flags=${LONG_FLAGS:---gpu-memory-utilization 0.15 --kv-cache-memory-bytes 8G} measure "${LONG:-$model}" \
      --lane prefill --context-length "${LONG_CONTEXT:-32768}" --max-windows 4 --no-blocks \
      --try kv-cache-dtype=fp8,fp8_e5m2 ;;
    norm) lengths ;;
    invariant) VLLM_BATCH_INVARIANT=1 lengths ;;
    suffixes)
      random_model wide
      for on in 0 1; do
        VLLM_BATCH_INVARIANT=$on python "$here/paths.py" suffixes "$copies/wide" "$text" "$folder/$part/$on" \
          --enforce-eager $flags
      done ;;
  esac
}
[ $# -gt 0 ] || set -- bf16 w4a16 fp8 equal faults scales mixtral cache norm invariant suffixes
for part; do
  mkdir -p "$folder/$part"
  started=$(date +%s)
  { echo "== $part"; run; echo "== $part: status $?, $(($(date +%s) - started)) s"; } 2>&1 | tee -a "$results/paths.txt"
  tar -C "$folder" -czf "$results/paths.tgz" --exclude=references --exclude='*.safetensors' --exclude=copies --exclude=site .
done
