"""Components of a graph: nodes that can come to each other, and in which order they are told."""

from hypothesis import given
from hypothesis import strategies as st
from outfeed.ingress.regex_components import components

NODES = 8


def reached(before: list[list[int]], node: int) -> set[int]:
    """Return the nodes that lead to one, and itself."""
    found, waiting = {node}, [node]
    while waiting:
        more = [other for other in before[waiting.pop()] if other not in found]
        found.update(more)
        waiting += more
    return found


@given(st.lists(st.lists(st.integers(1, NODES - 1), max_size=3), min_size=NODES, max_size=NODES))
def test_nodes_that_lead_to_each_other_are_together_and_come_after_what_leads_to_them(
    before: list[list[int]],
) -> None:
    found = components(NODES, before.__getitem__)
    assert sorted(node for component in found for node in component) == list(range(1, NODES))
    leads = {node: reached(before, node) for node in range(1, NODES)}
    told: set[int] = set()
    for component in found:
        told.update(component)
        for node in component:
            together = {other for other in leads[node] if node in leads[other]}
            assert set(component) == together
            assert leads[node] <= told


def test_a_long_chain_needs_no_deep_stack() -> None:
    long = 100_000
    found = components(long, lambda node: [node - 1] if node > 1 else [long - 1])
    assert [len(component) for component in found] == [long - 1]
