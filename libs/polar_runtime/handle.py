"""A running command of the local runtime, and how all of it is reached."""

from __future__ import annotations

import asyncio

from polar_runtime import procs

__all__ = ["ProcessHandle"]


class ProcessHandle:
    """One running `exec`. `skip`: how many processes at the top of the tree are bubblewrap's own."""

    def __init__(self, pid: int, skip: int) -> None:
        self.id = procs.ProcessId.of(pid) or procs.ProcessId(pid, 0)
        self._skip = skip

    def members(self, most: int = 1 << 22) -> list[int]:
        """The command's processes, the relay among them; cut short once there are more than `most`."""
        return procs.tree(self.id.pid, most + self._skip)[self._skip :] if self.id.alive() else []

    async def terminate(self) -> None:
        """SIGTERM to all."""
        procs.send(self.members(), 15)

    async def kill(self) -> None:
        """SIGKILL to all, bubblewrap included, forking or not."""
        await asyncio.to_thread(procs.kill_namespace if self._skip else procs.kill_tree, self.id)

    async def end(self, grace: float) -> None:
        """SIGTERM, then SIGKILL after `grace` seconds."""
        await self.terminate()
        for _ in range(int(grace / 0.05)):
            if not self.id.alive():
                return
            await asyncio.sleep(0.05)
        await self.kill()
