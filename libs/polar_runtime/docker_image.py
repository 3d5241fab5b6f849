"""What an image brings along: for which machine it is, whom it runs as, what lies where an attempt's directories go."""

from __future__ import annotations

import contextlib
import platform
import tarfile
from collections.abc import Sequence
from typing import IO, Any

from docker.errors import ImageNotFound, NotFound

from polar_common.errors import ConfigError, RuntimeFault, RuntimeUnavailable
from polar_runtime.base import RuntimeSpec
from polar_runtime.docker_api import Daemon

__all__ = ["check_places", "copy_out", "given_to", "user_of"]

# The daemon tells modes as Go does.
_DIRECTORY = 1 << 31
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


async def user_of(daemon: Daemon, spec: RuntimeSpec) -> str:
    """The image's user; pulls it if need be. `RuntimeUnavailable` where there is no such image, `ConfigError` for one
    that can't run here."""
    image, pull = spec.image, spec.options.get("pull") != "never"

    def work(client: Any) -> tuple[str, str]:
        try:
            found = client.images.get(image)
        except ImageNotFound:
            if not pull:
                raise
            found = client.images.pull(image)
            found = found[0] if isinstance(found, list) else found
        config = found.attrs.get("Config") or {}
        return str(found.attrs.get("Architecture", "")), str(config.get("User", ""))

    try:
        architecture, user = await daemon.call(work)
    except NotFound as error:
        raise RuntimeUnavailable(f"no image {image!r}: {error.explanation}", "image") from error
    except RuntimeUnavailable as error:
        if await _answers(daemon):
            # A registry that can't be reached is a server error of the daemon's.
            raise RuntimeUnavailable(f"no image {image!r}: {error}", "image") from error
        raise
    except RuntimeFault as error:
        raise RuntimeUnavailable(f"no image {image!r}: {error}", "image") from error
    own = _ARCHITECTURES.get(platform.machine(), architecture)
    if architecture and architecture != own:
        raise ConfigError(f"{image!r} is for {architecture}, this host is {own}", "runtime.image")
    return user


async def _answers(daemon: Daemon) -> bool:
    try:
        return bool(await daemon.call(lambda client: client.ping()))
    except RuntimeFault:
        return False


async def check_places(daemon: Daemon, spec: RuntimeSpec, container: str, places: Sequence[str]) -> None:
    """`ConfigError` where one of the places is there and isn't a directory: files are never carried through links."""

    def work(client: Any) -> None:
        for place in places:
            try:
                told = client.api.get_archive(container, place)[1]
            except NotFound:
                continue
            if not told["mode"] & _DIRECTORY:
                raise ConfigError(f"{place} isn't a directory in {spec.image!r}", "runtime.image")

    await daemon.call(work)


async def copy_out(daemon: Daemon, spec: RuntimeSpec, container: str, into: IO[bytes]) -> bool:
    """The image's own working directory as a tar of that directory; whether it has one. `ConfigError` for what can't
    fit into the attempt's disk."""
    limit = spec.limits.disk_mb << 20

    def work(client: Any) -> bool:
        try:
            pieces = client.api.get_archive(container, spec.workdir)[0]
        except NotFound:
            return False
        # Closed, for the daemon holds a container whose archive is half read.
        with contextlib.closing(pieces):
            for piece in pieces:
                into.write(piece)
                if into.tell() > limit:
                    image = f"{spec.workdir} of {spec.image!r}"
                    raise ConfigError(f"{image} doesn't fit into the disk limit", "runtime.disk_mb")
        into.seek(0)
        return True

    return await daemon.call(work)


def given_to(uid: int, archive: IO[bytes], into: IO[bytes]) -> None:
    """The same archive, all of it the user's."""
    with tarfile.open(fileobj=archive, mode="r:") as old, tarfile.open(fileobj=into, mode="w") as new:
        for member in old:
            member.uid = member.gid = uid
            member.uname = member.gname = ""
            new.addfile(member, old.extractfile(member) if member.isreg() else None)
    into.seek(0)
