"""Bottleneck matching against all matchings, and on the worked example of the paper's Figure 9."""

from itertools import permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_opt.assigner.matching import bottleneck_matching, pair_up


def brute_force(paired, alone):
    givers, receivers = paired.shape
    slots = [*range(receivers), *[None] * givers]
    return min(
        max(alone[i] if j is None else min(alone[i], paired[i, j]) for i, j in enumerate(choice))
        for choice in set(permutations(slots, givers))
    )


@settings(max_examples=80, deadline=None)
@given(data=st.data(), givers=st.integers(1, 3), extra=st.integers(-1, 1))
def test_threshold_is_the_best_of_all_matchings(data, givers, extra):
    receivers = max(1, givers + extra)
    numbers = st.integers(0, 12)
    paired = np.array(data.draw(st.lists(numbers, min_size=givers * receivers, max_size=givers * receivers)))
    paired = paired.reshape(givers, receivers).astype(float)
    alone = np.array(data.draw(st.lists(numbers, min_size=givers, max_size=givers)), dtype=float)
    threshold, partner = bottleneck_matching(paired, alone)
    assert threshold == brute_force(paired, alone)
    used = partner[partner >= 0]
    assert len(set(used.tolist())) == len(used)
    for i, j in enumerate(partner):
        assert (alone[i] if j < 0 else paired[i, j]) <= threshold
        assert (j >= 0) == (alone[i] > threshold)


def test_every_giver_gets_a_receiver_of_its_own_when_there_are_enough():
    partner = pair_up(np.array([-1, 2, -1]), 4)
    assert partner.tolist() == [0, 2, 1]
    assert pair_up(np.array([-1, -1]), 1).tolist() == [0, -1]


def test_a_long_augmenting_path_is_found():
    size = 40
    paired = np.full((size, size), 9.0)
    for i in range(size):
        paired[i, i] = 1.0
        paired[i, (i + 1) % size] = 1.0
    paired[size - 1] = 9.0
    paired[size - 1, 0] = 1.0  # the last giver can take receiver 0 only, so all others move by one
    threshold, partner = bottleneck_matching(paired, np.full(size, 5.0))
    assert threshold == 1.0
    assert partner[size - 1] == 0
    assert sorted(partner.tolist()) == list(range(size))


def test_figure_nine():
    paired = np.array([[6.0, 6.0, 8.0], [6.0, 7.0, 9.0], [6.0, 6.0, 6.0]])  # givers MB3, MB6, MB4; receivers MB1, 2, 5
    threshold, partner = bottleneck_matching(paired, np.array([8.0, 9.0, 6.0]))
    assert threshold == 6
    assert partner.tolist() == [1, 0, -1]
    assert pair_up(partner, 3).tolist() == [1, 0, 2]
