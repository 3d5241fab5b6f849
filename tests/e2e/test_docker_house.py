"""A whole house whose gateway puts attempts into Docker containers: what agents do to them, and what becomes of it.

The daemon is the tests' own, the images hold neither node nor Python, and the only way out is the proxy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
from dock_kit import HELLO, Dock, ended

import runtime_docker
from polar_common.house.layout import House
from polar_runtime.portable import portable_python

pytestmark = [pytest.mark.docker, pytest.mark.nats, pytest.mark.chdb, pytest.mark.harness, pytest.mark.timeout(600)]


def test_clis_finish_in_an_image_that_has_nothing_of_theirs(dock: Dock) -> None:
    names = ("pi", "claude_code", "codex")
    rows = dock.run(
        *(
            {
                "id": name, "instruction": "Create hello.txt containing hi", "harness": {"name": name},
                "runtime": {"kind": "docker", "image": dock.glibc},
                "evaluator": {"kind": "command", "command": f"{HELLO} && ! command -v node && ! command -v python3"},
                "limits": {"attempt_s": 240, "session_s": 300, "attempts": 1},
            }
            for name in names
        )
    )  # fmt: skip
    for name in names:
        row = rows[name]
        assert row["outcomes"] == {"passed": 1}, row["shown"]
        assert [a["exit_code"] for a in row["shown"]["attempts"]] == [0]
        assert (row["completions"], row["traces"], row["exact_share"]) == (2, 1, 1.0)


def test_nothing_but_the_proxy_can_be_reached(dock: Dock) -> None:
    house = House(dock.live.data).read()
    assert house is not None
    ports = [urlsplit(url).port for url in (house.ingest, house.proxy, house.analytics, house.engine, house.nats)]
    tried = [f"127.0.0.1:{p}" for p in ports] + ["1.1.1.1:53", "169.254.169.254:80", "172.17.0.1:22", "[::1]:8700"]
    script = ""
    for address in tried:
        host, _, port = address.rpartition(":")
        script += f"if nc -w 3 {host.strip('[]')} {port} </dev/null; then echo {address} >> reached; fi\n"
    script += "if nslookup example.com >/dev/null 2>&1; then echo names >> reached; fi\n"
    script += "ls /sys/class/net > links; ls /var/run/docker.sock >> reached 2>/dev/null\n"
    script += "wget -q -O - http://127.0.0.1:8700/ >> reached; echo hi > hello.txt\n"
    wanted = f'{HELLO} && ! test -s reached && test "$(cat links)" = lo'
    row = dock.run(dock.task("egress", script, evaluator={"kind": "command", "command": wanted}))["egress"]
    assert row["outcomes"] == {"passed": 1}, row["shown"]
    assert ended(row)["exit_code"] == 0


def test_limits_are_the_agents_own_and_are_judged(dock: Dock) -> None:
    rows = dock.run(
        dock.task("bomb", "b() { b | b & }; b; sleep 5\n", runtime={"pids": 64}),
        dock.task("hog", "dd if=/dev/zero of=/dev/null bs=900M count=1; sleep 5\n", runtime={"memory_mb": 128}),
        dock.task("filler", "while cat /bin/busybox >> big; do :; done; sleep 5\n", runtime={"disk_mb": 32}),
    )
    for name, limit in (("bomb", "pids"), ("hog", "memory"), ("filler", "disk")):
        attempt = ended(rows[name])
        assert rows[name]["outcomes"] == {"failed": 1}, attempt
        assert (attempt["fault"], attempt["cause"]) == ("agent", "resource_exhausted")
        assert limit in attempt["detail"]
    dock.works()


def test_a_timeout_ends_what_ignores_sigterm_and_yields_its_traces(dock: Dock) -> None:
    script = "trap '' TERM INT HUP\nwhile :; do sleep 1; done\n"
    row = dock.run(dock.task("stubborn", script, limits={"attempt_s": 24, "postrun_reserve_s": 12}))["stubborn"]
    attempt = ended(row)
    assert row["outcomes"] == {"budget_exhausted": 1}
    assert attempt["timed_out"] and attempt["fault"] == "agent"
    dock.works()


def test_what_daemonises_goes_with_its_container(dock: Dock) -> None:
    script = "echo hi > hello.txt; (setsid sh -c 'trap \"\" TERM HUP; while :; do sleep 1; done' >/dev/null 2>&1 &)\n"
    row = dock.run(dock.task("daemon", script))["daemon"]
    assert row["outcomes"] == {"passed": 1}
    assert ended(row)["exit_code"] == 0
    dock.works()


_LATE = """
import http.client, json, os, signal, socket
from urllib.parse import urlsplit
for number in (signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "Still here"}]})
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
path = urlsplit(os.environ["OPENAI_BASE_URL"]).path + "/chat/completions"
while True:
    there = http.client.HTTPConnection("proxy")
    there.sock = socket.socket(socket.AF_UNIX)
    there.sock.connect("/polar/proxy/proxy.sock")
    there.request("POST", path, body, head)
    there.getresponse().read()
    there.close()
"""


def test_who_calls_on_after_the_end_is_refused_and_goes_with_its_container(dock: Dock) -> None:
    """Past the relay, which ends with the program, by the proxy's own socket."""
    script = f"{' '.join(portable_python().argv)} late.py; sleep 1; echo hi > hello.txt\n"
    # Collecting takes a moment, in which it calls.
    script += "i=0; while [ $i -lt 40 ]; do cat /bin/busybox > $i; i=$((i+1)); done\n"
    row = dock.run(dock.task("late", script, files={"late.py": _LATE}))["late"]
    assert row["outcomes"] == {"passed": 1}, row["shown"]
    (session,) = row["session_ids"]
    asked = f"SELECT kind, reason, count() AS n FROM completions WHERE session = '{session}' GROUP BY ALL"
    told = {(call["kind"], call["reason"]): call["n"] for call in dock.live.sql(asked)}
    assert told.pop(("rejected", "sealed")) > 0
    assert told.pop(("captured", "")) == row["completions"] > 1
    assert sum(told.values()) <= 2 and all(kind in ("aborted", "undelivered") for kind, _ in told)
    assert dock.live.polar("verify")
    dock.works()


def test_a_gigabyte_of_output_is_counted_and_capped(dock: Dock) -> None:
    script = "dd if=/dev/urandom bs=1M count=1000 2>/dev/null; echo hi > hello.txt; echo; echo the end\n"
    row = dock.run(dock.task("log", script))["log"]
    assert row["outcomes"] == {"passed": 1}, row["shown"]
    attempt = ended(row)
    assert attempt["log_tail"].endswith("\nthe end\n")
    assert 7 << 20 <= attempt["log"]["size"] <= 9 << 20
    dock.works()


def while_running(dock: Dock, task: dict[str, Any], harm: Callable[[], None]) -> dict[str, Any]:
    """Do harm to a task's container once its script has written `hello.txt` and sleeps."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(dock.run, task)
        deadline = time.monotonic() + 90
        while not _sleeping(dock) and not running.done() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert _sleeping(dock), running.done() and running.result()
        harm()
        return running.result()[task["id"]]


def _sleeping(dock: Dock) -> bool:
    return any("sleep 45" in line for c in dock.containers() for line in runtime_docker.processes(dock.host, c))


def test_a_container_killed_from_outside_is_judged_for_what_it_did(dock: Dock) -> None:
    """A container's death can be brought about from within, so it is no reason to forget the attempt."""

    def kill() -> None:
        for container in dock.containers():
            runtime_docker.kill_container(dock.host, container)

    row = while_running(dock, dock.task("killed", "echo hi > hello.txt; sleep 45\n"), kill)
    attempt = ended(row)
    assert attempt["fault"] in ("agent", "none"), attempt
    assert row["shown"]["phase"] == "completed"
    dock.works()


@pytest.mark.slow
def test_a_daemon_that_is_restarted_costs_an_attempt(dock: Dock) -> None:
    def restart() -> None:
        runtime_docker.stop_daemon(dock.directory)
        # Longer than all attempts would last if each failed at once.
        time.sleep(10)
        assert runtime_docker.start_daemon(dock.directory) == dock.host

    row = while_running(dock, dock.task("restart", "echo hi > hello.txt; sleep 45\n"), restart)
    first, second = row["shown"]["attempts"]
    assert (first["fault"], first["cause"]) == ("infra", "daemon"), first
    assert (second["fault"], second["exit_code"]) == ("none", 0)
    assert row["outcomes"] == {"passed": 1}
    # The call of the attempt that was lost is on record, and not trained.
    assert (row["shown"]["completions"], row["traces"]) == ({"captured": 2}, 1)
    dock.works()


def test_images_that_cannot_run_are_told_by_name(dock: Dock) -> None:
    foreign, few = runtime_docker.foreign_image(dock.host), {"attempts": 1}
    rows = dock.run(
        dock.task("unknown", "true", runtime={"image": "polar-test/nowhere:1"}, limits=few),
        dock.task("foreign", "true", runtime={"image": foreign}, limits=few),
        code=1,
    )
    assert rows["unknown"]["outcomes"] == {"infra_error": 1}
    assert rows["unknown"]["shown"]["cause"] == "image"
    assert "polar-test/nowhere:1" in rows["unknown"]["shown"]["detail"]
    assert rows["foreign"]["outcomes"] == {"harness_error": 1}
    assert "s390x" in rows["foreign"]["shown"]["detail"]
    dock.works()
