#!/usr/bin/env bash
# The CPU tests over torch releases and Python 3.12, and the kernels' compilation for sm_90 over Triton releases.
#
#   tests/matrix.sh [folder [cell...]]     cells: torch-2.11.0 torch-2.13.0 torch-2.14.1 python-3.12 triton-3.6.0 ...
#
# One virtual environment a cell goes into the folder (a temporary one by default) and is used again when it is already
# there; several gigabytes each where pip gives a CUDA build. Prints a table; exits with 1 if a cell fails or is unknown.
set -uo pipefail
cd "$(dirname "$0")/.."

cells=(torch-2.11.0 torch-2.13.0 torch-2.14.1 python-3.12 triton-3.6.0 triton-3.7.0 triton-3.8.0 triton-3.9.0)
folder=$(realpath -m "${1:-$(mktemp -d)}")
mkdir -p "$folder"
failed=0
# What depends on the release: backend, passes, autograd of the ops, training and compatibility. The rest is arithmetic.
torch_tests=(tests/backend tests/fx_passes tests/faults tests/lowerings tests/ops/test_gated_delta_rule_op.py
    tests/ops/test_gated_residual.py tests/ops/test_tape_regions.py tests/ops/test_tape_region_kinds.py tests/ops/test_direct.py
    tests/ops/test_saved_tensors_once.py tests/ops/test_triton_launch.py tests/ops/test_gated_delta_rule_repeats.py tests/fuzz
    tests/ops/test_gdn_spans.py::test_a_compiled_call_keeps_and_reads_start_states_at_any_length)
# Compilation alone: an interpreted test fails under Triton 3.6 ("only 0-dimensional arrays can be converted"; NumPy 2.4).
triton_tests=(-k "not interpreted or map_kernel" tests/ops/test_gdn_compile_sm90.py tests/ops/test_ple_compile_sm90.py
    tests/ops/test_gated_residual_kernels.py tests/ops/test_causal_conv1d_kernels.py
    tests/ops/test_kcp_interpreted.py::test_the_map_kernel_compiles_for_hopper_two_to_a_multiprocessor)
# The Gluon kernels run under this release alone, see configs.HOPPER_WALKS_TRITON; 3.8 serializes products of theirs.
gluon_release=3.6.0
gluon_tests=(
    tests/ops/test_gdn_hopper.py::test_the_walks_fit_a_multiprocessor_and_run_their_products_in_parallel
    tests/ops/test_gdn_hopper.py::test_the_map_kernel_fits_twice_on_a_multiprocessor_without_spills
    tests/ops/test_gdn_hopper_gradients.py::test_the_gradients_fit_a_multiprocessor_and_run_their_products_in_parallel
    tests/ops/test_gdn_operands_hopper.py::test_four_programs_share_a_multiprocessor)

line() { # line NAME RESULT PYTEST: one line of the table
    [ "$2" = pass ] || failed=1
    echo "| $1 | $2 | $3 |"
}

cell() { # cell NAME PYTHON TESTS...: runs the tests, prints the line
    local name=$1 python=$2 result=FAIL log=$folder/$1.log
    shift 2
    # Caches of the cell's own. A run that was cut off can leave truncated programs there: delete them then.
    if TORCHINDUCTOR_CACHE_DIR="$folder/cache-$name/inductor" TRITON_CACHE_DIR="$folder/cache-$name/triton" \
        "$python" -m pytest --show-capture=no -p no:cacheprovider "$@" >"$log" 2>&1; then
        result=pass
    fi
    line "$name" $result "$(grep -E '(passed|failed|error).* in ' "$log" | tail -n 1)"
}

interpreter() { # interpreter 3.12: its path, from PATH or from pyenv, whose shims fail for versions not chosen
    local candidate
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python"$1"; do
        "$candidate" -c '' 2>/dev/null && { echo "$candidate"; return; }
    done
    return 1
}

environment() { # environment NAME PYTHON-VERSION PACKAGE...: makes it unless it stands there; prints its interpreter
    local where=$folder/$1 base
    base=$(interpreter "$2") || return 1
    shift 2
    if [ ! -x "$where/bin/python" ]; then
        "$base" -m venv "$where" && "$where/bin/python" -m pip install --quiet "setuptools>=77" wheel "$@" &&
            "$where/bin/python" -m pip install --quiet -e '.[test]' "$@" || return 1
    fi
    echo "$where/bin/python"
}

triton() { # triton RELEASE: its folder, which goes in front of the environment's own; any torch compiles without a GPU
    local target=$folder/triton-$1
    if [ ! -d "$target/triton" ]; then
        "$2" -m pip install --quiet --no-deps --target "$target" "triton==$1" >&2 || return 1
    fi
    echo "$target"
}

echo "| cell | result | pytest |"
echo "|---|---|---|"
shift $(($# > 0))
for name in "${@:-${cells[@]}}"; do
    case $name in
    torch-*) python=$(environment "$name" 3.11 "torch==${name#*-}") && tests=("${torch_tests[@]}") path= ;;
    python-*) python=$(environment "$name" "${name#*-}" torch==2.13.0) && tests=("${torch_tests[@]}") path= ;;
    triton-*) python=$(environment torch-2.13.0 3.11 torch==2.13.0) && path=$(triton "${name#*-}" "$python") &&
        tests=("${triton_tests[@]}") && { [ "$name" != "triton-$gluon_release" ] || tests+=("${gluon_tests[@]}"); } ;;
    *) false ;;
    esac || { line "$name" "no environment" ""; continue; }
    PYTHONPATH=$path cell "$name" "$python" "${tests[@]}"
done
exit $failed
