"""Attempts as Apptainer containers, for clusters where nobody is root: one `apptainer exec` per command.

The image is read-only, with a temporary layer that ends with each command; the working directory, HOME and `/tmp` are
directories of the host, so what the image has in the working directory's place is hidden. No network but the proxy's
Unix socket. Options: `binary` (default `apptainer`), `flags` (more of its own, separated by spaces).
"""

from __future__ import annotations

import shutil

from polar_common.errors import ConfigError, RuntimeUnavailable
from polar_runtime.base import RuntimeSpec
from polar_runtime.hostdir import HOME, HostDirRuntime
from polar_runtime.portable import portable_python
from polar_runtime.status import SandboxStatus

__all__ = ["ApptainerRuntime"]

# Apptainer itself ends with 255 where it can't set a container up, and says FATAL.
_FAILED = 255


class ApptainerRuntime(HostDirRuntime):
    """See the module."""

    kind = "apptainer"

    def __init__(self, spec: RuntimeSpec) -> None:
        super().__init__(spec)
        self._binary = spec.options.get("binary", "apptainer")
        if not spec.image:
            raise ConfigError("the apptainer runtime needs an image: .sif file, directory or URI", "runtime.image")

    @property
    def isolation(self) -> str:
        return "apptainer"

    def _can_enclose(self) -> bool:
        if shutil.which(self._binary) is None:
            raise RuntimeUnavailable(f"{self._binary} isn't installed")
        portable_python()
        return True

    def _prepare_enclosure(self) -> None:
        return None

    def _relay_command(self) -> list[str]:
        python = portable_python()
        return [*python.argv, python.relay]

    def _enclose(self, inner: list[str], status_fd: int) -> list[str]:
        spec = self.spec
        line = [self._binary, "--quiet", "exec", "--containall", "--no-eval", "--no-privs", "--writable-tmpfs"]
        line += ["--pid", "--ipc", "--uts", "--hostname", "polar"]
        line += [] if spec.network == "host" else ["--net", "--network", "none"]
        line += spec.options.get("flags", "").split()
        writable = self._writable()
        line += ["--home", f"{writable.pop(HOME)}:{HOME}"]
        for path, source in writable.items():
            line += ["--bind", f"{source}:{path}"]
        for mount in (*portable_python().mounts, *self._read_only()):
            line += ["--bind", f"{mount.source}:{mount.target}:ro"]
        return [*line, "--pwd", "/", spec.image, *inner]

    def _outer_environment(self, env: dict[str, str]) -> dict[str, str]:
        """Nothing is inherited but what is named so; HOME is `--home`'s."""
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        inner = {f"APPTAINERENV_{name}": value for name, value in env.items() if name != "HOME"}
        return {"PATH": path, "HOME": str(self._places.base), **inner}

    def _was_not_set_up(self, status: SandboxStatus, code: int, tail: str) -> bool:
        return code == _FAILED and "FATAL" in tail
