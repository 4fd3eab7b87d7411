"""The order of the waiting queue: a large fork does not keep others from running, and nobody waits for ever."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch_server.fairness import FairQueue

Entry = tuple[str, str, bool]


class Server:
    """Serves its queue in the order it is told, from the front."""

    def __init__(self) -> None:
        self.fair = FairQueue()
        self.queue: list[Entry] = []

    def come(self, *names: str, flow: str = "", first: bool = False) -> None:
        self.queue += [(name, flow or name, first) for name in names]

    def leave(self, name: str) -> None:
        self.queue = [entry for entry in self.queue if entry[0] != name]
        self.fair.leave(name)

    def serve(self, n: int = 1) -> list[str]:
        order = self.fair.order(self.queue)
        assert sorted(order) == list(range(len(self.queue)))
        self.queue = [self.queue[i] for i in order]
        served, self.queue = self.queue[:n], self.queue[n:]
        return [name for name, _, _ in served]

    def one_by_one(self, n: int) -> list[str]:
        return [self.serve()[0] for _ in range(n)]


def fork(n: int, name: str = "f") -> list[str]:
    return [f"{name}{i}" for i in range(n)]


def test_alone_in_its_queue_a_flow_is_served_as_it_came():
    server = Server()
    server.come(*fork(5), flow="f")
    assert server.one_by_one(5) == fork(5)


def test_single_requests_are_served_as_they_came():
    server = Server()
    server.come("b", "a", "c")
    assert server.serve() == ["b"]
    server.come("d")
    assert server.one_by_one(3) == ["a", "c", "d"]


def test_a_single_request_waits_for_one_of_a_64_fold_fork_and_not_for_all():
    server = Server()
    server.come(*fork(64), flow="f")
    server.come("single")
    assert server.serve(3) == ["f0", "single", "f1"]


def test_one_that_comes_while_a_fork_is_served_waits_for_one_of_it_at_most():
    server = Server()
    server.come(*fork(64), flow="f")
    assert server.serve(20) == fork(20)
    server.come("single")
    assert server.serve(2) == ["f20", "single"]


def test_two_forks_share_their_turns():
    server = Server()
    server.come(*fork(4, "a"), flow="a")
    server.come(*fork(4, "b"), flow="b")
    assert server.one_by_one(8) == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]


def test_a_flow_that_comes_in_pieces_is_still_one():
    server = Server()
    server.come("a0", "a1", flow="a")
    server.serve(0)
    server.come("a2", "a3", flow="a")
    server.come("b")
    assert server.one_by_one(5) == ["a0", "b", "a1", "a2", "a3"]


def test_a_flow_that_was_quiet_gets_no_credit_and_pays_no_debt():
    server = Server()
    server.come(*fork(8), flow="f")
    server.one_by_one(8)
    server.come("f8", flow="f")
    server.come("other")
    assert server.one_by_one(2) == ["f8", "other"]
    server.come("f9", "f10", flow="f")
    server.come("fresh")
    assert server.one_by_one(3) == ["f9", "fresh", "f10"]


def test_the_retracted_go_first_in_the_order_in_which_they_stand():
    server = Server()
    server.come(*fork(3), flow="f")
    server.serve(0)
    server.come("z", "y", first=True)
    assert server.serve(3) == ["z", "y", "f0"]


def test_one_that_is_back_before_anybody_asked_for_the_order_goes_first_too():
    """The queue is not ordered in every step: a request may run and be retracted in between."""
    server = Server()
    server.come(*fork(3), flow="f")
    server.come("r")
    assert server.serve(4) == ["f0", "r", "f1", "f2"]
    server.come("g0", "g1", flow="g")
    server.come("f2", flow="f", first=True)
    assert server.serve() == ["f2"]
    assert server.one_by_one(2) == ["g0", "g1"]


def test_to_go_first_costs_the_flow_nothing():
    server = Server()
    server.come("f0", "f1", flow="f", first=True)
    server.come("f2", flow="f")
    server.come("a")
    assert server.one_by_one(4) == ["f0", "f1", "f2", "a"]


def test_who_is_cancelled_in_the_queue_was_not_served():
    """The last of a fork goes away; who comes then still waits for one of the others only."""
    server = Server()
    server.come(*fork(64), flow="f")
    server.serve(1)
    server.leave("f63")
    server.come("single")
    assert server.serve(2) == ["f1", "single"]


def test_who_leaves_without_having_been_in_the_queue_changes_nothing():
    server = Server()
    server.come("a")
    server.fair.leave("nobody")
    assert (server.serve(), server.fair.now) == (["a"], 0)


def test_nothing_is_remembered_of_those_that_are_served():
    server = Server()
    for i in range(500):
        server.come(*fork(2, f"{i}-"), flow=str(i))
        server.serve(2)
    server.serve()
    assert len(server.fair._turns) + len(server.fair._last) == 0


def test_an_empty_queue_has_an_order():
    assert FairQueue().order([]) == []


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=30))
def test_nobody_waits_for_more_than_its_share(steps: list[tuple[int, int, int]]):
    """Steps of (flow that asks, how many requests, how many are served then). A request that finds k of its own flow
    before it waits for k + 2 of every other flow at most (the turn that is on, and its own), whatever comes after."""
    server, served, before = Server(), [], {}
    flow_of: dict[str, str] = {}
    for number, (flow, n, serve) in enumerate(steps):
        for i in range(n):
            name = f"{number}.{i}"
            before[name] = sum(other == str(flow) for _, other, _ in server.queue), len(served)
            flow_of[name] = str(flow)
            server.come(name, flow=str(flow))
        served += server.serve(serve)
    served += server.serve(len(server.queue))
    for at, name in enumerate(served):
        own, came = before[name]
        for other in set(flow_of.values()) - {flow_of[name]}:
            assert sum(flow_of[one] == other for one in served[came:at]) <= own + 2
    for flow in set(flow_of.values()):
        mine = [name for name in served if flow_of[name] == flow]
        assert mine == [name for name in flow_of if flow_of[name] == flow], "a flow keeps its own order"


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from(["flow", "same flow", "single"]), min_size=1, max_size=8), st.integers(1, 12))
def test_against_an_endless_stream_of_others_the_last_of_a_fork_is_served(crowd: list[str], n: int):
    """In every step as many come as are served."""
    server = Server()
    server.come(*fork(n), flow="f")
    served: list[str] = []
    for step in range(400):
        for i, kind in enumerate(crowd):
            server.come(f"{step}.{i}", flow={"flow": f"g{step}", "same flow": "g", "single": ""}[kind])
        served += server.serve(len(crowd))
        if f"f{n - 1}" in served:
            assert [name for name in served if name.startswith("f")] == fork(n)
            return
    raise AssertionError(f"of {n}, only {[name for name in served if name.startswith('f')]} were served")
