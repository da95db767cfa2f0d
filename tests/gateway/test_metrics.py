"""The figures as Prometheus reads them, of one gateway and of all together."""

import re

import msgspec
import pytest
from outfeed.gateway.backend import Reading
from outfeed.gateway.metrics import Metrics


def values(text: str) -> dict[str, str]:
    """Each sample's value, by its name and labels."""
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return {name: value for name, _, value in (line.rpartition(" ") for line in lines)}


def test_a_count_is_told_to_its_last_digit() -> None:
    """Of one that is rounded, Prometheus sees no increase, and then a leap."""
    metrics = Metrics()
    metrics.output_tokens = 123_456_789_012
    assert values(metrics.text())["outfeed_generated_tokens_total"] == "123456789012"


def test_whatever_a_label_says_it_is_one_label() -> None:
    odd = Reading("odd", "gauge", "Odd.", 1, {"path": 'a "quoted" \\ path\nand a line'})
    assert r'outfeed_odd{path="a \"quoted\" \\ path\nand a line"} 1' in Metrics().text([odd]).splitlines()


def test_all_gateways_histograms_add_up() -> None:
    here, there = Metrics(), Metrics()
    here.request.observe(0.25)
    there.request.observe(0.5, 3)
    here.add(there.state())
    found = values(here.text())
    assert found["outfeed_request_seconds_sum"] == "1.75"
    assert found["outfeed_request_seconds_count"] == "4"
    buckets = [
        (float(bound), int(count))
        for name, count in found.items()
        if (bound := "".join(re.findall(r'request_seconds_bucket{le="(.*)"}', name)))
    ]
    assert [count for bound, count in buckets if bound < 0.25] == [0] * 5
    assert [count for bound, count in buckets if 0.25 <= bound < 0.5] == [1]
    assert {count for bound, count in buckets if bound >= 0.5} == {4}
    assert buckets[-1] == (float("inf"), 4)


@pytest.mark.parametrize("change", ["buckets", "counts", "histograms", "nonsense", "not UTF-8"])
def test_counts_of_another_version_are_refused_and_nothing_is_added(change: str) -> None:
    there = Metrics()
    there.output_tokens = 5
    there.request.observe(0.5)
    histograms, counts, *others = msgspec.msgpack.decode(there.state())
    if change == "buckets":
        histograms[0][0].append(0)
    elif change == "counts":
        counts.append(0)
    elif change == "histograms":
        histograms.pop()
    state = msgspec.msgpack.encode([histograms, counts, *others])
    if change == "nonsense":
        state = b"nonsense"
    elif change == "not UTF-8":
        state = msgspec.msgpack.encode([histograms, counts, [["/x", 200, 1]], []]).replace(b"/x", b"\xff\xff")
    here = Metrics()
    before = here.text()
    with pytest.raises(ValueError, match="these are "):
        here.add(state)
    assert here.text() == before
