"""A real Slurm of the tests' own on this machine: munge, controller, node daemon, in one directory, on free ports."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from polar_common.nats_server import free_port

_CONF = """
ClusterName=polar
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/munge.sock
CredType=cred/munge
SlurmctldPort={ctld}
SlurmdPort={d}
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    directory: Path

    def call(self, *argv: str, env: Mapping[str, str] | None = None) -> str:
        """Standard output of a Slurm command that must succeed."""
        whole = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **(env or {})}
        whole["SLURM_CONF"] = str(self.directory / "slurm.conf")
        done = subprocess.run(argv, env=whole, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def submit(self, script: Path, *options: str, env: Mapping[str, str]) -> str:
        """Id of the new job, whose output is in `job.log`."""
        log = self.directory / "job.log"
        return self.call("sbatch", "--parsable", f"--output={log}", *options, str(script), env=env).strip()

    def state(self, job: str) -> tuple[str, str]:
        """State and exit code, such as `COMPLETED`, `0:0`."""
        told = self.call("scontrol", "show", "job", job)
        found = re.search(r"JobState=(\w+)", told), re.search(r"ExitCode=(\S+)", told)
        assert found[0] and found[1], told
        return found[0][1], found[1][1]

    def ended(self, job: str, timeout: float) -> tuple[str, str]:
        deadline = time.monotonic() + timeout
        while (now := self.state(job))[0] in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            assert time.monotonic() < deadline, f"{now}\n{self.logs()}"
            time.sleep(0.3)
        return now

    def logs(self) -> str:
        files = [f for f in self.directory.glob("*.log") if f.is_file()]
        return "".join(f"\n== {f.name}\n{f.read_text(errors='replace')[-1500:]}" for f in files)


@contextmanager
def own_slurm() -> Iterator[Slurm]:
    """One node, ready; its jobs are cancelled and its daemons stopped at the end. Needs root."""
    for program in ("munged", "slurmctld", "slurmd"):
        assert shutil.which(program), f"{program} isn't installed (Debian: apt-get install slurm-wlm munge)"
    directory = Path(tempfile.mkdtemp(prefix="polar-slurm-"))
    slurm = Slurm(directory)
    try:
        with ExitStack() as daemons:
            _start(daemons, directory)
            _until_idle(slurm)
            try:
                yield slurm
            finally:
                with suppress(AssertionError):
                    slurm.call("scancel", "--full", "--user=root")
                    time.sleep(1)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _start(daemons: ExitStack, directory: Path) -> None:
    for name in ("state", "spool"):
        (directory / name).mkdir()
    key = directory / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    conf = _CONF.format(host=host, dir=directory, ctld=free_port(), d=free_port(), cpus=os.cpu_count())
    (directory / "slurm.conf").write_text(conf)
    munge = [f"--{what}={directory}/munge.{ext}" for what, ext in _MUNGE.items()]
    _daemon(daemons, directory, "munged", ["munged", "--foreground", "--force", "--num-threads=2", *munge])
    deadline = time.monotonic() + 20
    while not (directory / "munge.sock").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    _daemon(daemons, directory, "slurmctld", ["slurmctld", "-D", "-i"])
    _daemon(daemons, directory, "slurmd", ["slurmd", "-D"])


_MUNGE = {"socket": "sock", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}


def _daemon(daemons: ExitStack, directory: Path, name: str, argv: list[str]) -> None:
    env = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}
    log = daemons.enter_context((directory / f"{name}.log").open("wb"))
    process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def stop() -> None:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    daemons.callback(stop)


def _until_idle(slurm: Slurm) -> None:
    deadline = time.monotonic() + 40
    told = ""
    while time.monotonic() < deadline:
        with suppress(AssertionError):
            told = slurm.call("sinfo", "--noheader", "--format=%T").strip()
            if told == "idle":
                return
        time.sleep(0.3)
    raise AssertionError(f"the node is {told!r}: {slurm.logs()}")
