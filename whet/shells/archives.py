"""Tar archives of a work folder: what of them may be carried to another runtime. They were made by the policy's
files, so any name, link and mode can occur."""

import io
import os
import tarfile


def carried(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """Return what is unpacked of a member into ``folder``; None for a link that is absolute or leads upwards. Raises
    ``tarfile.TarError`` for a path outside of the folder."""
    if member.issym() and (member.linkname.startswith("/") or ".." in member.linkname.split("/")):
        return None  # it may lead to what is written later, such as tests; a link downwards can't
    checked = tarfile.tar_filter(member, folder)  # raises for a path that leads out of the folder
    return checked and checked.replace(mode=(checked.mode or 0) | (0o700 if checked.isdir() else 0o600))


def plain(archive: bytes) -> bytes:
    """Return an archive with the files, folders and links of another, whatever made it: without pipes, devices and
    owners, and with the access of ``carried``. Raises ``tarfile.TarError``."""
    buffer = io.BytesIO()
    nowhere = os.path.abspath("/whet-no-such-folder")  # so that no link of this machine takes part
    with (
        tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as given,
        tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as made,
    ):
        for member in given:
            kept = carried(member, nowhere) if member.isreg() or member.isdir() or member.issym() else None
            if kept is not None and os.path.normpath(kept.name) != ".":
                kept = kept.replace(uid=0, gid=0, uname="", gname="")
                made.addfile(kept, given.extractfile(member) if member.isreg() else None)
    return buffer.getvalue()
