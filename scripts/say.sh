# Progress lines for the other scripts, on stderr, each with the seconds since the script began; sourced, not run.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '[%4d s] %s: %s\n' "$SECONDS" "${0##*/}" "$*" >&2; }

die() {
  say "error: $*"
  exit 1
}
