"""Fair shares between tenants: virtual token counters (VTC), under priority classes.

Each tenant has an account per priority class. It is charged for what the tenant is served, divided by
the tenant's weight; the request to serve next is one of the tenant with the least on its account, so
that tenants who always have something waiting are served in proportion to their weights, whatever the
others send. A tenant who had nothing waiting comes back with as much on the account as whoever was
served last had before that: it is next, but idling saves nothing up.

Charges: INPUT_WEIGHT per prompt token, when a request is admitted (less what a cache hit spares it, and
once however often it is preempted and computed anew); OUTPUT_WEIGHT per token put out.

Between classes the higher goes first, except that a class (`aging_s`) and a tenant within its class
(TENANT_PATIENCE * aging_s) that have been passed over for so long get one turn: one request is next in
line before all others, and runs as the first of the highest class.

Sources: Sheng et al., Fairness in Serving Large Language Models, OSDI 2024, algorithm 2, theorem 4.4; who
comes back is levelled as in start-time fair queuing (Goyal et al., SIGCOMM 1996), which keeps the bound and
lets a tenant who asks for little pass the next request of one who asks for all.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from operator import attrgetter

from loraplex_engine.policies.base import Rank, ServiceGap
from loraplex_engine.request import Request

# Chosen, not measured: a token decoded costs more than one of a prompt, whose tokens share one reading of
# the model's weights; by how much depends on model, machine and load. The paper's experiments use 1 and 2.
INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
TENANT_PATIENCE = 10
QUEUE_SHARE = 9  # queued requests of a tenant for each that still may be queued
MAX_IDLE_ACCOUNTS = 1024  # in a class
MAX_IDLE_CLASSES = 64

_by_seq = attrgetter("seq")


def max_charge(
    *, max_model_len: int, max_num_seqs: int, num_kv_tokens: int, is_reserving: bool
) -> float:
    """The bound on the service gap, for weights of 1: by so much at most can the accounts of two waiting
    tenants of a class differ. The service that they get in any interval, divided by their weights,
    differs by at most twice as much.

    A tenant's account is the least when a request of it is admitted, and nobody's falls below that later;
    until its next admission it grows only by what the requests that it then has running may still be
    charged. Each of these has a row and at most `max_model_len` tokens; and where admission reserves, all
    their tokens fit the cache at once, which makes this the paper's max(w_p * L_input, w_q * M).

    Service is tokens as they are charged, not time. Not counted, so outside the bound: drafts that are
    rejected, tokens computed anew after a preemption, and the time that grammars take to compile and to
    mask. Who makes much of that gets more of the machine than the accounts say.

    Why grammars' time is not charged, though it is measured:
    * The bound above would be gone: what a request may still be charged is known when it is admitted, and
      seconds that a mask will take are not. So would the order's independence of the machine: two replays
      of one trace would serve tenants differently.
    * It is bounded where it costs others something: `structured.mask_budget` lets a tenant's masks take
      TENANT_S of a shared step, whatever its account says, and leaves its rows out until more than that
      is worked off. Compiling has a process and a thread of its own, in which tenants take turns.
    """
    num_tokens = max_num_seqs * max_model_len
    if is_reserving:
        num_tokens = min(num_tokens, num_kv_tokens)
    return max(INPUT_WEIGHT, OUTPUT_WEIGHT) * num_tokens


@dataclass(slots=True, eq=False)
class _Account:
    """One tenant in one class."""

    tenant_id: str
    weight: float = 1.0
    counter: float = 0.0  # service so far, divided by weight
    waiting: list[Request] = field(default_factory=list)  # by arrival
    num_running: int = 0
    allowance: float = 0.0  # what its running requests may still be charged, undivided
    waits_since_unix_s: float = 0.0  # its last admission, or when it began to wait
    # All that it has waiting was skipped when last looked at: it has no claim to what others got then.
    is_blocked: bool = False


@dataclass(slots=True, eq=False)
class _Class:
    """The tenants of one priority."""

    priority: int
    accounts: dict[str, _Account] = field(default_factory=dict)
    waiting: dict[str, _Account] = field(default_factory=dict)  # those with waiting requests
    # What was on the account of the tenant whose request was admitted last, before it was charged. It
    # never falls, and everybody who waits and could be served has at least that much on the account.
    virtual_time: float = 0.0
    waits_since_unix_s: float = 0.0  # as for an account
    forget_beyond: int = MAX_IDLE_ACCOUNTS

    def lift(self, account: _Account) -> None:
        """Level an account that had no claim to what others got."""
        account.counter = max(account.counter, self.virtual_time)

    def is_idle(self) -> bool:
        return not self.waiting and not any(a.num_running for a in self.accounts.values())


class FairPolicy:
    """See the module's header. Cost: O(waiting tenants) per step, O(log) per request looked at."""

    def __init__(self, aging_s: float, most_charged: float = math.inf) -> None:
        """Keep no accounts yet.

        Args:
            most_charged: `max_charge` of the replica's limits; only reported.
        """
        if not aging_s > 0:
            raise ValueError(f"aging_s is {aging_s}: it must be above 0")
        self.aging_s = aging_s
        self._most_charged = most_charged
        self._widest_gap = self._widest_promised = 0.0
        self._classes: dict[int, _Class] = {}
        self._num_waiting = 0
        self._now_unix_s = 0.0

    def __len__(self) -> int:
        return self._num_waiting

    # --------------------------------------------------------------------------- the queue

    def has_place_for(self, tenant_id: str, num_places: int, count: int = 1) -> bool:
        """Who has little in the queue always finds it open: a tenant may have so many times what is free
        there, and no more. Alone it may so fill nine tenths of the queue, and of n that would each take
        all, each gets 9 parts in 9n + 1, which leaves room for one who comes new. Several at once are
        queued if they would be one by one; an empty queue takes as many as it has places.

        Source: Choudhury and Hahne, Dynamic queue length thresholds, IEEE/ACM ToN 1998.
        """
        if count > num_places:
            return False
        if not self._num_waiting:
            return True
        accounts = (group.waiting.get(tenant_id) for group in self._classes.values())
        num_own = sum(len(account.waiting) for account in accounts if account is not None)
        return num_own + count - 1 < QUEUE_SHARE * (num_places - count + 1)

    def push(self, request: Request) -> None:
        group, account = self._open_account(request)
        now_unix_s = max(self._now_unix_s, request.arrived_at_unix_s)
        # What may fail comes before what it would leave half done: no account is changed for a request
        # that is not queued, nor does a tenant wait without one.
        is_first = not account.waiting
        insort(account.waiting, request, key=_by_seq)
        if is_first:
            if not group.waiting:
                group.waits_since_unix_s = now_unix_s
            account.waits_since_unix_s = now_unix_s
            account.is_blocked = False
            group.lift(account)
            group.waiting[account.tenant_id] = account
        account.weight = request.generate.weight
        request.served_priority = request.admitted_at_charge = None
        self._num_waiting += 1

    def remove(self, request: Request) -> None:
        group, account = self._find_account(request)
        index = bisect_left(account.waiting, request.seq, key=_by_seq)
        is_there = index < len(account.waiting) and account.waiting[index] is request
        assert is_there, f"{request.identity} is not queued"
        del account.waiting[index]
        self._num_waiting -= 1
        if not account.waiting:
            del group.waiting[account.tenant_id]

    def requests(self) -> Iterator[Request]:
        for group in self._classes.values():
            for account in group.waiting.values():
                yield from account.waiting

    def begin_step(self, now_unix_s: float) -> None:
        self._now_unix_s = now_unix_s
        for group in self._classes.values():
            counters = [a.counter for a in group.waiting.values() if not a.is_blocked]
            if len(counters) > 1:
                gap = max(counters) - min(counters)
                self._widest_gap = max(self._widest_gap, gap)

    def service_gap(self) -> ServiceGap:
        weights = [
            account.weight
            for group in self._classes.values()
            for account in group.accounts.values()
            if account.waiting or account.num_running
        ]
        return ServiceGap(
            widest=self._widest_gap,
            promised=self._widest_promised,
            bound=self._most_charged / min(weights, default=1.0),
        )

    def check(self, running: Sequence[Request]) -> None:
        num_running: Counter[tuple[int, str]] = Counter()
        allowances: defaultdict[tuple[int, str], float] = defaultdict(float)
        for request in running:
            key = (request.generate.priority, request.generate.tenant_id)
            num_running[key] += 1
            uncharged = OUTPUT_WEIGHT * (request.num_tokens - request.num_charged_tokens)
            allowances[key] += self._allowance(request) + uncharged
        num_waiting = 0
        for group in self._classes.values():
            for tenant_id, account in group.accounts.items():
                key = (group.priority, tenant_id)
                assert account.num_running == num_running.pop(key, 0), f"{key}: who runs?"
                assert abs(account.allowance - allowances[key]) < 1e-6, f"{key}: a wrong promise"
                assert (
                    account.is_blocked
                    or not account.waiting
                    or (account.counter >= group.virtual_time)
                ), f"{key}: somebody with less was passed over"
                assert (group.waiting.get(tenant_id) is account) == bool(account.waiting)
                seqs = [request.seq for request in account.waiting]
                assert seqs == sorted(set(seqs)), f"{key}: its queue is out of order"
                num_waiting += len(seqs)
        assert not num_running, "somebody runs without an account"
        assert num_waiting == self._num_waiting

    def in_order(self) -> Iterator[Request]:
        yield from self._turns()
        for priority in sorted(self._classes, reverse=True):
            yield from self._fair_order(self._classes[priority].waiting.values())

    def rank(self, request: Request) -> Rank:
        """Blocks are taken back from the tenant who has had most."""
        if request.served_priority is not None:
            return (-request.served_priority, -math.inf, request.seq)
        _, account = self._find_account(request)
        return (-request.generate.priority, account.counter, request.seq)

    def prefill_rank(self, request: Request) -> Rank:
        """A prefill keeps the place in which it was admitted, whatever its tenant is charged meanwhile;
        but who comes back, level with the tenant that was served last, passes what that has under way.
        """
        if request.served_priority is not None:
            return (-request.served_priority, -math.inf, -math.inf, request.seq)
        _, account = self._find_account(request)
        start = request.admitted_at_charge
        if start is None:
            start = account.counter
        return (-request.generate.priority, start, account.counter, request.seq)

    def _fair_order(self, accounts: Iterable[_Account]) -> Iterator[Request]:
        """The requests of tenants who wait in one class: of the least account, the earliest first."""
        heap = [(account.counter, account.waiting[0].seq, 0, account) for account in accounts]
        heapify(heap)
        while heap:
            _, _, index, account = heap[0]
            request = account.waiting[index]
            yield request
            if index < len(account.waiting) and account.waiting[index] is request:
                index += 1  # skipped
            if index < len(account.waiting):
                heapreplace(heap, (account.counter, account.waiting[index].seq, index, account))
                continue
            heappop(heap)
            if account.waiting:
                account.is_blocked = True

    def _turns(self) -> Iterator[Request]:
        """One request each of the classes and tenants that were passed over for too long."""
        groups = [group for group in self._classes.values() if group.waiting]
        overdue: list[tuple[float, int, list[_Account]]] = []
        for group in groups:
            if self._now_unix_s - group.waits_since_unix_s >= self.aging_s:
                accounts = list(group.waiting.values())
                overdue.append((group.waits_since_unix_s, len(overdue), accounts))
            for account in group.waiting.values():
                since_unix_s = account.waits_since_unix_s
                if self._now_unix_s - since_unix_s >= TENANT_PATIENCE * self.aging_s:
                    overdue.append((since_unix_s, len(overdue), [account]))
        if not overdue:
            return
        highest = max(group.priority for group in groups)
        for _, _, accounts in sorted(overdue):
            for request in self._fair_order([a for a in accounts if a.waiting]):
                num_waiting = self._num_waiting
                request.served_priority = highest
                try:
                    yield request
                finally:
                    if self._num_waiting == num_waiting:
                        request.served_priority = None
                if self._num_waiting < num_waiting:
                    break

    # --------------------------------------------------------------------------- accounts

    def admit(self, request: Request) -> None:
        group, account = self._find_account(request)
        account.is_blocked = False
        group.lift(account)
        if request.served_priority is None:  # else it may not be the least
            group.virtual_time = account.counter
        ahead = account.counter - group.virtual_time
        self.remove(request)
        first = max(request.num_charged_tokens, request.num_computed_tokens)
        prompt = INPUT_WEIGHT * max(0, request.num_prompt_tokens - first)
        request.num_charged_tokens = max(request.num_charged_tokens, request.num_prompt_tokens)
        request.admitted_at_charge = account.counter
        account.num_running += 1
        account.allowance += self._allowance(request)
        promised = (prompt + account.allowance) / account.weight
        self._widest_promised = max(self._widest_promised, ahead + promised)
        account.counter += prompt / account.weight
        group.waits_since_unix_s = account.waits_since_unix_s = self._now_unix_s

    def charge(self, request: Request) -> None:
        count = request.num_tokens - request.num_charged_tokens
        if count:
            _, account = self._find_account(request)
            account.counter += OUTPUT_WEIGHT * count / account.weight
            account.allowance -= OUTPUT_WEIGHT * count
            request.num_charged_tokens = request.num_tokens

    def leave(self, request: Request) -> None:
        self.charge(request)
        group, account = self._find_account(request)
        account.num_running -= 1
        account.allowance -= self._allowance(request)
        self._forget_idle(group)

    def _allowance(self, request: Request) -> float:
        """What a request may still be charged for output."""
        num_most = request.num_prompt_tokens + request.sampling.max_tokens
        return OUTPUT_WEIGHT * (num_most - request.num_tokens)

    def _find_account(self, request: Request) -> tuple[_Class, _Account]:
        group = self._classes[request.generate.priority]
        return group, group.accounts[request.generate.tenant_id]

    def _open_account(self, request: Request) -> tuple[_Class, _Account]:
        priority, tenant_id = request.generate.priority, request.generate.tenant_id
        group = self._classes.get(priority)
        if group is None:
            if len(self._classes) >= MAX_IDLE_CLASSES:
                self._classes = {p: g for p, g in self._classes.items() if not g.is_idle()}
            group = self._classes[priority] = _Class(priority)
        account = group.accounts.get(tenant_id)
        if account is None:
            account = group.accounts[tenant_id] = _Account(tenant_id)
        return group, account

    def _forget_idle(self, group: _Class) -> None:
        """Bound what is kept. A tenant that is forgotten may have been ahead of others, by no more than
        the bound; who idles while a thousand others come and go is let off that.
        """
        if len(group.accounts) <= group.forget_beyond:
            return
        group.accounts = {
            tenant_id: account
            for tenant_id, account in group.accounts.items()
            if account.waiting or account.num_running
        }
        group.forget_beyond = max(MAX_IDLE_ACCOUNTS, 2 * len(group.accounts))
