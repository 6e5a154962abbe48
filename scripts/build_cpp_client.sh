#!/usr/bin/env bash
# Build the C++ client into clients/cpp/build; again: only what changed.
#
# Usage: scripts/build_cpp_client.sh [--check] [--tests]
#   --check   only say whether the tools are there: exit 0, or 3 and what to install
#   --tests   also build the program that the tests drive
set -euo pipefail
cd "$(dirname "$0")/.."

MISSING=3
PACKAGES='g++ cmake pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc'

check=0 tests=OFF
for argument in "$@"; do
  case $argument in
    --check) check=1 ;;
    --tests) tests=ON ;;
    *) echo "build_cpp_client: no such flag: $argument" >&2; exit 2 ;;
  esac
done

missing=()
for tool in c++ cmake pkg-config protoc grpc_cpp_plugin; do
  command -v "$tool" >/dev/null || missing+=("$tool")
done
for library in grpc++ protobuf; do
  pkg-config --exists "$library" 2>/dev/null || missing+=("the library $library")
done
if ((${#missing[@]})); then
  list=$(printf ', %s' "${missing[@]}")
  echo "the C++ client needs ${list:2}; on Debian: apt-get install $PACKAGES" >&2
  exit $MISSING
fi
((check)) && exit 0

cmake -S clients/cpp -B clients/cpp/build -DOCTAVO_BUILD_TESTS=$tests >/dev/null
# Not the flags of a make that runs this.
MAKEFLAGS=--no-print-directory cmake --build clients/cpp/build --parallel "$(nproc)"
