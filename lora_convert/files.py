"""Files are written whole or not at all: under a temporary name, synced, then renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

# Read once, at import: the only way to read it is to set it, for all threads.
_UMASK = os.umask(0)
os.umask(_UMASK)


@contextmanager
def atomic_file(path: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Gives a temporary path in the same folder; what is written there becomes `path` when the block ends well.

    Raises:
        FileExistsError: `path` exists and `overwrite` was not asked for.
    """
    path = Path(path)
    if not overwrite and os.path.lexists(path):
        raise _exists(path)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        # A temporary file is private to its owner; the result gets the permissions that any new file would have.
        temporary.chmod(0o666 & ~_UMASK)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        if overwrite:
            os.replace(temporary, path)
        else:
            _put_in_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _exists(path: Path) -> FileExistsError:
    return FileExistsError(f"{path} exists already and is not overwritten unasked")


def _put_in_place(temporary: Path, path: Path) -> None:
    """Gives a file its name unless something has that name already, also since a moment ago.

    A hard link is made or refused in one step. File systems that have none (exFAT, some network drives) leave a moment
    between the look and the renaming; on Windows, where a renaming is refused likewise, they do not.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise _exists(path) from None
    except OSError:
        if os.path.lexists(path):
            raise _exists(path) from None
        os.rename(temporary, path)


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable, where the system lets a folder be opened (Windows does not)."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_state(
    path: str | Path, state: Mapping[str, Tensor], metadata: Mapping[str, str], overwrite: bool = False
) -> None:
    """Writes a safetensors file atomically. Tensors may be on any device.

    Raises:
        FileExistsError: the file exists and overwriting was not asked for.
        OSError: it cannot be written, such as on a full disk.
    """
    with atomic_file(path, overwrite) as temporary:
        try:
            save_file({key: tensor.detach().cpu() for key, tensor in state.items()}, temporary, dict(metadata))
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written ({error})") from error


def read_state(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header metadata of a safetensors file, on the CPU."""
    with safe_open(path, framework="pt") as file:
        # A safetensors file is no mapping: it has keys() and no iterator.
        return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
