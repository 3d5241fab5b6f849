"""A running command of the local runtime, and how all of it is reached."""

from __future__ import annotations

import asyncio

from polar_runtime import procs

__all__ = ["ProcessHandle"]


class ProcessHandle:
    """One running `exec`. `relay` is the program that the relay runs as: what is above it in the process tree is the
    sandbox's own, and isn't signalled while the command may still end by itself."""

    def __init__(self, pid: int, relay: str, enclosed: bool) -> None:
        self.id = procs.ProcessId.of(pid) or procs.ProcessId(pid, 0)
        self._relay = relay.encode() + b"\0"
        self._enclosed = enclosed
        self._relay_pid = 0

    def members(self, most: int = 1 << 22) -> list[int]:
        """The command's processes, the relay among them; cut short once there are more than `most`."""
        if not self.id.alive():
            return []
        if not self._enclosed:
            return procs.tree(self.id.pid, most)
        found = procs.tree(self.id.pid, most + 8)
        for depth, pid in enumerate(found[:8]):
            if pid == self._relay_pid or procs.command_line(pid).startswith(self._relay):
                self._relay_pid = pid
                return found[depth:]
        return []

    async def terminate(self) -> None:
        """SIGTERM to all."""
        procs.send(self.members(), 15)

    async def kill(self) -> None:
        """SIGKILL to all, bubblewrap included, forking or not."""
        await asyncio.to_thread(procs.kill_namespace if self._enclosed else procs.kill_tree, self.id)

    async def end(self, grace: float) -> None:
        """SIGTERM, then SIGKILL after `grace` seconds."""
        await self.terminate()
        for _ in range(int(grace / 0.05)):
            if not self.id.alive():
                return
            await asyncio.sleep(0.05)
        await self.kill()
