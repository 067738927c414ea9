"""The README's example of the bare API, and how far one draw speaks for others.

    python benchmarks/readme_example.py

Prints the README's lines (seed 0), then, over many seeds, each policy's mean makespan relative to `in_order` and how
often it is the fastest. Seconds are drawn, not measured; nothing is executed.
"""

from __future__ import annotations

import numpy as np

from entrain_opt import BatchCosts, PipelineShape, assign_microbatches, simulate
from entrain_opt.simulator import Timeline

POLICIES = ("in_order", "karmarkar_karp", "pairwise", "auto")
SEEDS = 100


def timelines(seed: int) -> dict[str, Timeline]:
    """The README's example for one seed, by policy."""
    rng = np.random.default_rng(seed)
    encoder, llm = rng.lognormal(-4, 1, 64), rng.lognormal(-3.5, 1, 64)
    encoder[rng.random(64) < 0.2] = 0
    costs = BatchCosts(encoder_seconds=encoder, llm_seconds=llm)
    shape = PipelineShape(encoder_stages=3, llm_stages=5)
    found = {}
    for policy in POLICIES:
        batch = assign_microbatches(costs, shape, num_microbatches=16, policy=policy)
        found[policy] = simulate(costs, batch, shape)
    return found


def main() -> None:
    for policy, timeline in timelines(0).items():
        print(f"{policy:14} {timeline.makespan_seconds:.2f} s, bubble {timeline.bubble_share:.0%}")
    seconds = np.array([[t.makespan_seconds for t in timelines(seed).values()] for seed in range(SEEDS)])
    relative, fastest = (seconds / seconds[:, :1]).mean(axis=0), seconds.argmin(axis=1)
    print(f"\nover {SEEDS} seeds:")
    for index, policy in enumerate(POLICIES):
        wins = int((fastest == index).sum())
        print(f"{policy:14} {relative[index]:.2f} x the time of in_order, fastest in {wins}")


if __name__ == "__main__":
    main()
