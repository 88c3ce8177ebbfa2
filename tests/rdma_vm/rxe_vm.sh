#!/bin/bash
# rxe_vm.sh prepare [--cache DIR]            install what is missing, build the guest image (cached)
# rxe_vm.sh run [OPTION...] -- CMD [ARG...]  prepare, boot the guest, run CMD in it as root, return its exit code
#
#   --cache DIR     where images are kept; default $XDG_CACHE_HOME/rxe_vm, or ~/.cache/rxe_vm
#   --cpus N        guest CPUs, default 2
#   --memory MB     guest memory, default 2048
#   --timeout S     seconds for the whole guest, default 600
#   --share DIR     DIR is writable from the guest, at the same path (may be repeated)
#   --env NAME=VAL  set in the guest (may be repeated); --env NAME passes the caller's value
#   --nics N        number of soft-RoCE devices, default 1
#   --wire SPEC     listen:PORT or connect:PORT: rxe0 is on a virtual cable to a second guest (see two_vms.sh)
#
# The guest sees this machine's / read-only under a RAM overlay: same paths, same programs; what it writes outside
# --share vanishes. It starts in the caller's working directory with the caller's PATH, after guest_env.sh.
# The guest's console (CMD's stdout and stderr, and a panic's text) comes out on stdout as it is written.
# Exit code 99 with a line on stderr: the guest panicked, hung until --timeout, or QEMU failed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=apt_need.sh
. "$here/apt_need.sh"

usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }

# Guest modules; those they depend on are added. crc32_generic: rxe asks the crypto API for it by name.
modules="virtio_pci 9pnet_virtio 9p overlay crc32_generic rdma_rxe rdma_ucm dummy veth virtio_net sch_netem"

prepare() {
  # On the host: emulator and image tools. Used inside the guest as well, since / is shared: iproute2 (ip, rdma), providers.
  need_packages qemu-system-x86 busybox-static cpio kmod zstd iproute2 ibverbs-providers ibverbs-utils
  mkdir -p "$cache"
  exec {lock}>"$cache/lock"
  flock "$lock"
  if [ ! -e "$image/initrd.zst" ]; then
    rm -rf "$cache/build"
    mkdir "$cache/build"
    (cd "$cache/build" && build_image)
    mkdir -p "$image"
    mv "$cache/build/vmlinuz" "$cache/build/initrd.zst" "$image/"
    rm -rf "$cache/build"
  fi
  exec {lock}>&-
}

# Debian's stock kernel, downloaded and not installed, and an initramfs of busybox, our modules and guest_init.sh.
build_image() {
  local pkg kernel file
  apt-cache show linux-image-amd64 >/dev/null 2>&1 || as_root apt-get update -qq >&2
  pkg=$(apt-cache depends linux-image-amd64 | awk '/Depends:/ {print $2; exit}')
  kernel=${pkg#linux-image-}
  echo "building the guest image from $pkg" >&2
  apt-get download -qq -o APT::Sandbox::User=root "$pkg" >&2
  mkdir -p unpacked initrd/bin initrd/proc initrd/sys initrd/dev initrd/lower initrd/overlay initrd/root
  dpkg-deb --fsys-tarfile "$pkg"_*.deb | tar -x -C unpacked --wildcards './boot/vmlinuz-*' './lib/modules/*/modules.*' \
    '*/kernel/drivers/infiniband/*' '*/kernel/drivers/virtio/*' '*/kernel/drivers/net/*.ko' '*/kernel/net/*' \
    '*/kernel/fs/*' '*/kernel/crypto/*' '*/kernel/arch/x86/crypto/*' '*/kernel/lib/*'
  depmod -b unpacked "$kernel"
  for module in $modules; do
    modprobe -d unpacked -S "$kernel" --show-depends "$module" | awk '$1 == "insmod" {print $2}'
  done | sort -u | while read -r file; do
    install -D -m 644 "$file" "initrd/${file#*unpacked/}"
  done
  cp unpacked/lib/modules/"$kernel"/modules.{order,builtin,builtin.modinfo} "initrd/lib/modules/$kernel/"
  depmod -b initrd "$kernel"
  cp /bin/busybox initrd/bin/
  install "$here/guest_init.sh" initrd/init
  printf 'modprobe -a %s\n' "$modules" >initrd/load_modules
  (cd initrd && find . | cpio -o -H newc --quiet) | zstd -q -10 -o initrd.zst
  mv unpacked/boot/vmlinuz-* vmlinuz
}

run() {
  local control qemu_rc=0 qemu i=0 rank=0 extra=()
  [[ $wire == connect:* ]] && rank=1
  control=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '$control'" EXIT
  {
    printf 'export PATH=%q HOME=%q LANG=C.UTF-8 TERM=dumb RXE_NICS=%q\n' "$PATH:/usr/sbin:/sbin" "$HOME" "$nics"
    [ -z "$wire" ] || printf 'export NODE_RANK=%d NODE_COUNT=2 NODE_IP=10.98.0.%d NODE0_IP=10.98.0.1\n' $rank $((rank + 1))
    for name in "${env[@]}"; do
      [[ $name == *=* ]] || name=$name=${!name-}
      printf 'export %s=%q\n' "${name%%=*}" "${name#*=}"
    done
    printf 'set -e\ncd %q\n. %q\nexec' "$PWD" "$here/guest_env.sh"
    printf ' %q' "$@"
  } >"$control/start"
  for dir in "${share[@]}"; do
    mkdir -p "$dir"
    dir=$(realpath "$dir")
    printf '%s %s\n' "share$i" "$dir" >>"$control/shares"
    extra+=(-virtfs "local,path=$dir,mount_tag=share$i,security_model=none")
    i=$((i + 1))
  done
  if [ -n "$wire" ]; then
    extra+=(-netdev "socket,id=wire,${wire%%:*}=127.0.0.1:${wire#*:}")
    extra+=(-device "virtio-net-pci,netdev=wire,mac=52:54:00:00:00:0$((rank + 1)),romfile=")
  fi
  timeout -k 5 "$limit" qemu-system-x86_64 -M q35 -accel tcg,thread=multi -cpu max -smp "$cpus" -m "$memory" \
    -nodefaults -no-user-config -display none -serial stdio -no-reboot -device isa-debug-exit,iobase=0x501,iosize=1 \
    -kernel "$image/vmlinuz" -initrd "$image/initrd.zst" \
    -append "console=ttyS0 quiet panic=-1 mitigations=off nokaslr tsc=reliable random.trust_cpu=on" \
    -virtfs local,path=/,mount_tag=hostroot,security_model=none,readonly=on,multidevs=remap \
    -virtfs "local,path=$control,mount_tag=control,security_model=none" "${extra[@]}" </dev/null &
  qemu=$!
  trap 'kill $qemu; exit 130' INT TERM
  wait $qemu || qemu_rc=$?
  [ -s "$control/rc" ] && return "$(cat "$control/rc")"
  if [ $qemu_rc = 124 ]; then
    echo "rxe_vm: the guest was still running after $limit s" >&2
  else
    echo "rxe_vm: the guest ended without an exit code (panic?); QEMU's own was $qemu_rc" >&2
  fi
  return 99
}

action=${1-}
[ $# -gt 0 ] && shift
cache=${XDG_CACHE_HOME:-$HOME/.cache}/rxe_vm cpus=2 memory=2048 limit=600 nics=1 wire='' share=() env=()
while [ $# -gt 0 ]; do
  case $1 in
    --) shift; break ;;
    --cache) cache=$2 ;;
    --cpus) cpus=$2 ;;
    --memory) memory=$2 ;;
    --timeout) limit=$2 ;;
    --share) share+=("$2") ;;
    --env) env+=("$2") ;;
    --nics) nics=$2 ;;
    --wire) wire=$2 ;;
    *) usage ;;
  esac
  shift 2
done
# An image belongs to this script and the guest's init as they are now.
image=$cache/image-$(cat "$here/rxe_vm.sh" "$here/guest_init.sh" | sha256sum | cut -c1-12)
case $action in
  prepare) prepare ;;
  run) [ $# -gt 0 ] || usage; prepare; run "$@" ;;
  *) usage ;;
esac
