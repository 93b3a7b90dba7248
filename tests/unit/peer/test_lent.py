"""Memory that one process lends to another: mapped, replaced, kept, returned."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from sgl_ext.errors import ExtError
from sgl_ext.memory import lent
from sgl_ext.memory.lent import Extent, Lendable, LentMemoryError, map_memory, unique_name
from sgl_ext.memory.mapping import PAGE, Mapping, create

PAGES = 8


class Owner:
    """Owner of memory that can be lent except its first page; each byte is its page number."""

    def __init__(self, pages: int = PAGES) -> None:
        self.name = unique_name("sgl_ext-test")
        self.fd = create(self.name, pages * PAGE)
        self.mapping = Mapping(self.fd, pages * PAGE, writable=True)
        self.bytes = np.asarray(self.mapping)
        self.bytes.reshape(pages, PAGE)[:] = np.arange(pages)[:, None]
        self.lendable = Lendable(self.mapping, self.fd, self.name, 1, pages * PAGE)

    def pages(self) -> list[int]:
        return self.bytes[::PAGE].tolist()


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    os.close(owner.fd)


def room(pages: int = PAGES) -> Mapping:
    """Returns a mapping of one page of memory and of addresses for ``pages`` further pages."""
    fd = create("sgl_ext-test", PAGE)
    try:
        return Mapping(fd, PAGE, writable=True, reach=(1 + pages) * PAGE)
    finally:
        os.close(fd)


def borrow(owner: Owner) -> np.ndarray:
    """Maps all memory that the owner can lend and returns it as uint8 ``[size]``."""
    mapping = room()
    map_memory(mapping, PAGE, os.getpid(), owner.lendable.extents)
    return np.asarray(mapping)[PAGE : PAGE + owner.lendable.size]


def test_only_whole_pages_are_lendable(owner: Owner) -> None:
    assert owner.lendable.extents == (Extent(owner.name, owner.fd, PAGE, (PAGES - 1) * PAGE),)
    uneven = Lendable(owner.mapping, owner.fd, owner.name, PAGE, 4 * PAGE + 5)
    assert (uneven.size, uneven.end) == (3 * PAGE, 4 * PAGE)
    for start in (4 * PAGE, 5 * PAGE):
        assert Lendable(owner.mapping, owner.fd, owner.name, start, 4 * PAGE + 5).extents == ()


def test_owner_and_borrower_share_memory(owner: Owner) -> None:
    borrowed = borrow(owner)
    assert borrowed[::PAGE].tolist() == [1, 2, 3, 4, 5, 6, 7]
    borrowed[3 * PAGE] = 40
    assert owner.pages() == [0, 1, 2, 3, 40, 5, 6, 7]


def test_replaced_memory_stays_with_its_borrower(owner: Owner) -> None:
    borrowed = borrow(owner)
    owner.lendable.replace(2 * PAGE + 1)
    assert owner.pages() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert owner.lendable.size == 7 * PAGE
    assert owner.lendable.retired == 3 * PAGE
    borrowed[5 * PAGE] = 60  # in a page that has been replaced
    borrowed[0] = 10
    assert owner.pages() == [0, 10, 2, 3, 4, 0, 0, 0]
    owner.bytes[7 * PAGE] = 99
    assert borrowed[::PAGE].tolist() == [10, 2, 3, 4, 5, 60, 7]
    again = borrow(owner)  # the memory has two files now
    assert again[::PAGE].tolist() == [10, 2, 3, 4, 0, 0, 99]
    again[4 * PAGE] = 55
    assert owner.pages() == [0, 10, 2, 3, 4, 55, 0, 99]


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3), (2, 2), (7, 1), (1, 7), (9, 9)])
@pytest.mark.usefixtures("no_garbage")
def test_memory_can_be_replaced_repeatedly(owner: Owner, sizes: tuple[int, ...]) -> None:
    before = psutil.Process().num_fds()
    for pages in sizes:
        owner.bytes[PAGE:] = 5
        kept = min(pages, PAGES - 1)
        owner.lendable.replace(pages * PAGE)
        assert owner.pages() == [0, *[5] * (PAGES - 1 - kept), *[0] * kept]
        assert borrow(owner)[::PAGE].tolist() == owner.pages()[1:]
        assert owner.lendable.size == (PAGES - 1) * PAGE
    owner.lendable.discard()
    assert owner.lendable.retired == 0
    assert borrow(owner)[::PAGE].tolist() == owner.pages()[1:]
    files = {extent.fd for extent in owner.lendable.extents} - {owner.fd}
    assert psutil.Process().num_fds() == before + len(files)


def test_discard_frees_replaced_memory(owner: Owner) -> None:
    def taken() -> int:
        return os.fstat(owner.fd).st_blocks * 512

    assert taken() == PAGES * PAGE
    owner.lendable.replace(3 * PAGE)
    assert taken() == PAGES * PAGE
    owner.lendable.discard()
    assert taken() == (PAGES - 3) * PAGE
    assert owner.pages() == [0, 1, 2, 3, 4, 0, 0, 0]


def test_failed_replacement_changes_nothing(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_args: object) -> int:
        raise ExtError("there is none")

    monkeypatch.setattr(lent, "create", none)
    extents = owner.lendable.extents
    with pytest.raises(LentMemoryError, match="cannot be replaced: there is none"):
        owner.lendable.replace(PAGE)
    assert owner.lendable.extents == extents
    assert owner.pages() == list(range(PAGES))
    owner.lendable.replace(0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fd": 9999}, "cannot be opened"),
        ({"name": "another"}, "expected another"),
        ({"size": PAGES * PAGE}, r"lends bytes 4,096 to 36,864 of a file of 32,768"),
        ({"offset": -PAGE}, "lends bytes"),
        ({"offset": 1}, "whole pages"),
        ({"size": 0}, "whole pages"),
    ],
)
@pytest.mark.usefixtures("no_garbage")
def test_extents_that_do_not_match_the_memory_are_refused(
    owner: Owner, change: dict[str, object], reason: str
) -> None:
    wrong = msgspec.structs.replace(owner.lendable.extents[0], **change)
    before = psutil.Process().num_fds()
    with pytest.raises(LentMemoryError, match=reason):
        map_memory(room(), PAGE, os.getpid(), [wrong])
    assert psutil.Process().num_fds() == before


def test_descriptors_of_other_files_are_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    loose = os.memfd_create("sgl_ext-loose")
    os.ftruncate(loose, PAGE)
    opened = [os.open(tmp_path, os.O_RDONLY), os.open(fifo, os.O_RDWR), *os.pipe(), loose]
    try:
        for fd in opened:
            with pytest.raises(
                LentMemoryError, match=r"is .*, expected |cannot be opened|could shrink"
            ):
                map_memory(room(), PAGE, os.getpid(), [Extent("sgl_ext-loose", fd, 0, PAGE)])
    finally:
        for fd in opened:
            os.close(fd)


OTHER = """
import sys
sys.path.insert(0, {tests!r})
from test_lent import Owner
owner = Owner()
for line in sys.stdin:
    print(eval(line), flush=True)
"""


@pytest.fixture
def other() -> Iterator[Callable[[str], str]]:
    """Yields a function that evaluates an expression in another process with an ``owner``.

    The expression ``die`` kills the process instead.
    """
    with subprocess.Popen(
        [sys.executable, "-c", OTHER.format(tests=str(Path(__file__).parent))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(expression: str) -> str:
            if expression == "die":
                process.kill()
                process.wait(30)
                return ""
            process.stdin.write(expression + "\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        ask.process = process  # type: ignore[attr-defined]
        yield ask
        process.kill()


def test_mapped_memory_outlives_its_owner(other: Callable[[str], str]) -> None:
    pid = int(other("__import__('os').getpid()"))
    extents = msgspec.json.decode(
        other("__import__('msgspec').json.encode(owner.lendable.extents).decode()"),
        type=tuple[Extent, ...],
    )
    mapping = room()
    map_memory(mapping, PAGE, pid, extents)
    borrowed = np.asarray(mapping)[PAGE : PAGES * PAGE]
    borrowed[0] = 77
    assert other("owner.pages()") == "[0, 77, 2, 3, 4, 5, 6, 7]"
    other("die")
    assert borrowed[::PAGE].tolist() == [77, 2, 3, 4, 5, 6, 7]
    with pytest.raises(LentMemoryError, match="check whether the process has ended"):
        map_memory(room(), PAGE, pid, extents)


def test_dropped_addresses_stay_reserved_and_unmapped() -> None:
    mapping = room()
    for offset, size in ((0, 0), (1, PAGE), (PAGES * PAGE, 2 * PAGE), (-PAGE, PAGE)):
        with pytest.raises(ValueError, match="whole pages"):
            mapping.drop(offset, size)
    bytes_ = np.asarray(mapping)
    assert bytes_.shape == ((1 + PAGES) * PAGE,)
    fd = create("sgl_ext-test", 2 * PAGE)
    mapping.put(3 * PAGE, fd, PAGE, PAGE)
    os.close(fd)
    bytes_[3 * PAGE] = 1
    mapping.drop(3 * PAGE, PAGE)
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        os._exit(int(bytes_[3 * PAGE]))
    assert os.waitpid(child, 0)[1] == signal.SIGSEGV  # no other memory is mapped there
