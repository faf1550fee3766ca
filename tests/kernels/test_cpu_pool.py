"""The threads that the CPU kernels share: every item is done once, whoever comes, and when."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from loraplex_kernels.cpu.build import FLAGS, SOURCES, load_library


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

    def __init__(self, library: ctypes.CDLL) -> None:
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


@pytest.fixture(scope="module", params=["futex", "condition"])
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pool:
    """With threads that sleep as on Linux, and as they do elsewhere."""
    folder = tmp_path_factory.mktemp("pool")
    if request.param == "futex":
        return Pool(load_library("pool", folder))
    compiler = shutil.which("cc") or "gcc"
    command = [compiler, *FLAGS, "-U__linux__", "-o", str(folder / "pool.so"), SOURCES / "pool.c"]
    subprocess.run(command, check=True)
    return Pool(ctypes.CDLL(str(folder / "pool.so")))


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


def _both(pool: Pool, look: object) -> None:
    """The caller and another thread do an item each."""
    assert pool.run(2, 2, look) == ([0, 1], {0, 1})


def test_idle_threads_take_no_time(pool: Pool) -> None:
    pool.run(100, 4)
    time.sleep(0.1)
    before = time.process_time()

    time.sleep(0.5)

    assert time.process_time() - before < 0.1


def test_only_those_are_woken_for_whom_there_is_work(
    pool: Pool, request: pytest.FixtureRequest
) -> None:
    if "futex" not in request.node.name:
        pytest.skip("a condition wakes everyone")
    pool.run(64, 64)

    def num_switches(num_items: int, num_threads: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        for _ in range(20):
            time.sleep(0.01)  # until all sleep
            pool.run(num_items, num_threads)
        return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before

    # Were all 63 woken, they would go to sleep again: 1260 times.
    assert num_switches(8, 2) < 300
    assert num_switches(2, 64) < 300


def test_every_thread_treats_subnormals_as_the_caller_does(pool: Pool) -> None:
    both = threading.Barrier(2)
    small, half = 1e-307, 2.0**-10
    products: dict[int, float] = {}

    def multiply(_item: int, thread: int) -> None:
        both.wait(timeout=60)
        products[thread] = small * half

    _both(pool, multiply)
    assert products[0] == products[1] > 0.0
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot take subnormals for zero")
    try:
        _both(pool, multiply)
    finally:
        torch.set_flush_denormal(False)

    assert products == {0: 0.0, 1: 0.0}


def test_a_fault_in_a_thread_reaches_its_handler_and_other_signals_do_not(pool: Pool) -> None:
    both = threading.Barrier(2)
    blocked: dict[int, set[int]] = {}

    def look(_item: int, thread: int) -> None:
        both.wait(timeout=60)
        blocked[thread] = {int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, ())}

    _both(pool, look)

    assert not blocked[1] & {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
    assert blocked[1] >= {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # of fork among threads, which is the point
def test_a_child_forked_in_the_middle_of_a_job_has_threads_too(pool: Pool) -> None:
    is_in_job, is_over = threading.Event(), threading.Event()

    def wait(_item: int, _thread: int) -> None:
        is_in_job.set()
        is_over.wait(60)

    caller = threading.Thread(target=pool.run, args=(10, 3, wait))
    caller.start()
    assert is_in_job.wait(60)
    child = os.fork()
    if child == 0:
        both = threading.Barrier(2)
        done, threads = pool.run(2, 2, lambda _item, _thread: both.wait(timeout=60))
        os._exit(0 if (done, threads) == ([0, 1], {0, 1}) else 1)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        is_over.set()
        caller.join()


def test_without_more_threads_the_caller_does_all(tmp_path: Path) -> None:
    """Where the system refuses threads: to a user who has too many, or in a cgroup."""
    (tmp_path / "few.c").write_text(
        f"""
        #define _GNU_SOURCE
        #include <errno.h>
        #include <pthread.h>
        static int refuse(pthread_t *thread, const void *attributes, void *start, void *argument) {{
            (void)thread, (void)attributes, (void)start, (void)argument;
            return EAGAIN;
        }}
        #define pthread_create(thread, attributes, start, argument) \\
            refuse(thread, attributes, (void *)(start), argument)
        #include "{SOURCES / "pool.c"}"
        """
    )
    library = tmp_path / "few.so"
    compiler = shutil.which("cc") or "gcc"
    subprocess.run([compiler, *FLAGS, "-o", library, tmp_path / "few.c"], check=True)

    few = Pool(ctypes.CDLL(str(library)))
    assert few.run(20, 4, lambda _item, _thread: time.sleep(0.005)) == (list(range(20)), {0})
