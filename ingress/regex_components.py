"""A graph's strongly connected components: which of its nodes can come to each other again.

Must not know what the nodes are.
"""

from collections.abc import Callable, Iterable


def components(size: int, before: Callable[[int], Iterable[int]]) -> list[list[int]]:
    """Return the components of the nodes 1 to `size` - 1, those that lead to others first (Tarjan's order).

    `before` gives the nodes from which one is come to.
    """
    order: list[list[int]] = []
    index = [0] * size
    low = [0] * size
    counter = 1
    stack: list[int] = []
    on_stack = [False] * size
    for root in range(1, size):
        if index[root]:
            continue
        work = [(root, iter(before(root)))]
        index[root] = low[root] = counter
        counter += 1
        stack.append(root)
        on_stack[root] = True
        while work:
            node, rest = work[-1]
            for other in rest:
                if not index[other]:
                    index[other] = low[other] = counter
                    counter += 1
                    stack.append(other)
                    on_stack[other] = True
                    work.append((other, iter(before(other))))
                    break
                if on_stack[other]:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        top = stack.pop()
                        on_stack[top] = False
                        component.append(top)
                        if top == node:
                            break
                    order.append(component)
    return order
