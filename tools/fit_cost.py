"""Fit the cost model to DeepEP V1's published tables, and print every error.

python -m tools.fit_cost
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenyard.planner.cost import Cluster
from tokenyard.planner.fitted import Point, compare, fit
from tokenyard.planner.presets import CLUSTERS, MODELS
from tokenyard.planner.published import ELSEWHERE, LOW_LATENCY, NORMAL

MODEL = MODELS["deepseek-v3"]


def show(title: str, points: Sequence[Point]) -> None:
    errors = [abs(point.error) for point in points]
    print(f"\n{title}: mean {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}")
    for point in points:
        figure = point.figure
        print(
            f"  {figure.source:26} EP{figure.num_ranks:<4} {point.stage:9}"
            f"{point.published * 1e6:8.0f} us published {point.predicted * 1e6:8.0f} us predicted "
            f"{point.error:+7.1%}  {point.bound_by}"
        )


def numbers(cluster: Cluster) -> str:
    return (
        f"overhead {cluster.overhead * 1e6:.1f} us, node {cluster.node_rate / 1e9:.1f} GB/s, "
        f"network {cluster.network_rate / 1e9:.1f} GB/s"
    )


def main() -> None:
    start = CLUSTERS["h800"]
    found = fit([*LOW_LATENCY, *NORMAL], start, MODEL)
    print("fitted to all:", numbers(found))
    show("low latency", compare(LOW_LATENCY, {"h800": found}, MODEL))
    show("normal", compare(NORMAL, {"h800": found}, MODEL))

    few = [one for one in (*LOW_LATENCY, *NORMAL) if one.num_ranks <= 64]
    small = fit(few, start, MODEL)
    print("\nfitted to EP <= 64:", numbers(small))
    unseen = [one for one in LOW_LATENCY if one.num_ranks > 64]
    show("low latency, not fitted", compare(unseen, {"h800": small}, MODEL))
    show("other kernels and clusters, not fitted", compare(ELSEWHERE, CLUSTERS, MODEL))


if __name__ == "__main__":
    main()
