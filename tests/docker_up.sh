#!/bin/sh
# A Docker daemon of the tests' own: private socket, data root and no bridge, so that it touches no other daemon's
# containers and no firewall rule.   docker_up.sh [start|status|stop]   prints the daemon's DOCKER_HOST.
# docker_up.sh able   says why no daemon can run on this machine at all, as in a container without privileges.
# Needs root and the dockerd binary (Debian: docker.io). POLAR_TEST_DOCKER names another directory than the default.
set -eu
dir="${POLAR_TEST_DOCKER:-/tmp/polar-test-docker}"
host="unix://$dir/docker.sock"

running() { [ -S "$dir/docker.sock" ] && [ -f "$dir/pid" ] && kill -0 "$(cat "$dir/pid")" 2>/dev/null; }

case "${1:-start}" in
start)
    if ! running; then
        command -v dockerd >/dev/null || { echo "dockerd isn't installed (Debian: apt-get install docker.io)" >&2; exit 1; }
        mkdir -p "$dir"
        rm -f "$dir/docker.sock" "$dir/pid"
        setsid dockerd --data-root "$dir/data" --exec-root "$dir/exec" --pidfile "$dir/pid" --host "$host" \
            --bridge=none --iptables=false --ip6tables=false >"$dir/log" 2>&1 </dev/null &
        started=$!
        tries=0
        until running && curl -sf --unix-socket "$dir/docker.sock" http://docker/_ping >/dev/null 2>&1; do
            tries=$((tries + 1))
            if [ "$tries" -ge 600 ] || ! kill -0 "$started" 2>/dev/null; then
                echo "dockerd didn't start:" >&2
                tail -5 "$dir/log" >&2
                kill "$started" 2>/dev/null || true
                umount "$dir/data" 2>/dev/null || true
                exit 1
            fi
            sleep 0.1
        done
    fi
    echo "$host"
    ;;
status)
    running
    ;;
stop)
    if running; then
        pid=$(cat "$dir/pid")
        kill "$pid"
        while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
        umount "$dir/data" 2>/dev/null || true
    fi
    ;;
able)
    [ "$(id -u)" = 0 ] || { echo "a Docker daemon needs root"; exit 1; }
    unshare --mount --net --pid --fork true 2>/dev/null || { echo "root may make no namespaces here"; exit 1; }
    [ -w /sys/fs/cgroup ] || { echo "/sys/fs/cgroup can't be written"; exit 1; }
    ;;
*)
    echo "usage: docker_up.sh [start|status|stop|able]" >&2
    exit 2
    ;;
esac
