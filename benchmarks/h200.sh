#!/usr/bin/env bash
# What has to run on an H200, in calls below ten minutes each: benchmarks/h200.sh PART OUT
#   one   CUDA tests of PLE, gated residual, tapes and convolution side by side; then timings, alone (1 GPU, 10 min)
#   fuzz  2,000 cases of gated residual (40 s) and of PLE (196 s) (1 GPU, 5 min)
#   fuzz_gdn  2,000 cases of the gated delta rule or more, until every structure had a group (1 GPU, 127 s; 9 min at most)
#   gdn   the gated delta rule and its patches in benchmarks/next: checks, then timings (1 GPU, 8 min)
#   spans the backward of the gated delta rule in spans: CUDA tests, bits, times and peaks by form (1 GPU, 7 min)
#   next  the patches for PLE, then documents in pieces (1 GPU, 8 min)
#   peers the gated delta rule beside FlashQLA and FLA (1 GPU, 7 min). Their packages lie in the folder $PEERS: pip install
#         --no-deps --target $PEERS flash-qla tilelang z3-solver apache-tvm-ffi torch-c-dlpack-ext fla-core
#   layer the decoder layer, by provider; the same packages (1 GPU, 4 min)
#   san   compute-sanitizer over small calls of each op (1 GPU, 3 min): nothing else beside it, a dozen compilers run at once
#   two   context parallelism over NCCL: tests, then timings (2 GPUs, 6 min)
# Each job has a limit of its own; the table comes last. Logs and results end in OUT/h200-PART.tgz. Exit status 1 if a job failed.
set -uo pipefail
cd "$(dirname "$0")/.."
part=${1:?one, fuzz, fuzz_gdn, gdn, spans, next, peers, layer, san or two} out=${2:?folder for logs and results}
mkdir -p "$out/logs" "$out/results"
touch "$out/began"
export NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1
failed=0
declare -A jobs

job() { # job SECONDS NAME COMMAND...: in the background, its output in a log
    local limit=$1 name=$2
    shift 2
    (
        began=$SECONDS
        timeout "$limit" "$@" >"$out/logs/$name" 2>&1
        echo "$? $((SECONDS - began))" >"$out/logs/$name.end"
    ) &
    jobs[$name]=$!
}

settle() { # waits for every job so far and prints a line for each
    local name status took
    for name in "${!jobs[@]}"; do
        wait "${jobs[$name]}"
        read -r status took <"$out/logs/$name.end"
        [ "$status" -eq 0 ] || failed=1
        table+="$(printf '%-18s %-12s %4s s  %s' "$name" "$([ "$status" -eq 0 ] && echo ok || echo "FAILED $status")" "$took" "$(tail -n 1 "$out/logs/$name")")"$'\n'
    done
    jobs=()
}

table=""
# The entry point of the backend comes with an install alone; -P: no current folder on the path.
python3 -m pip install -q --no-build-isolation --no-deps -e . || exit 2
python=python3
case $part in
one)
    for op in ple ple_bars gated_residual tape_reuse causal_conv1d; do
        job 280 "test_$op" $python -P -m pytest -p no:cacheprovider -q "tests/cuda/test_${op}_cuda.py"
    done
    settle
    # Timings never share the GPU.
    job 120 bench_ple $python benchmarks/bench_ple.py && settle
    job 80 bench_mix $python benchmarks/bench_gated_residual.py --cases mix inject --rows 32768 --csv "$out/results/gated_residual.csv" && settle
    job 100 bench_tapes $python benchmarks/bench_tape_reuse.py --out "$out/results/tape_reuse_h200.json" && settle
    job 30 bench_conv $python benchmarks/bench_causal_conv1d.py --out "$out/results/causal_conv1d_h200.json" && settle
    ;;
fuzz | fuzz_gdn)
    # Compiling is nearly all of it: one fuzzer at a time, a set of kernels to each of 16 workers. At --seconds it prints
    # what is done, without waiting for a compiler; groups are in *.groups as they end. Exit status 2: fewer cases.
    fuzz() { # fuzz NAME SECONDS WORKERS
        job $(($2 + 20)) "fuzz_$1" $python "tests/fuzz/fuzz_$1.py" --cases 2000 --seed 1 --device cuda --workers "$3" --seconds "$2" --log "$out/logs/fuzz_$1.groups"
        settle
    }
    if [ "$part" = fuzz ]; then
        fuzz gated_residual 70 4
        fuzz ple 260 16
    else
        fuzz gdn 480 16
    fi
    ;;
gdn)
    job 540 validate_gdn $python benchmarks/next/validate_gdn.py --out "$out/results" && settle
    ;;
spans)
    job 200 test_spans $python -P -m pytest -p no:cacheprovider -q tests/cuda/test_gated_delta_rule_cuda.py -k "span or peak or twenty or alone" && settle
    job 200 bench_spans $python benchmarks/time_spans.py --out "$out/results/gdn_spans_h200.json" && settle
    ;;
next)
    job 240 validate_ple $python benchmarks/next/validate_ple.py --out "$out/results" && settle
    job 300 bench_pieces $python benchmarks/bench_pieces.py --out "$out/results" && settle
    ;;
peers)
    job 440 bench_gdn $python benchmarks/bench_gated_delta_rule.py --peers flash_qla fla --site "${PEERS:?}" --logs "$out/logs" --out "$out/results/gated_delta_rule_h200.json" && settle
    ;;
layer)
    job 300 bench_layer $python benchmarks/bench_decoder_layer.py --site "${PEERS:?}" --logs "$out/logs" --out "$out/results/decoder_layer_h200.json" && settle
    ;;
san)
    job 300 test_sanitizer $python -P -m pytest -p no:cacheprovider -q tests/cuda/test_sanitizer_cuda.py && settle
    ;;
two)
    job 240 test_kcp $python -P -m pytest -p no:cacheprovider -q tests/cuda/test_kcp_cuda.py && settle
    job 240 bench_kcp $python benchmarks/bench_kcp.py --out "$out/results/kcp_h200.json" && settle
    ;;
*)
    echo "unknown part: $part" >&2
    exit 2
    ;;
esac
for log in "$out"/logs/bench_* "$out"/logs/validate_*; do
    case $log in *.end | *'*') continue ;; esac
    echo "== ${log##*/}"
    tail -n 40 "$log"
done
find benchmarks/results -type f -newer "$out/began" -exec cp {} "$out/results" \;
rm "$out/began"
tar -C "$out" -czf "$out/h200-$part.tgz" logs results && rm -r "$out/logs" "$out/results"
printf '%s' "$table"
exit $failed
