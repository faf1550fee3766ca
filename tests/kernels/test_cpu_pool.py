"""The threads that the CPU kernels share: every item is done once, whoever comes, and when."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter
from pathlib import Path

import pytest
from loraplex_kernels.cpu.build import load_library


class Share(ctypes.Structure):
    """pool_share in pool.h; its fields are nobody's business here."""

    _fields_ = (
        ("item", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("generation", ctypes.c_uint32),
        ("is_alone", ctypes.c_int32),
    )


BODY = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.POINTER(Share), ctypes.c_int64, ctypes.c_int32
)


class Pool:
    """pool.c, called with Python for a body."""

    def __init__(self, cache_dir: Path) -> None:
        library = load_library("pool", cache_dir)
        self._run = library.pool_run
        self._run.argtypes = (BODY, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)
        self._run.restype = None
        self._next = library.pool_next
        self._next.argtypes = (ctypes.POINTER(Share),)
        self._next.restype = ctypes.c_int64

    def run(
        self, num_items: int, num_threads: int, work: object = None
    ) -> tuple[list[int], set[int]]:
        """The items that were done, sorted, and the threads that did them."""
        done: list[int] = []
        threads: set[int] = set()

        def body(_context: int, share: ctypes._Pointer[Share], item: int, thread: int) -> None:
            while item >= 0:
                if callable(work):
                    work(item, thread)
                done.append(item)
                threads.add(thread)
                item = self._next(share)

        self._run(BODY(body), None, num_items, num_threads)
        return sorted(done), threads


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return Pool(tmp_path_factory.mktemp("pool"))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 300])
def test_every_item_is_done_once(pool: Pool, num_threads: int) -> None:
    for num_items in (0, 1, 2, 3, 17, 200):
        done, threads = pool.run(num_items, num_threads)

        assert done == list(range(num_items))
        assert threads <= set(range(num_threads))


def test_others_help_and_the_caller_waits_for_them(pool: Pool) -> None:
    both = threading.Barrier(2)

    done, threads = pool.run(2, 2, lambda _item, _thread: both.wait(timeout=60))

    assert done == [0, 1]
    assert threads == {0, 1}


def test_a_thread_that_does_not_come_is_not_waited_for(pool: Pool) -> None:
    is_over = threading.Event()
    taken: Counter[int] = Counter()
    stuck = threading.Event()

    def work(item: int, thread: int) -> None:
        taken[thread] += 1
        if thread == 1 and not stuck.is_set():
            stuck.set()
            is_over.wait(60)  # the other one: all items but this one are the caller's
        elif thread == 0:
            stuck.wait(60)
            if item == 99 or sum(taken.values()) == 100:
                is_over.set()

    done, threads = pool.run(100, 2, work)

    assert done == list(range(100))
    assert threads == {0, 1}
    assert taken == {0: 99, 1: 1}


def test_two_callers_at_once(pool: Pool) -> None:
    results: list[list[int]] = []

    def call() -> None:
        results.extend(pool.run(50, 2)[0] for _ in range(40))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()

    assert results == [list(range(50))] * 120


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # of fork among threads, which is the point
def test_a_forked_child_has_threads_of_its_own(pool: Pool) -> None:
    pool.run(10, 2)
    child = os.fork()
    if child == 0:
        both = threading.Barrier(2)
        done, threads = pool.run(2, 2, lambda _item, _thread: both.wait(timeout=60))
        os._exit(0 if (done, threads) == ([0, 1], {0, 1}) else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
