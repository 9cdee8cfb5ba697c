#!/bin/sh
# A GPU's day: the kernels' tests on it, then their speed. At most 8 minutes; needs torch, triton and pytest.
#
#     sh bench/gpu.sh            PYTHON=… for another interpreter than .venv's
#
# Tests of different files run side by side, as most of their time is the compiler's.
set -u
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
unset TRITON_INTERPRET
export PYTHONPATH=.:core:operator:worker:kernels
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no GPU that torch can use: nothing is tested or measured"
    exit 0
fi
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
tests=""
for file in $(grep -l -e 'usefixtures("implementation")' -e 'pytest.mark.gpu' tests/unit/kernels/test_*.py); do
    name=$(basename "$file" .py)
    timeout 270 "$PYTHON" -m pytest -q -m gpu "$file" > "$logs/$name" 2>&1 &
    tests="$tests $!:$name"
done
failed=0
for each in $tests; do
    wait "${each%%:*}"
    status=$?
    name=${each#*:}
    case $status in
        0) tail -n 1 "$logs/$name" | sed "s/^/$name: /" ;;
        5) echo "$name: no tests of GPUs" ;;
        *) failed=1; echo "$name: FAILED ($status; 124 is out of time)"; tail -n 60 "$logs/$name" ;;
    esac
done
timeout 200 "$PYTHON" bench/gpu.py --seconds 180 || failed=1
exit $failed
