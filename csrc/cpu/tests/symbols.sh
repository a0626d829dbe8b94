# Usage: symbols.sh <nm> <library> <object file>...
#
# An object file of a target must define no weak or unique symbol. The linker keeps one copy of such a function for the
# whole library, and if that is the one with AVX-512 instructions, a processor without them stops in another target.
set -eu
nm=$1 library=$2
shift 2
status=0
targets=0
for object in "$@"; do
  case $object in */targets/*) ;; *) continue ;; esac
  targets=$((targets + 1))
  if "$nm" -C "$object" | grep -E '^[0-9a-f ]* [uvVwW] '; then
    echo "$object has the weak symbols above"
    status=1
  fi
done
if [ "$targets" -lt 2 ]; then
  echo "only $targets object files of targets in: $*"
  status=1
fi
if "$nm" -D --defined-only "$library" | grep -v ' T bnb_cpu_'; then
  echo "$library exports the symbols above besides its interface"
  status=1
fi
exit $status
