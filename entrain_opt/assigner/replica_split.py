"""Splitting a global batch over data-parallel replicas so that both modules' work is level.

A replica's load is its sum of each module's seconds, relative to the average replica; where the shape limits memory,
patches and tokens count as well, but may be 10 % more uneven before they matter.

1. Place each sample, by falling largest load, where the larger of the replica's loads ends up least. Ties: least sum of
   loads, then fewest samples, then lowest replica.
2. From the heaviest replica that can still be relieved, move a sample away or swap it for another replica's, whichever
   leaves the heavier of the two lightest; until no exchange helps.
3. The same for each module alone, as long as the other loads' peaks stay: one giant image may pin the encoder's peak,
   which is no reason for an uneven language model.

Promise: every sample on one replica; no replica empty while another has two samples; the same samples are grouped the
same way however the batch lists them. Numbers of samples per replica are free. Price: 20 to 40 ms for 4,096 samples
over 32 replicas, 10 ms for 512 over 8; exchanges stop after a fixed number of looks, so larger batches cost little
more. Compiling takes seconds, once per installation.
"""

from __future__ import annotations

import numpy as np

from entrain_opt.assigner.work import SampleWork
from entrain_opt.assignment import FloatArray, IntArray
from entrain_opt.compiled import compiled

#: How much an uneven memory load counts against an uneven time load.
_MEMORY_WEIGHT = 0.9
#: Pairs of samples that all exchanges together may look at. A count, not a time: every rank must stop at the same one.
_LOOKS = 4_000_000
#: A smaller relative gain is rounding.
_LEAST_GAIN = 1e-9


def split_jointly(work: SampleWork, num_replicas: int, *, token_limit: int | None = None) -> IntArray:
    """Replica of each sample such that encoder and language-model work are both level.

    Args:
        work: N samples.
        num_replicas: with fewer samples than replicas some stay empty.
        token_limit: tokens that one replica may get. Kept wherever the exchanges find a way; the caller checks.

    Returns:
        [N] replica of each sample.
    """
    replica = np.zeros(work.num_samples, dtype=np.int64)
    if num_replicas == 1 or not work.num_samples:
        return replica
    shares, num_time_columns, limits = _shares(work, num_replicas, token_limit)
    # Sorting the canonical order, not the batch's own, makes ties and sums independent of how the batch lists samples.
    order = work.canonical_order
    order = order[np.argsort(-shares[order].max(axis=1), kind="stable")]
    shares = np.ascontiguousarray(shares[order])
    found, loads = _place(shares, num_replicas)
    looks = _LOOKS
    num_columns = shares.shape[1]
    everything, unlimited = np.ones(num_columns), np.full(num_columns, np.inf)
    if (loads.max(axis=0) > limits).any():
        looks = _relieve(shares, found, loads, np.isfinite(limits).astype(np.float64), unlimited, looks)
    peaks = np.maximum(loads.max(axis=0), limits)
    limits = np.where(np.isfinite(limits), peaks, np.inf)
    looks = _relieve(shares, found, loads, everything, limits, looks)
    for column in range(num_time_columns):
        only = np.zeros(num_columns)
        only[column] = 1.0
        peaks = np.minimum(np.maximum(loads.max(axis=0), 1.0), limits)
        looks = _relieve(shares, found, loads, only, peaks, looks)
    replica[order] = found
    return replica


def _shares(work: SampleWork, num_replicas: int, token_limit: int | None) -> tuple[FloatArray, int, FloatArray]:
    """[N, C] loads of each sample in units of the average replica, how many are times, and [C] their limits."""
    order = work.canonical_order
    columns: list[tuple[FloatArray | IntArray, float, float]] = [
        (work.encoder_seconds, 1.0, np.inf),
        (work.llm_seconds, 1.0, np.inf),
    ]
    if np.isfinite(work.patches_limit):
        columns.append((work.patches, _MEMORY_WEIGHT, np.inf))
    if token_limit is not None:
        # Half a token keeps rounding from refusing a replica that is exactly full.
        columns.append((work.tokens, _MEMORY_WEIGHT, token_limit + 0.5))
    elif np.isfinite(work.tokens_limit):
        columns.append((work.tokens, _MEMORY_WEIGHT, np.inf))
    shares, limits = np.zeros((work.num_samples, len(columns))), np.full(len(columns), np.inf)
    for index, (amounts, weight, limit) in enumerate(columns):
        total = float(amounts[order].sum())
        if total > 0:
            shares[:, index] = amounts * (weight * num_replicas / total)
            limits[index] = limit * (weight * num_replicas / total)
    return shares, 2, limits


@compiled
def _place(shares: FloatArray, num_replicas: int) -> tuple[IntArray, FloatArray]:
    """[N] replica of each sample placed in the given order, and [R, C] loads."""
    num_samples, num_columns = shares.shape
    replica = np.zeros(num_samples, dtype=np.int64)
    loads = np.zeros((num_replicas, num_columns))
    counts = np.zeros(num_replicas, dtype=np.int64)
    for sample in range(num_samples):
        best, best_peak, best_sum = 0, np.inf, np.inf
        for candidate in range(num_replicas):
            peak, total = 0.0, 0.0
            for column in range(num_columns):
                load = loads[candidate, column] + shares[sample, column]
                peak = max(peak, load)
                total += load
            if (peak, total, counts[candidate]) < (best_peak, best_sum, counts[best]):
                best, best_peak, best_sum = candidate, peak, total
        replica[sample] = best
        counts[best] += 1
        loads[best] += shares[sample]
    return replica, loads


@compiled
def _relieve(
    shares: FloatArray, replica: IntArray, loads: FloatArray, weights: FloatArray, limits: FloatArray, looks: int
) -> int:
    """Lower the heaviest replicas by moves and swaps, in place; returns how many looks are left.

    Args:
        shares: [N, C] loads of each sample.
        replica: [N] changed.
        loads: [R, C] changed with it.
        weights: [C] a replica is as heavy as its largest weighted load.
        limits: [C] loads that no exchange may lead to.
        looks: pairs of samples to look at, at most.
    """
    num_replicas = len(loads)
    stuck = np.zeros(num_replicas, dtype=np.bool_)
    heaviness = np.zeros(num_replicas)
    for index in range(num_replicas):
        heaviness[index] = (loads[index] * weights).max()
    while True:
        giver = -1
        for index in range(num_replicas):
            if not stuck[index] and (giver < 0 or heaviness[index] > heaviness[giver]):
                giver = index
        if giver < 0 or heaviness[giver] <= heaviness.mean() * (1 + _LEAST_GAIN):
            return looks
        members = np.flatnonzero(replica == giver)
        looks -= len(members) * (len(replica) + num_replicas)
        if looks < 0:
            return looks
        given, taken, taker = _best_exchange(shares, replica, loads, heaviness, weights, limits, giver, members)
        if given < 0:
            stuck[giver] = True
            continue
        replica[given] = taker
        if taken >= 0:
            replica[taken] = giver
        for index in (giver, taker):
            # Added up afresh: differences would let rounding pile up.
            loads[index] = 0.0
            for sample in np.flatnonzero(replica == index):
                loads[index] += shares[sample]
            heaviness[index] = (loads[index] * weights).max()
        stuck[:] = False


@compiled
def _best_exchange(
    shares: FloatArray,
    replica: IntArray,
    loads: FloatArray,
    heaviness: FloatArray,
    weights: FloatArray,
    limits: FloatArray,
    giver: int,
    members: IntArray,
) -> tuple[int, int, int]:
    """The giver's sample, the one it gets back (-1: none) and from whom; (-1, -1, -1) if no exchange helps."""
    num_samples, num_replicas, num_columns = len(replica), len(loads), shares.shape[1]
    best = heaviness[giver] * (1 - _LEAST_GAIN)
    found = (-1, -1, -1)
    for given in members:
        # After the samples come the replicas themselves: a move is a swap for nothing.
        for other in range(num_samples + num_replicas):
            taker = replica[other] if other < num_samples else other - num_samples
            if taker == giver:
                continue
            peak = 0.0
            for column in range(num_columns):
                moved = shares[given, column]
                if other < num_samples:
                    moved -= shares[other, column]
                heavier = max(loads[giver, column] - moved, loads[taker, column] + moved)
                peak = max(peak, weights[column] * heavier if heavier <= limits[column] else np.inf)
                if peak >= best:
                    break
            if peak < best:
                best = peak
                found = (given, other if other < num_samples else -1, taker)
    return found
