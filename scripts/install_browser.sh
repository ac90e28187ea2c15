#!/usr/bin/env bash
# Install Chromium from Debian's packages for the tests of the pages, unless a browser is there that they can drive.
#
#   scripts/install_browser.sh              install it; as somebody who may not, do nothing
#   scripts/install_browser.sh --left-out   where there is no browser, say what is left out and which command brings it
set -euo pipefail
for browser in chromium chromium-browser google-chrome; do
  ! command -v "$browser" >/dev/null || exit 0
done
if [ "${1:-}" = --left-out ]; then
  echo "The tests of the page and of the report were left out, since no browser is installed: sudo apt-get install chromium"
elif [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
fi
