#!/usr/bin/env bash
# Measures the rollout engine on a GPU machine: a small policy as it is, and widened to the shapes of larger ones.
#
#   benchmarks/gpu_engine.sh MODEL [PART...]
#
# MODEL is a Hugging Face directory, or a GGUF file of a SmolLM2 or Qwen2.5 (converted first).
# PARTs: own 7B 1.5B (speed and fidelity), context context-7B, peers peers-7B (against transformers). Default: own 7B.
# Environment: OUT (where the JSON goes, as new files), PROMPTS (a JSONL file), PYTHON, COMMIT.
set -uo pipefail
cd "$(dirname "$0")/.."

model=${1:?usage: benchmarks/gpu_engine.sh MODEL [PART...]}
shift
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(own 7B)
out=${OUT:-benchmarks/results}
python=${PYTHON:-python3}
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$out"

if [[ $model == *.gguf ]]; then
  converted=${TMPDIR:-/tmp}/$(basename "$model" .gguf)
  "$python" examples/from_gguf.py "$model" "$converted" --dtype bfloat16 || exit 1
  model=$converted
fi

common=()
[ -z "${PROMPTS:-}" ] || common+=(--prompts "$PROMPTS")
[ -z "${COMMIT:-}" ] || common+=(--commit "$COMMIT")
speed=floor,start,step,natural,identity,logprobs,features,sync
failed=0

bench() { # name, then arguments
  local name=$1 started=$SECONDS
  shift
  echo "== $name"
  "$python" -m tlt bench engine "$model" --json "$out/engine-$name.json" "${common[@]}" "$@" || failed=1
  echo "== $name took $((SECONDS - started)) s"
}

for part in "${parts[@]}"; do
  case $part in
    own) bench own --sections $speed ;;
    7B | 1.5B) bench "$part" --shape "$part" --sections $speed ;;
    context) bench context --sections floor,context ;;
    context-7B) bench context-7B --shape 7B --sections floor,context ;;
    peers) bench peers --sections peers ;;
    peers-7B) bench peers-7B --shape 7B --sections peers ;;
    *) echo "no part called $part; there are: own 7B 1.5B context context-7B peers peers-7B" >&2; exit 2 ;;
  esac
done
exit $failed
