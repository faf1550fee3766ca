"""How tests are shared out among workers: a shared set-up is built on one of them only."""

from __future__ import annotations

from types import SimpleNamespace

from tests.support.distribution import GroupScheduling, group_of, order_of


class Node:
    """A worker as xdist's schedulers see it."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.given: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_groups_stay_whole_and_the_longest_begin() -> None:
    ids = [
        f"tests/{path}.py::test_{number}[@a]"
        for path in ("engine/test_a", "e2e/test_b", "e2e/test_c", "chaos/test_d")
        for number in range(4)
    ]  # fmt: skip
    ids.sort(key=order_of)
    option = SimpleNamespace(maxschedchunk=None, loadscopereorder=True)
    config = SimpleNamespace(option=option, getvalue=lambda _: ["popen"] * 2)
    scheduler = GroupScheduling(config)  # type: ignore[arg-type]  # all that it reads
    nodes = [Node("gw0"), Node("gw1")]
    for node in nodes:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, ids)

    scheduler.schedule()

    groups = [{group_of(ids[index]) for index in node.given} for node in nodes]
    assert groups[0] >= {"e2e"}
    assert groups[1] >= {"chaos"}
    assert not groups[0] & groups[1]
    assert {group_of(id_) for id_ in ids[:8]} == {"e2e"}
