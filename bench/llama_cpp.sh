#!/usr/bin/env bash
# llama.cpp's llama-perplexity on a reference that Scoremode recorded and exported: GGUF files of MODEL against MODEL.
#
#   bench/llama_cpp.sh MODEL TEXT FOLDER [TOKENS=8192] [TYPE or FILE...]
#
# A TYPE, such as Q4_K_M, is made of MODEL, and F16 always is; a FILE is a GGUF file, such as the one MODEL comes from.
#
# MODEL is a folder of safetensors with its tokenizer, TEXT a file, FOLDER takes llama.cpp's build, the GGUF files, the
# base file and the logs. llama.cpp is that of llama-cpp-python's sdist; it takes 3 to 12 minutes to build on two cores,
# once. Run it with the virtual environment's bin on the PATH; pip brings cmake and ninja. FLAGS has flags of the server,
# such as --gpu-memory-utilization 0.5 on a CPU whose memory is in use.
set -euo pipefail
model=$1 text=$(realpath "$2") folder=$3 tokens=${4:-8192} types=(F16)
port=8765 context=512 url=http://localhost:8765
mkdir -p "$folder/references" && folder=$(realpath "$folder")

source=$folder/llama_cpp_python-0.3.36/vendor/llama.cpp build=$folder/build
if [ ! -x "$build/bin/llama-perplexity" ]; then
  python3 -m venv "$folder/tools" && "$folder/tools/bin/pip" install --quiet cmake ninja scikit-build-core
  "$folder/tools/bin/pip" download --quiet --no-deps --no-binary :all: --no-build-isolation -d "$folder" llama-cpp-python==0.3.36
  tar -C "$folder" -xf "$folder/llama_cpp_python-0.3.36.tar.gz"
  PATH=$folder/tools/bin:$PATH cmake -G Ninja -S "$source" -B "$build" -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF \
    -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF > "$folder/cmake.log"
  "$folder/tools/bin/ninja" -C "$build" llama-perplexity llama-quantize > "$folder/ninja.log"
fi
[ -f "$folder/F16.gguf" ] || PYTHONPATH=$source/gguf-py python "$source/convert_hf_to_gguf.py" "$model" --outtype f16 \
  --outfile "$folder/F16.gguf" > "$folder/convert.log" 2>&1
for type in "${@:5}"; do
  name=$(basename "$type" .gguf)
  [ ! -f "$type" ] || ln -sf "$(realpath "$type")" "$folder/$name.gguf"
  [ -f "$folder/$name.gguf" ] || "$build/bin/llama-quantize" "$folder/F16.gguf" "$folder/$name.gguf" "$name" > "$folder/quantize-$name.log" 2>&1
  types+=("$name")
done

scoremode serve "$model" --dtype float32 --max-model-len 2048 --port $port --reference-dir "$folder/references" \
  ${FLAGS:-} > "$folder/server.log" 2>&1 &
server=$!
trap 'kill $server' EXIT
ppl-client record --url $url --retry-for 300 --reference base --text-file "$text" --method llama.cpp --context-length $context \
  --max-tokens "$tokens" --quiet
ppl-client export --url $url --reference base --llama-cpp "$folder/base.kld" --force --quiet
ppl-client kld --url $url --reference base --output "$folder/base.json" --force --quiet > "$folder/base.txt"
kill $server && trap - EXIT
logs=()
for type in "${types[@]}"; do
  "$build/bin/llama-perplexity" -m "$folder/$type.gguf" --kl-divergence-base "$folder/base.kld" --kl-divergence \
    -c $context -lv 4 > "$folder/$type.log" 2>&1
  logs+=(--llama-cpp "$type=$folder/$type.log")
done
ppl-client compare "$folder/base.json" "${logs[@]}"
