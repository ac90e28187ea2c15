#!/usr/bin/env bash
# Install Chromium from Debian's packages, unless a browser is there that the tests of the pages can drive.
set -euo pipefail
for browser in chromium chromium-browser google-chrome; do
  ! command -v "$browser" >/dev/null || exit 0
done
as_root=$([ "$(id -u)" = 0 ] || echo sudo)
$as_root apt-get update -qq
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
