"""Opens the SQLite file and the small files beside it, and translates SQLite's errors.

This module never opens the database, its `-wal` or its `-shm` itself: closing any descriptor of a file drops
every POSIX lock that this process holds on it, SQLite's included."""

from __future__ import annotations

import errno
import math
import os
import re
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit
from weakref import WeakSet

import apsw
import msgspec

from towpath.errors import (
    Damaged,
    DiskFull,
    InvalidInput,
    LedgerBusy,
    LedgerClosed,
    LedgerError,
    NetworkFileSystem,
    NotALedger,
    OrphanedLog,
    ReadOnly,
    StoreFailed,
)
from towpath.escapes import without_password

# Other FUSE mounts (ntfs-3g, encfs, a container's overlay) are local disks.
_NETWORK: Final = re.compile(
    "9p|acfs|afpfs|afs|beegfs|ceph|cifs|coda|davfs|gfs2?|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs|"
    "panfs|prl_fs|pvfs2|smb[23]|smbfs|vboxsf|webdav|fuse[.](afp|blobfuse2?|ceph|ceph-fuse|cephfs|curlftpfs|"
    "davfs2?|gcsfuse|glusterfs|goofys|gvfsd-fuse|juicefs|lizardfs|mfs|moosefs|mount-s3|mountpoint-s3|rclone|"
    "s3backer|s3fs|seaweedfs|smbnetfs|sshfs|vmhgfs-fuse)"
)
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, an exceeded quota, an exceeded file size limit."""
_MAX_INT: Final = 2**31 - 1
_RETRY: Final = 0.002
LOG_BYTES: Final = 24 * 1024 * 1024
"""A longer `-wal` file is restarted inside the turn; SQLite then truncates the file to this length."""
_STATEMENTS: Final = 512
"""Entries of apsw's cache of prepared statements, its maximum. The cache is a ring: a statement that was not
used for this many executions is dropped. Preparing the insert of 32 jobs costs more than running it."""


class SqliteOptions(msgspec.Struct, frozen=True):
    """`busy_timeout`: seconds to wait for other processes. `vfs` and `fault` are for fault injection: `fault`
    is called with the name of each fault point. `max_pages` bounds the file's size. `mode`: the permissions
    of a new file, by default 0600 minus the umask. The files beside it get the same permissions. An existing
    file keeps its permissions."""

    synchronous: str = "full"
    busy_timeout: float = 10.0
    cache_mb: int = 16
    vfs: str | None = None
    fault: Callable[[str], None] | None = None
    max_pages: int | None = None
    mode: int | None = None

    def __post_init__(self) -> None:
        if self.synchronous not in ("full", "normal"):
            raise InvalidInput(field="synchronous", value=self.synchronous, expected="full or normal")
        if not (_is_number(self.busy_timeout) and 0 < self.busy_timeout < math.inf):
            raise InvalidInput(
                field="busy_timeout", value=self.busy_timeout, expected="seconds, more than 0 and finite"
            )
        if not (_is_whole(self.cache_mb) and 1 <= self.cache_mb <= 2**20):
            raise InvalidInput(
                field="cache_mb", value=self.cache_mb, expected="a whole number from 1 to 1048576"
            )
        if self.max_pages is not None and not (_is_whole(self.max_pages) and 1 <= self.max_pages < 2**32 - 1):
            raise InvalidInput(
                field="max_pages",
                value=self.max_pages,
                expected="None or a whole number from 1 to 4294967294",
            )
        if self.mode is not None and not (_is_whole(self.mode) and self.mode & ~0o066 == 0o600):
            raise InvalidInput(
                field="mode",
                value=self.mode,
                expected="None, or 0o600 with rights of group and others: 0o660",
            )


def options_of(url: str) -> tuple[str, SqliteOptions]:
    """The path and the options of `sqlite:///file.db?synchronous=normal&mode=0660`."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if not url.startswith("sqlite:///") or len(parts.path) < 2 or not set(options) <= {"synchronous", "mode"}:
        expected = (
            "sqlite:///file.db or sqlite:////absolute/file.db, "
            "with no options but ?synchronous=normal and mode=0660"
        )
        if not url.startswith("sqlite:///"):
            expected = (
                f"written with three slashes: sqlite:///{re.sub('^sqlite:/*', '', without_password(url))}"
            )
        raise InvalidInput(field="url", value=without_password(url), expected=expected)
    mode = options.get("mode")
    if mode is not None and not re.fullmatch("0?[0-7]{3}", mode):
        raise InvalidInput(field="mode in the url", value=mode, expected="three octal digits, such as 0660")
    path, synchronous = unquote(parts.path[1:]), options.get("synchronous", "full")
    return path, SqliteOptions(synchronous=synchronous, mode=None if mode is None else int(mode, 8))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_whole(value)


def connect(path: Path, options: SqliteOptions) -> apsw.Connection:
    """A connection that writes. Creates a missing file and switches it to WAL mode. The file may have other
    tables."""
    real = _usable(path)
    _refuse_orphaned_log(real)
    if options.vfs is None and sys.platform != "win32":
        _make(real, options.mode)
    try:
        connection = _open(real, options, apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)
        try:
            if connection.readonly("main"):
                raise ReadOnly(path=str(real))
            _check_encoding(connection, real)
            _tune(connection, options)
            _to_wal(connection, real, options)
            # Reads the schema, so that a damaged file is detected now and not in the first batch.
            connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
        except BaseException:
            connection.close()
            raise
    except apsw.Error as error:
        raise translate(error, real, options) from error
    return connection


def _refuse_orphaned_log(real: Path) -> None:
    """SQLite would delete the log of an empty database. The log is checked first: a process that creates the
    database at this moment writes the database before its log."""
    if _size(f"{real}-wal") and not _size(str(real)):
        raise OrphanedLog(path=str(real))


def _make(real: Path, mode: int | None) -> None:
    """Create an empty file with the right permissions if there is none. SQLite would make it readable for all
    users."""
    if os.path.lexists(real):
        return
    try:
        fd, name = tempfile.mkstemp(prefix=".towpath-", dir=real.parent)
        try:
            try:
                if mode is not None:
                    os.fchmod(fd, mode)
            finally:
                # Before the file has its name: later another thread may have opened the ledger, and closing
                # the descriptor would drop its locks.
                os.close(fd)
            os.link(name, real)
        finally:
            os.unlink(name)
    except FileExistsError:
        return
    except OSError as error:
        if error.filename2 is None:
            raise translate_os(error, real) from error
        # The file system has no hard links: SQLite creates the file, with its own default permissions.


def _size(name: str) -> int:
    try:
        return os.stat(name).st_size
    except FileNotFoundError:
        return 0


def _check_encoding(connection: apsw.Connection, path: Path) -> None:
    """The ledger joins blobs as text, which keeps their bytes only where text is UTF-8."""
    (encoding,) = next(connection.execute("PRAGMA encoding"))
    if encoding != "UTF-8":
        raise NotALedger(path=str(path), why=f"its text encoding is {encoding}, and a ledger needs UTF-8")


def connect_reader(path: Path, options: SqliteOptions) -> apsw.Connection:
    """A connection that reads an existing ledger. It writes only the shared memory, as every reader of a WAL
    must."""
    real = _usable(path)
    if not real.exists():
        raise NotALedger(path=str(real), why="it does not exist")
    try:
        connection = _open(real, options, apsw.SQLITE_OPEN_READWRITE)
        try:
            _tune(connection, options)
            connection.execute("PRAGMA query_only=1")
            connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
        except BaseException:
            connection.close()
            raise
    except apsw.Error as error:
        raise translate(error, real, options) from error
    return connection


def _usable(path: Path) -> Path:
    """The path with symbolic links resolved, so that every process puts its side files into the same
    directory."""
    text = str(path)
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise InvalidInput(field="path", value=text, expected="a path that UTF-8 can spell, without NUL")
    real = Path(os.path.realpath(path))
    if kind := network_kind(real):
        raise NetworkFileSystem(path=str(real), kind=kind)
    if real.is_dir():
        raise NotALedger(path=str(real), why="it is a directory")
    if not real.parent.is_dir():
        raise NotALedger(path=str(real), why="its directory does not exist")
    return real


def _open(real: Path, options: SqliteOptions, flags: int) -> apsw.Connection:
    connection = apsw.Connection(str(real), flags=flags, vfs=options.vfs, statementcachesize=_STATEMENTS)
    set_busy_timeout(connection, options)
    return connection


def set_busy_timeout(connection: apsw.Connection, options: SqliteOptions) -> None:
    """Set how long the connection's statements wait for other connections."""
    connection.set_busy_timeout(min(math.ceil(options.busy_timeout * 1000), _MAX_INT))


def _tune(connection: apsw.Connection, options: SqliteOptions) -> None:
    pragmas = {
        "synchronous": options.synchronous,
        "fullfsync": "1",  # macOS only: without it fsync stops at the drive's cache
        "wal_autocheckpoint": "0",
        "journal_size_limit": str(LOG_BYTES),
        "cache_size": str(-1024 * options.cache_mb),
        "foreign_keys": "1",
        "temp_store": "memory",
    }
    if options.max_pages is not None:
        pragmas["max_page_count"] = str(options.max_pages)
    for name, value in pragmas.items():
        connection.execute(f"PRAGMA {name}={value}").fetchall()
    # Without it a statement with a WHERE that may fit a partial index is prepared again for every binding: a
    # claim took 76 µs instead of 8.
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)


def _to_wal(connection: apsw.Connection, real: Path, options: SqliteOptions) -> None:
    deadline = time.monotonic() + options.busy_timeout
    while True:
        try:
            mode = connection.execute("PRAGMA journal_mode=WAL").get
        except apsw.BusyError:
            # Where two processes switch a new file at once, SQLite does not call the busy handler: one
            # process gets BUSY without a wait.
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY)
            continue
        if mode != "wal":
            raise NotALedger(
                path=str(real), why=f"it cannot have a write-ahead log (its journal mode stays {mode!r})"
            )
        return


def translate(
    error: apsw.Error, path: Path, options: SqliteOptions, db: apsw.Connection | None = None
) -> LedgerError:
    """The ledger's error for an error of SQLite. `db` is the connection that raised it, if known."""
    where, text = str(path), str(error)
    match error:
        case apsw.BusyError() | apsw.LockedError() | apsw.ProtocolError():
            return LedgerBusy(path=where, seconds=options.busy_timeout)
        case apsw.FullError():
            return DiskFull(path=where)
        case apsw.IOError() if getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_SHMSIZE:
            return DiskFull(path=where)  # the shared memory file could not grow
        case apsw.IOError() if db is not None and db.system_errno in _FULL:
            # SQLite maps only ENOSPC to FullError; the others are I/O errors, which otherwise mean damage.
            return DiskFull(path=where)
        case apsw.CantOpenError() if not path.parent.is_dir():
            return NotALedger(path=where, why="its directory does not exist")
        case apsw.CantOpenError() if _may_write(path):
            # Permissions are not the cause: too many open files, for example.
            return StoreFailed(path=where, error=text)
        case apsw.ReadOnlyError() | apsw.CantOpenError() | apsw.PermissionsError():
            return ReadOnly(path=where)
        case apsw.NotADBError():
            return NotALedger(path=where, why="it is not an SQLite database")
        case apsw.CorruptError() | apsw.IOError():
            return Damaged(path=where, why=text)
        case apsw.ConnectionClosedError():
            return LedgerClosed(path=where)
        case _:
            return StoreFailed(path=where, error=text)


def translate_os(error: OSError, path: Path) -> LedgerError:
    """The ledger's error for an error of a file beside the database."""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ReadOnly(path=str(path))
    if error.errno in _FULL:
        return DiskFull(path=str(path))
    return StoreFailed(path=str(path), error=str(error))


def _may_write(path: Path) -> bool:
    effective = os.access in os.supports_effective_ids
    files = [path, *(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))]
    return os.access(path.parent, os.W_OK | os.X_OK, effective_ids=effective) and all(
        os.access(file, os.R_OK | os.W_OK, effective_ids=effective) for file in files if file.exists()
    )


def open_beside(path: Path, suffix: str, flags: int) -> int:
    """A descriptor of the file `<database><suffix>`. A missing file is created with the mode and owner of the
    database, as SQLite creates its `-wal`, so that exactly the users of the database can use it. Raises
    OSError if the name is a symbolic link or not a regular file: in a directory that other users can write,
    it may be an attack."""
    database = os.path.realpath(path)
    name = database + suffix
    # O_NONBLOCK: opening a FIFO would wait for its other end.
    flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        # Without O_CREAT first: in a sticky directory Linux refuses O_CREAT on a file of another user
        # (fs.protected_regular).
        return _open_regular(name, flags)
    except FileNotFoundError:
        pass
    try:
        fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _open_regular(name, flags)
    try:
        _copy_mode(fd, database)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_regular(name: str, flags: int) -> int:
    try:
        fd = os.open(name, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.EINVAL, "a symbolic link is not followed here", name) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", name)
    return fd


def _copy_mode(fd: int, database: str) -> None:
    if sys.platform == "win32" or not os.path.exists(database):
        return
    like = os.stat(database)
    os.fchmod(fd, like.st_mode & 0o666)
    if os.geteuid() == 0:
        os.fchown(fd, like.st_uid, like.st_gid)


def network_kind(path: Path, mounts: str | None = None) -> str | None:
    """The type of the network file system `path` is on, or None. `mounts` is the text of
    /proc/self/mountinfo."""
    real = os.path.realpath(path)  # first: resolving a path may mount a file system
    if mounts is None:
        try:
            mounts = os.fsdecode(Path("/proc/self/mountinfo").read_bytes())
        except OSError:
            return None
    best, kind = "", ""
    for line in mounts.split("\n"):
        head, separator, tail = line.partition(" - ")
        fields = head.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = _unescape(fields[4])
        # Of two mounts on one point the later hides the earlier.
        if len(point) >= len(best) and (real == point or real.startswith(point.rstrip("/") + "/")):
            best, kind = point, tail.split(" ")[0]
    return kind if _NETWORK.fullmatch(kind) else None


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


FORK_TIMEOUT: Final = 2.0
"""Seconds that a fork waits for threads that are inside SQLite."""


class Forkable(Protocol):
    def _inside_locks(self) -> Iterable[threading.Lock]:
        """The locks that other threads hold while they are inside SQLite. Each is acquired before the next
        one is read from the iterator."""
        ...

    def _left_to_parent(self) -> None:
        """Called in the child, which must never use the connections again."""
        ...


open_here: WeakSet[Forkable] = WeakSet()
_held = threading.local()


def _before_fork() -> None:
    """Wait until no thread is inside SQLite. If another thread holds a mutex of the library during the fork
    (each allocation takes one), the mutex stays locked in the child, and the child cannot open a ledger."""
    deadline = time.monotonic() + FORK_TIMEOUT
    _held.locks = []
    for ledger in list(open_here):
        for lock in ledger._inside_locks():
            if lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                _held.locks.append(lock)


def _release_locks() -> None:
    while _held.locks:
        _held.locks.pop().release()


def _in_child() -> None:
    for ledger in list(open_here):
        ledger._left_to_parent()
    _release_locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_release_locks, after_in_child=_in_child)
