#!/usr/bin/env bash
# Plain Burn, bare replays, graphed steps, and PyTorch's where it is there: one JSON file, one table, one plot.
#
# PyTorch runs first and by itself, in processes of its own: two programs on one card would time each other.
set -euo pipefail

usage() {
    cat <<'USAGE'
usage: benches/compare.sh [OPTIONS] [-- ARGUMENTS OF THE BENCH]

  --out PREFIX         files to write: PREFIX.json, PREFIX.md, PREFIX.svg (default: target/compare)
  --cases LIST         cases of both, NAME:BATCH:OPTIMIZER with commas between (default: the bench's own)
  --device DEVICE      device of ours (default: cuda)
  --modes LIST         PyTorch's modes (default: eager,graph,compile)
  --matmul-precision P high (TF32) or highest, of PyTorch (default: high)
  --peers FILE         take PyTorch's rows from FILE, and do not run it
  --peers-only         run PyTorch alone; its rows are in PREFIX-pytorch.jsonl
  -h, --help           this text

The variable PYTHON names another python3, STEPS_BENCH a bench that is already built.

examples:
  benches/compare.sh --out target/h200
  benches/compare.sh --cases resnet18:1:adam,resnet18:128:adam -- --rounds 4 --memory
USAGE
}

say() {
    printf 'compare.sh: %s\n' "$@" >&2
}

out='' cases='' device=cuda modes='' precision=high peers='' peers_only=no
while [ $# -gt 0 ]; do
    case $1 in
        --out | --cases | --device | --modes | --matmul-precision | --peers)
            [ $# -ge 2 ] || { say "$1 needs a value"; exit 2; }
            case $1 in
                --out) out=$2 ;;
                --cases) cases=$2 ;;
                --device) device=$2 ;;
                --modes) modes=$2 ;;
                --matmul-precision) precision=$2 ;;
                --peers) peers=$2 ;;
            esac
            shift 2
            ;;
        --peers-only)
            peers_only=yes
            shift
            ;;
        --)
            shift
            break
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        *)
            usage >&2
            exit 2
            ;;
    esac
done

# Paths given are the caller's; cargo wants the project's folder, and gives it to the bench.
absolute() {
    case $1 in /*) printf '%s\n' "$1" ;; *) printf '%s/%s\n' "$PWD" "$1" ;; esac
}
[ -z "$peers" ] || peers=$(absolute "$peers")
[ -z "$out" ] || out=$(absolute "$out")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${out:-$PWD/target/compare}
mkdir -p "$(dirname "$out")"

python=${PYTHON:-python3}
has_torch() {
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
}

if [ -n "$peers" ]; then
    [ -r "$peers" ] || { say "cannot read $peers"; exit 1; }
elif has_torch; then
    options=(--matmul-precision "$precision")
    [ -z "$cases" ] || options+=(--cases "$cases")
    [ -z "$modes" ] || options+=(--modes "$modes")
    say "PyTorch: ${options[*]}"
    peers=$out-pytorch.jsonl
    # A row is written as soon as it is measured, so a run that ends early leaves what it had.
    "$python" benches/pytorch.py "${options[@]}" | tee "$peers" ||
        say "PyTorch's run ended early; its rows so far are used"
elif [ "$peers_only" = yes ]; then
    say "no PyTorch with CUDA here ($python)"
    exit 1
else
    say "no PyTorch with CUDA here ($python): ours alone"
fi
[ "$peers_only" = no ] || exit 0

arguments=(--device "$device" --json "$out.json" --markdown "$out.md" --plot "$out.svg")
[ -z "$cases" ] || arguments+=(--cases "$cases")
[ -z "$peers" ] || arguments+=(--peers "$peers")
if [ -n "${STEPS_BENCH:-}" ]; then
    "$STEPS_BENCH" "${arguments[@]}" "$@"
else
    features=()
    [ "$device" != cuda ] || features=(--features cuda)
    cargo bench "${features[@]}" --bench steps -- "${arguments[@]}" "$@"
fi
say "left $out.json, $out.md and $out.svg"
