#!/usr/bin/env bash
# Build the C++ tests into a temporary folder and run them:
#
#   tests/cpp/run.sh            as the extension is built
#   tests/cpp/run.sh asan       with AddressSanitizer and UndefinedBehaviorSanitizer
#   tests/cpp/run.sh tsan       with ThreadSanitizer
#   tests/cpp/run.sh generic    on an emulated processor without AVX2, whose scores must equal this one's to the bit
#   tests/cpp/run.sh aarch64    cross-compiled for 64-bit ARM and emulated, to the same bits
set -euo pipefail
cd "$(dirname "$0")/../.."

mode=${1:-plain}
need() {
  command -v "$1" || { echo "run.sh $mode needs $1, which is not installed (Debian: apt-get install $2)" >&2; exit 1; }
}
flags=(-std=c++17 -ffp-contract=off -Wall -Wextra -pthread -Icsrc)
case $mode in
  plain) flags+=(-O3) ;;
  asan) flags+=(-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer) ;;
  tsan) flags+=(-O1 -g -fsanitize=thread) ;;
  generic)
    flags+=(-O3)
    emulator=$(need qemu-x86_64 qemu-user)
    ;;
  aarch64)
    flags+=(-O3)
    emulator=$(need qemu-aarch64 qemu-user)
    cross=$(need aarch64-linux-gnu-g++ g++-aarch64-linux-gnu)
    ;;
  *)
    echo "usage: $0 [plain|asan|tsan|generic|aarch64]" >&2
    exit 2
    ;;
esac

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
build() { # [compiler [flag]], into $folder/test_core
  local compiler=${1:-${CXX:-g++}}
  shift || true
  local objects=() jobs=() source failed=0
  for source in tests/cpp/test_core.cpp $(ls csrc/*.cpp | grep -v bindings.cpp); do
    objects+=("$folder/$(basename "$source").o")
    "$compiler" "${flags[@]}" -c "$source" -o "${objects[-1]}" &
    jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job" || failed=1; done
  [[ $failed == 0 ]]
  "$compiler" "${flags[@]}" "${objects[@]}" "$@" -o "$folder/test_core"
}
build

same_digests() {
  grep -q '^digest' "$folder/there" || { echo "the emulated processor printed no digest" >&2; exit 1; }
  if [[ $(grep '^digest' "$folder/here") != $(grep '^digest' "$folder/there") ]]; then
    echo "the scores of the two processors differ" >&2
    exit 1
  fi
}

echo "== $mode"
case $mode in
  asan) ASAN_OPTIONS=detect_leaks=1 "$folder/test_core" ;;
  tsan) TSAN_OPTIONS=halt_on_error=1 "$folder/test_core" ;;
  generic)
    "$folder/test_core" | tee "$folder/here"
    # Without the pool's tests: no thread can start in a child forked under QEMU 7.
    "$emulator" -cpu Nehalem-v1 "$folder/test_core" exact score ngram scan | tee "$folder/there"
    grep -qx "levels: generic" "$folder/there" || { echo "the emulated processor has AVX2" >&2; exit 1; }
    same_digests
    ;;
  aarch64)
    "$folder/test_core" | tee "$folder/here"
    build "$cross" -static
    "$emulator" "$folder/test_core" exact score ngram scan | tee "$folder/there"
    same_digests
    ;;
  *) "$folder/test_core" ;;
esac
