#!/usr/bin/env bash
# The CPU tests over torch releases, and the kernels' compilation for sm_90 over Triton releases: tests/matrix.sh [folder]
# One virtual environment for each release goes into the folder (a temporary one by default) and is used again when it is
# already there; several gigabytes each where pip gives a CUDA build. Prints a table; exits with 1 if a cell fails.
set -uo pipefail
cd "$(dirname "$0")/.."

folder=$(realpath -m "${1:-$(mktemp -d)}")
mkdir -p "$folder"
failed=0
# What depends on the release: backend, passes, autograd of the ops, training and compatibility. The rest is arithmetic.
torch_tests=(tests/backend tests/fx_passes tests/faults tests/lowerings tests/ops/test_gated_delta_rule_op.py
    tests/ops/test_gated_residual.py tests/ops/test_tape_regions.py tests/fuzz)
triton_tests=(tests/ops/test_gdn_compile_sm90.py tests/ops/test_ple_compile_sm90.py tests/ops/test_gated_residual_kernels.py)

cell() { # cell NAME PYTHON TESTS...: one line of the table
    local name=$1 python=$2
    shift 2
    if "$python" -m pytest -p no:cacheprovider "$@" >"$folder/${name// /-}.log" 2>&1; then
        echo "| $name | pass | $(tail -n 1 "$folder/${name// /-}.log") |"
    else
        failed=1
        echo "| $name | FAIL | $(tail -n 1 "$folder/${name// /-}.log") |"
    fi
}

environment() { # environment NAME BASE-PYTHON PACKAGE...: makes it unless it stands there; prints its interpreter
    local where=$folder/$1 base=$2
    shift 2
    if [ ! -x "$where/bin/python" ]; then
        "$base" -m venv "$where" && "$where/bin/python" -m pip install --quiet "setuptools>=77" wheel "$@" &&
            "$where/bin/python" -m pip install --quiet -e '.[test]' "$@" || return 1
    fi
    echo "$where/bin/python"
}

echo "| | result | pytest |"
echo "|---|---|---|"
for release in 2.11.0 2.13.0 2.14.1; do
    python=$(environment "torch-$release" python3.11 "torch==$release") || { echo "| torch $release | no environment | |"; failed=1; continue; }
    cell "torch $release" "$python" "${torch_tests[@]}"
done
if command -v python3.12 >/dev/null && python3.12 -c '' 2>/dev/null; then
    python=$(environment python-3.12 python3.12 torch==2.13.0) && cell "python 3.12" "$python" "${torch_tests[@]}"
fi
for release in 3.6.0 3.7.0 3.8.0 3.9.0; do
    # Any torch compiles kernels without a GPU; only Triton changes, from a folder in front of the environment's.
    target=$folder/triton-$release
    [ -d "$target" ] || "$folder/torch-2.13.0/bin/python" -m pip install --quiet --no-deps --target "$target" "triton==$release"
    PYTHONPATH=$target cell "triton $release" "$folder/torch-2.13.0/bin/python" "${triton_tests[@]}"
done
exit $failed
