#!/usr/bin/env bash
# Run the GPU benchmarks, one part or all of them:
#
#     bash tests/bench/gpu.sh PART [--pretend]
#
#     replays     replayed forward passes compared with the time to read their weights, by rows and context
#     tests       all tests marked gpu
#     7b 13b 8b   decoding at real shapes (7b-68m, 13b-160m, 8b-1b): batches, contexts, graphs, and transformers
#     heads       a training step of prediction heads on a model of the 7B shape
#     real        recipe realpair on the GPU with many questions ($QUESTIONS, $MODEL, $SETTINGS), then Spec-Bench
#     all         all parts except real, one after the other
#
# Each part takes at most $LIMIT seconds (default: 480) and writes PART.json (the benchmark's last line) and PART.log
# to $OUT (default: gpu-results). Python requires torch, transformers and pytest; part real also requires pydantic and
# datasets. Wheels in a folder `wheels` are installed first. --pretend runs tiny shapes on the CPU to test this script.
set -uo pipefail
cd "$(dirname "$0")/../.."
part=${1:?choose a part: replays, tests, 7b, 13b, 8b, heads, real or all}
pretend=${2:-}
OUT=${OUT:-gpu-results} LIMIT=${LIMIT:-480}
python=${PYTHON:-python3}
mkdir -p "$OUT"
if [ -d wheels ]; then
    "$python" -m pip install --quiet --no-index --find-links wheels --no-deps wheels/*.whl
fi
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
ln -s "$PWD" "$site/draftsmith"
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"

bench() { # name, script, arguments
    local name=$1 script=$2
    shift 2
    echo "== $name: $script $*"
    timeout "$LIMIT" "$python" "tests/bench/$script" "$@" > "$OUT/$name.log" 2>&1
    local code=$?
    tail -n 1 "$OUT/$name.log" | grep '^{' > "$OUT/$name.json" || rm -f "$OUT/$name.json"
    grep -v '^{' "$OUT/$name.log" | tail -n 40
    return $code
}

shapes() { # name, pair, contexts
    local name=$1 pair=$2
    shift 2
    if [ -n "$pretend" ]; then
        bench "$name" shapes.py mini-micro --device cpu --dtype float32 --quick --batch 1 2 --context 32 --peer
    else
        bench "$name" shapes.py "$pair" --graphs --peer --batch 1 4 16 --context "$@"
    fi
}

run() {
    case $1 in
        replays)
            # A CPU does not replay forward passes.
            [ -n "$pretend" ] || bench replays replays.py 7b 8b 135m 68m ;;
        tests)
            echo "== tests"
            local files
            mapfile -t files < <(grep -rlE "mark\.gpu\b" --include "test_*.py" tests)
            timeout "$LIMIT" "$python" -m pytest -q -m gpu "${files[@]}" ${pretend:+--collect-only} > "$OUT/tests.log" 2>&1
            local code=$?
            tail -n 40 "$OUT/tests.log"
            return $code ;;
        7b) shapes 7b 7b-68m 256 2048 ;;
        13b) shapes 13b 13b-160m 256 ;;
        8b) shapes 8b 8b-1b 256 8192 ;;
        heads)
            bench heads train_heads.py --gpu-shape ${pretend:+--shape tiny --tokens 32 --rounds 2} ;;
        real)
            echo "== real: draftsmith quickstart"
            local pair=${PAIR:-runs/gpu} given=()
            # Eight blocks per step. Hidden states are not cached, since a GPU computes them faster than a disk reads.
            for stage in eagle drafter heads; do given+=("$stage.train.global_batch=8" "$stage.train.micro_batch=8"); done
            given+=(eagle.hidden.cache=null heads.hidden.cache=null drafter.teacher.cache=null drafter.teacher.hidden=null)
            given+=(answers.batch=512 answers.limit=null ${MODEL:+"target=$MODEL"})
            given+=(${QUESTIONS:+corpus.megabytes=0 "corpus.files=[$QUESTIONS]"})
            timeout "$LIMIT" "$python" -m draftsmith quickstart --recipe realpair "out=$pair" "${given[@]}" \
                ${SETTINGS:-} > "$OUT/real-train.log" 2>&1
            local code=$?
            tail -n 60 "$OUT/real-train.log"
            [ -f "$pair/results.json" ] || return 1
            cp "$pair/results.json" "$OUT/real-evaluate.json"
            bench real realpair.py --pair "$pair" --alone --tokens 64 --drafter-dtype bfloat16 ${BENCH:-} || code=1
            bench real-bfloat16 realpair.py --pair "$pair" --alone --tokens 64 --dtype bfloat16 ${BENCH:-} || code=1
            return $code ;;
        *)
            echo "unknown part $1; choose replays, tests, 7b, 13b, 8b, heads, real or all" >&2
            return 2 ;;
    esac
}

failed=()
if [ "$part" = all ]; then parts="replays tests 7b 13b 8b heads"; else parts=$part; fi
for each in $parts; do
    run "$each" || failed+=("$each")
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
