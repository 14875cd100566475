"""Disks that fail: one that loses power, one whose n-th operation fails, and one that does not wait for the real disk."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from inrun.files import Files


class QuickFiles(Files):
    """Real files without waiting for the disk: for tests in which no power is cut."""

    def sync(self, path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(path)

    def sync_folder(self, path: Path) -> None:
        assert path.is_dir()


class FailingFiles(QuickFiles):
    """The n-th operation (from 1) fails, and all later ones too if ``for_good``; before it fails, it may do half its work."""

    OPERATIONS = ("create", "append", "truncate", "sync", "sync_folder", "rename", "remove", "make_folder")

    def __init__(self, n: int, errno: int, only: str | None = None, for_good: bool = False) -> None:
        self.n, self.errno, self.only, self.for_good = n, errno, only, for_good
        self.count = 0
        self.failed: list[str] = []

    def __getattribute__(self, name: str):
        found = super().__getattribute__(name)
        if name not in FailingFiles.OPERATIONS or (self.only is not None and name != self.only):
            return found

        def tried(path, *rest):
            self.count += 1
            if self.count == self.n or (self.for_good and self.count > self.n):
                self.failed.append(name)
                if name in ("create", "append") and self.count % 2:  # a short write, as a full disk leaves it
                    found(path, rest[0][: len(rest[0]) // 2])
                raise OSError(self.errno, "injected", str(path))
            return found(path, *rest)

        return tried


@dataclass
class Node:
    """A file or folder: what the process sees, and what would be there after a power cut."""

    now: bytes | None  # None: a folder
    durable: bytes | None = b""

    @property
    def is_folder(self) -> bool:
        return self.now is None


@dataclass(frozen=True)
class Moment:
    """The disk between two operations; contents and names that are not synced may be lost, each for itself."""

    operation: str
    #: Per folder (number): names that are durable, and the changes since, in order.
    folders: dict[int, tuple[dict[str, int], tuple[tuple, ...]]]
    #: Per file (number): durable content, content as the process sees it.
    files: dict[int, tuple[bytes, bytes]]

    def worst(self, target: Path, mode: str, rng: random.Random) -> None:
        """Write one possible state of the disk into a folder.

        ``lost``: nothing unsynced survives; ``kept``: all of it; ``names``: names survive and contents do not; ``random``: any
        subset of the names and, file by file, the unsynced content dropped, torn, garbled, zeroed or kept.
        """
        target.mkdir(parents=True)
        self._write(0, target, mode, rng)

    def _write(self, folder: int, target: Path, mode: str, rng: random.Random) -> None:
        durable, changes = self.folders[folder]
        names = dict(durable)
        for kind, *rest in changes:
            if mode == "lost" or (mode == "random" and rng.random() < 0.5):
                continue
            if kind == "link":
                names[rest[0]] = rest[1]
            elif kind == "unlink":
                names.pop(rest[0], None)
            else:
                old, new, node = rest
                if names.get(old) == node:
                    del names[old]
                names[new] = node
        for name, node in names.items():
            if node in self.folders:
                (target / name).mkdir()
                self._write(node, target / name, mode, rng)
            else:
                (target / name).write_bytes(self._content(*self.files[node], mode, rng))

    @staticmethod
    def _content(durable: bytes, now: bytes, mode: str, rng: random.Random) -> bytes:
        if durable == now or mode == "lost":
            return durable
        if mode == "kept":
            return now
        same = next((i for i, (a, b) in enumerate(zip(durable, now, strict=False)) if a != b), min(len(durable), len(now)))
        how = rng.choice(["dropped", "torn", "garbled", "zeroed", "kept", "part garbled"])
        if how == "dropped":
            return durable
        if how == "kept":
            return now
        if len(now) <= same:  # a cut that was not synced
            return durable[: rng.randint(len(now), len(durable))]
        cut = rng.randint(same, len(now))
        if how == "torn":
            return now[:cut]
        if how == "zeroed":
            return now[:cut] + bytes(len(now) - cut)
        if how == "garbled":
            return now[:same] + rng.randbytes(len(now) - same)
        return now[:cut] + bytes(rng.choice(b'\n{}"\r\0,:0a') for _ in range(len(now) - cut))


class PowerCutFiles(QuickFiles):
    """Real files in a folder, with a record of what would be on disk if power went off after each operation."""

    def __init__(self, root: Path) -> None:
        """Take the folder as it is as durable."""
        self.root = root
        self.nodes: dict[int, Node] = {}
        self.entries: dict[int, dict[str, int]] = {}
        self.settled: dict[int, dict[str, int]] = {}
        self.changes: dict[int, list[tuple]] = {}
        #: Called with the moment after each operation.
        self.watch = lambda moment: None
        self._adopt(root)

    def _adopt(self, path: Path) -> int:
        number = len(self.nodes)
        if path.is_dir():
            self.nodes[number] = Node(None)
            self.entries[number], self.changes[number] = {}, []
            for child in sorted(path.iterdir()):
                if not child.name.startswith("lock-"):
                    self.entries[number][child.name] = self._adopt(child)
            self.settled[number] = dict(self.entries[number])
        else:
            data = path.read_bytes()
            self.nodes[number] = Node(data, data)
        return number

    def _find(self, path: Path) -> int:
        number = 0
        for name in path.relative_to(self.root).parts:
            number = self.entries[number][name]
        return number

    def _link(self, path: Path, node: Node) -> None:
        folder, number = self._find(path.parent), len(self.nodes)
        self.nodes[number] = node
        if node.is_folder:
            self.entries[number], self.settled[number], self.changes[number] = {}, {}, []
        self.entries[folder][path.name] = number
        self.changes[folder].append(("link", path.name, number))

    def moment(self, operation: str = "start") -> Moment:
        """Return the disk as it is."""
        folders = {n: (dict(self.settled[n]), tuple(self.changes[n])) for n in self.entries}
        files = {n: (node.durable, node.now) for n, node in self.nodes.items() if not node.is_folder}
        return Moment(operation, folders, files)

    def _done(self, operation: str, path: Path) -> None:
        self.watch(self.moment(f"{operation} {path.relative_to(self.root)}"))

    def create(self, path: Path, data: bytes) -> None:
        super().create(path, data)
        self._link(path, Node(data))
        self._done("create", path)

    def append(self, path: Path, data: bytes) -> None:
        if not path.exists():
            self._link(path, Node(b""))
        super().append(path, data)
        node = self.nodes[self._find(path)]
        node.now += data
        self._done("append", path)

    def truncate(self, path: Path, size: int) -> None:
        super().truncate(path, size)
        node = self.nodes[self._find(path)]
        node.now = node.now[:size]
        self._done("truncate", path)

    def sync(self, path: Path) -> None:
        super().sync(path)
        node = self.nodes[self._find(path)]
        node.durable = node.now
        self._done("sync", path)

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        if path != self.root and self.root not in path.parents:
            return
        number = self._find(path)
        self.settled[number], self.changes[number] = dict(self.entries[number]), []
        self._done("sync_folder", path)

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        folder = self._find(old.parent)
        assert old.parent == new.parent, "a rename between folders is not one operation here"
        node = self.entries[folder].pop(old.name)
        self.entries[folder][new.name] = node
        self.changes[folder].append(("rename", old.name, new.name, node))
        self._done("rename", new)

    def remove(self, path: Path) -> None:
        if path.exists():
            super().remove(path)
            folder = self._find(path.parent)
            del self.entries[folder][path.name]
            self.changes[folder].append(("unlink", path.name))
        self._done("remove", path)

    def make_folder(self, path: Path) -> None:
        missing = [p for p in (path, *path.parents) if not p.exists()]
        super().make_folder(path)
        for folder in reversed(missing):
            self._link(folder, Node(None))
        self._done("make_folder", path)


class NoSync(PowerCutFiles):
    """A writer that never waits for the disk: the control."""

    def sync(self, path: Path) -> None:
        self._done("no sync", path)

    def sync_folder(self, path: Path) -> None:
        self._done("no sync", path) if self.root in (path, *path.parents) else None
