#!/usr/bin/env bash
# Installs rayrft and its dependencies, in tested versions, into .venv in the project's root. Running it again skips
# finished work, and examines GPUs; an interrupted installation is repeated. As root, or with passwordless sudo, it also
# installs bubblewrap, in which code rewards run programs, and libnuma, which vLLM for CPUs loads; otherwise it prints
# how to.
#
#   bash cluster/setup.sh [extra …]      extras besides cpu or gpu, such as: test
#
#   RAYRFT_DEVICE=cpu|gpu    which vLLM to install (default: what .venv has, else gpu where an NVIDIA driver answers)
#   PYTHON=python3.11        which Python makes the environment
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'setup: %s\n' "$*" >&2; }
examine() { [ "$device" = cpu ] || .venv/bin/rayrft doctor || true; }

# One at a time: a second call waits for the first, and then finds its work done.
exec 9<cluster/setup.sh
flock 9

stamp=.venv/.rayrft-setup # what was installed from, and which extras; in part: pip is at work, or was killed at it
in_part=.venv/.rayrft-setup-in-part

device=${RAYRFT_DEVICE:-}
[ -n "$device" ] || ! [ -f "$stamp" ] || device=$(tail -n 1 "$stamp" | tr ',' '\n' | grep -xE 'cpu|gpu')
if [ -z "$device" ]; then
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then device=gpu; else device=cpu; fi
  if [ "$device" = cpu ] && grep -qx 0x10de /sys/bus/pci/devices/*/vendor 2>/dev/null; then
    say "there is an NVIDIA GPU whose driver does not answer (nvidia-smi -L), so .venv is for CPUs;" \
      "install the driver, remove .venv and run this again"
  fi
fi
case "$device" in cpu | gpu) ;; *) say "RAYRFT_DEVICE must be cpu or gpu, found '$device'"; exit 2 ;; esac

python=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}
[ -n "$python" ] || { say "no Python found: install Python 3.11, or name it in PYTHON"; exit 2; }
"$python" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] < (3, 13)))' ||
  { say "$("$python" --version) does not fit: install Python 3.11, or name it in PYTHON"; exit 2; }

extras=$device
for extra in "$@"; do extras=$extras,$extra; done

# An environment made with more extras serves a call that asks for fewer.
constraints=cluster/constraints-$device.txt
wanted=$(cat pyproject.toml cluster/constraints.txt "$constraints" cluster/setup.sh cluster/mend_torchvision.py |
  cksum | cut -d' ' -f1)
if [ -f "$stamp" ]; then
  has=$(tail -n +2 "$stamp" | tr ',' '\n')
  if ! grep -qx "$device" <<<"$has"; then
    say "this .venv is not for $device, and both have a module named vllm: remove .venv first"
    exit 2
  fi
  missing=$(tr ',' '\n' <<<"$extras" | grep -vxF "$has" || true)
  [ "$(head -n 1 "$stamp")" != "$wanted" ] || [ -n "$missing" ] || { examine; exit 0; }
  extras=$(printf '%s\n' "$has" "${extras//,/$'\n'}" | sort -u | paste -sd, -)
fi

# A pip that is killed leaves packages that look installed and lack files.
if [ -e "$in_part" ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  say "making .venv with $("$python" --version)"
  "$python" -m venv --clear .venv
fi
mv -f "$stamp" "$in_part" 2>/dev/null || touch "$in_part"
pip=(.venv/bin/python -m pip --disable-pip-version-check --no-input)

index=()
if [ "$device" = cpu ]; then
  torch=$(grep '^torch==' "$constraints")
  if ! "${pip[@]}" install -q --dry-run --no-deps "$torch" >/dev/null 2>&1; then
    say "the configured package index has no $torch: using PyTorch's own CPU index for it"
    index=(--extra-index-url https://download.pytorch.org/whl/cpu)
  fi
fi

say "installing rayrft[$extras] (about three minutes the first time)"
"${pip[@]}" install -q -c "$constraints" ${index[@]+"${index[@]}"} -e ".[$extras]"

# vLLM asks for these; builds for another torch break `import vllm` and `import transformers`. Vision models need
# torchvision, which can be patched; the others they do without, as text models do without any.
.venv/bin/python cluster/mend_torchvision.py
for package in torchvision torchaudio torchcodec; do
  if .venv/bin/python -c "import importlib.util as u; raise SystemExit(u.find_spec('$package') is None)" &&
    ! .venv/bin/python -c "import $package" >/dev/null 2>&1; then
    say "removing $package: this build cannot be imported with the installed torch; text models work without it"
    "${pip[@]}" uninstall -q -y "$package" 2>/dev/null
  fi
done

# Install a package of the distribution, or say how to.
install() {
  local root=()
  [ "$(id -u)" = 0 ] || root=(sudo -n)
  apt() { ${root[@]+"${root[@]}"} apt-get "$@" >/dev/null 2>&1; }
  if command -v apt-get >/dev/null 2>&1 &&
    { apt install -y -qq "$1" || { apt update -qq && apt install -y -qq "$1"; }; }; then
    say "installed $1"
  else
    say "$1 is missing and cannot be installed from here; $2: sudo apt-get install $1"
  fi
}

# What isolates code from the machine best, where it is run to be rewarded.
command -v bwrap >/dev/null 2>&1 || install bubblewrap "for code rewards"
if [ "$device" = cpu ] && ! .venv/bin/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
  install libnuma1 "vLLM does not start without it"
fi

printf '%s\n%s\n' "$wanted" "$extras" >"$in_part"
mv "$in_part" "$stamp"
examine
say "ready: .venv ($extras)"
